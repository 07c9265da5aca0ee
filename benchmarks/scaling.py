"""How a sharded job would scale from 8 to 1024 ranks: a simulation from costs measured here.

Measured: the seconds of a rank's own work in a step (DLRM, batch 2048, one thread, nothing sent), with their
scatter; what a message of gloo costs between two processes, as so many seconds each and so many a byte.
Assumed: every rank has a core and a batch of its own (weak scaling); keys are spread evenly over owners; a
rank sends its W - 1 messages of an exchange one after the other, while it receives; dense gradients go around
a ring; nothing hides behind computation but the exchange of keys; a step is as long as its slowest rank,
whose work is drawn from the times measured. Networks: the loopback as measured, and 25 Gbit/s with 20
microseconds a message.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import train
from common import Report, parser, table
from ranks import DIM, JobOfRanks

BATCH = 2048
RANKS = (1, 2, 8, 32, 128, 512, 1024)
NETWORKS = {"25 Gbit/s": (20e-6, 8 / 25e9)}  # seconds a message, seconds a byte


def message_costs(rounds: int) -> tuple[float, float]:
    """Seconds of a message and of a byte, by a line through the times of small and large exchanges."""
    times = []
    sizes = (64, 1 << 20)
    for size in sizes:
        job = JobOfRanks("messages", 2, 1, size=size, steps=30)
        try:
            times.append(statistics.median(_seconds(job) for _ in range(rounds)))
        finally:
            job.end()
    per_byte = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    return times[0], per_byte


def _seconds(job: JobOfRanks) -> float:
    answer = job.burst()
    return answer["seconds"] / (answer["steps"] / 2)


def step_seconds(
    work: np.ndarray, ranks: int, network: tuple[float, float], bytes_: dict[str, float]
) -> float:
    """The mean of simulated steps: the slowest rank's work and what goes over the network."""
    rng = np.random.default_rng(ranks)
    slowest = rng.choice(work, (200, ranks)).max(1).mean()
    message, byte = network
    crossing = (ranks - 1) / ranks
    exchanges = 2 * ((ranks - 1) * message + crossing * bytes_["vectors"] * byte)  # vectors, gradients
    ring = 2 * (ranks - 1) * message + 2 * crossing * bytes_["dense"] * byte if ranks > 1 else 0.0
    return float(slowest + (exchanges if ranks > 1 else 0.0) + ring)


def main() -> None:
    """Measure, simulate, print the table and write the JSON."""
    args = parser((__doc__ or "").splitlines()[0]).parse_args()
    report = Report("scaling", args.quick)
    rounds, rows, epochs = (3, 20_000, 2) if args.quick else (9, 300_000, 6)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        data = train.Data(Path(folder), 6, rows)
        path = str(data.folder / "train.parquet")
        job = JobOfRanks("work", 1, 1, path=path, rows=rows, batch=BATCH, epochs=epochs)
        try:
            job.burst()
            answers = job.burst()
        finally:
            job.end()
    work = np.array([value for name, value in sorted(answers.items()) if name.startswith("step_")])
    bytes_ = {"vectors": answers["keys"] * 4 * DIM, "dense": answers["dense_bytes"]}
    message, byte = message_costs(rounds)
    networks = {"loopback": (message, byte)} | NETWORKS
    report.figures |= {
        "work_ms": 1e3 * float(np.median(work)),
        "work_scatter": float(work.std() / work.mean()),
        "message_us": 1e6 * message,
        "gigabytes_per_s": 1e-9 / byte if byte else float("inf"),
        "keys_of_a_batch": answers["keys"],
    }
    lines = []
    for name, network in networks.items():
        alone = step_seconds(work, 1, network, bytes_)
        for ranks in RANKS:
            seconds = step_seconds(work, ranks, network, bytes_)
            report.figures[f"efficiency_{ranks}_ranks_{name.split()[0]}"] = alone / seconds
            lines.append(
                [
                    name,
                    str(ranks),
                    f"{1e3 * seconds:.1f}",
                    f"{BATCH * ranks / seconds:,.0f}",
                    f"{alone / seconds:.2f}",
                ]
            )
    report.finish()
    print(table(["network", "ranks", "step ms", "samples/s", "efficiency"], lines))
    if args.json != "-":
        report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
