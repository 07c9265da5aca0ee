"""Sharded tables over two processes, beside one process with two threads, and beside TorchRec.

- dlrm: the training job of `train.py` (DLRM, Parquet to updated rows) with the same global batch of 4096: two
  ranks of one thread each against one process with two threads;
- bytes: what the ranks of that job send to each other for embeddings, per sample, beside the least there is
  to send: each rank's distinct keys that another one owns, their vectors back, their gradients there;
- sparse step: lookup, pooling, backward, Adagrad on 26 tables; TorchRec (gloo, its better of row-wise and
  table-wise sharding) gets ids that were mapped to rows, Karvan 64-bit keys.

All jobs are started before anything is timed, and take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import train
from common import Report, parser
from ranks import DIM, JobOfRanks

BATCH, FEATURES = 4096, 26


def rates(jobs: dict[str, JobOfRanks], rounds: int) -> dict[str, float]:
    """Samples per second of each job: the median of its bursts, the first of which is not counted."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            answer = job.burst()
            if turn:
                found[name].append(answer["samples"] / answer["seconds"])
    return {name: statistics.median(values) for name, values in found.items()}


def whole_jobs(report: Report, rounds: int, rows: int, steps: int, epochs: int) -> None:
    """Training with two ranks and with one, and the bytes of the former."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        data = train.Data(Path(folder), steps, rows)
        options = {"path": str(data.folder / "train.parquet"), "rows": rows, "batch": BATCH, "epochs": epochs}
        jobs = {
            "one_process": JobOfRanks("dlrm", 1, 2, wire="float32", **options),
            "two_ranks": JobOfRanks("dlrm", 2, 1, wire="float32", **options),
        }
        try:
            made = rates(jobs, rounds)
            counted = jobs["two_ranks"].burst()
        finally:
            for job in jobs.values():
                job.end()
    for name, rate in made.items():
        report.add_timing(f"dlrm_{name}", BATCH / rate, BATCH)
    report.ratios["two_ranks_vs_one_process"] = made["two_ranks"] / made["one_process"]
    bound = counted["crossing_keys"] * (8 + 2 * 4 * DIM)
    report.ratios["bytes_vs_bound"] = counted["bytes"] / bound
    report.figures["bytes_per_sample"] = counted["bytes"] / counted["samples"]
    everything = sum(counted[f"{channel}_bytes"] for channel in ("main", "fit"))  # metrics and positions, too
    report.figures["all_bytes_per_sample"] = everything / counted["samples"]
    for channel in ("main", "fit"):
        report.figures[f"{channel}_collectives_per_step"] = (
            counted[f"{channel}_collectives"] / counted["steps"]
        )


def sparse_steps(report: Report, rounds: int, rows: int, steps: int) -> None:
    """The sparse step beside TorchRec's."""
    options = {"features": FEATURES, "rows": rows, "batch": BATCH, "steps": steps}
    jobs = {"karvan": JobOfRanks("karvan", 2, 1, **options)}
    try:
        for sharding in ("row", "table"):
            jobs[f"torchrec_{sharding}"] = JobOfRanks("torchrec", 2, 1, sharding=sharding, **options)
        made = rates(jobs, rounds)
    finally:
        for job in jobs.values():
            job.end()
    for name, rate in made.items():
        report.add_timing(f"sparse_{name}", BATCH / rate, BATCH)
    best = max(made["torchrec_row"], made["torchrec_table"])
    report.ratios["sparse_step_vs_torchrec"] = made["karvan"] / best


def main() -> None:
    """Run the jobs, print the tables and write the JSON."""
    args = parser((__doc__ or "").splitlines()[0]).parse_args()
    report = Report("sharded", args.quick)
    if args.quick:
        sparse_steps(report, 3, 50_000, 10)
        whole_jobs(report, 1, 20_000, 6, 2)
    else:
        sparse_steps(report, 7, 500_000, 20)
        whole_jobs(report, 3, 300_000, 12, 3)
    report.finish()
    if args.json != "-":
        report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
