"""Training with parameter servers, beside the same training in one process.

- dlrm: the training job of `train.py` (DLRM, Parquet to updated rows, batch 4096): one process with all
  threads and its rows in memory, against one trainer with two parameter servers of one thread each, all of
  them on the same cores; hybrid (staleness 4, and 8) and synchronous;
- delay: the same with 5 ms added each way between trainer and servers, by a proxy; synchronous training with
  this delay is left out of --quick;
- bytes: keys, vectors and gradients on the wire, beside the least there is to send: each batch's distinct
  keys, their vectors and their gradients, once;
- serve: lookups of distinct keys of one table of dim 16 from one server over loopback: keys per second of the
  server's own CPU time.

All jobs are started before anything is timed, and take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import train
from common import Report, cores, parser
from delay import Network
from ranks import DIM, JobOfRanks

BATCH, SERVERS, DELAY = 4096, 2, 0.005


class ServerProcesses:
    """Parameter servers, each a process with one thread; ends with the block it is used in."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self._processes = []
        for index in range(count):
            environment = {
                **os.environ,
                "KARVAN_INDEX": str(index),
                "KARVAN_COUNT": str(count),
                "KARVAN_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "karvan", "role", "parameter-server"],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            self._processes.append(process)

    @cached_property
    def addresses(self) -> list[str]:
        """Where they are, once they are there."""
        lines = [process.stderr.readline() for process in self._processes if process.stderr is not None]
        return [line.split()[-1] for line in lines]  # "… at host:port"

    def delayed(self, stack: ExitStack, seconds: float) -> list[str]:
        """Their addresses by way of a proxy that delays."""
        return [stack.enter_context(Network(address, seconds)).address for address in self.addresses]


def jobs(report: Report, rounds: int, rows: int, steps: int, epochs: int, quick: bool = False) -> None:
    """Training in memory and with servers."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="."))
        data = train.Data(Path(folder), steps, rows)
        options = {"path": str(data.folder / "train.parquet"), "rows": rows, "batch": BATCH, "epochs": epochs}
        made = {"memory": JobOfRanks("dlrm", 1, cores(), wire="float32", wait=False, **options)}
        stack.callback(made["memory"].end)
        kinds = {
            "hybrid": (4, 0.0),
            "sync": (1, 0.0),
            "hybrid_8": (8, 0.0),
            "hybrid_8_delayed": (8, DELAY),
        }
        if not quick:
            kinds["sync_delayed"] = (1, DELAY)
        started = {name: ServerProcesses(stack, SERVERS) for name in kinds}  # all at once
        for name, (staleness, delay) in kinds.items():
            servers = started[name]
            addresses = servers.delayed(stack, delay) if delay else servers.addresses
            made[name] = JobOfRanks(
                "remote_dlrm", 1, cores(), wait=False, servers=addresses, staleness=staleness, **options
            )
            stack.callback(made[name].end)
        for job in made.values():
            job.wait()
        rates: dict[str, list[float]] = {name: [] for name in made}
        last = {}
        for turn in range(rounds + 1):
            for name, job in made.items():
                last[name] = job.burst()
                if turn:
                    rates[name].append(last[name]["samples"] / last[name]["seconds"])
    rate = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in rate.items():
        report.add_timing(name, BATCH / value, BATCH)
    report.ratios["hybrid_vs_memory"] = rate["hybrid"] / rate["memory"]
    report.ratios["sync_vs_memory"] = rate["sync"] / rate["memory"]
    report.ratios["delayed_vs_undelayed"] = rate["hybrid_8_delayed"] / rate["hybrid_8"]
    if not quick:
        report.figures["sync_delayed_vs_undelayed"] = rate["sync_delayed"] / rate["sync"]
    hybrid = last["hybrid"]
    report.ratios["bytes_vs_bound"] = hybrid["bytes"] / (hybrid["keys"] * (8 + 2 * 4 * DIM))
    report.figures["bytes_per_sample"] = hybrid["bytes"] / hybrid["samples"]
    report.figures["most_batches_out"] = int(hybrid["staleness"])
    for name in ("hybrid", "sync", "hybrid_8_delayed"):
        for call in ("pull", "push"):
            for share in ("p50", "p99"):
                report.figures[f"{name}_{call}_{share}_ms"] = last[name][f"{call}_{share}"] * 1e3
    for role in ("trainer", "servers"):
        report.figures[f"hybrid_{role}_cpu_ms_per_step"] = hybrid[f"{role}_cpu"] / hybrid["steps"] * 1e3


def serving(report: Report, rounds: int, rows: int, count: int) -> None:
    """What a server serves."""
    with ExitStack() as stack:
        servers = ServerProcesses(stack, 1)
        job = JobOfRanks("pulls", 1, 1, servers=servers.addresses, rows=rows, keys=40_000, count=count)
        stack.callback(job.end)
        answers = [job.burst() for _ in range(rounds + 1)][1:]
    report.figures["keys_per_s_and_core"] = statistics.median(
        a["samples"] / a["servers_cpu"] for a in answers
    )
    report.figures["keys_per_s"] = statistics.median(a["samples"] / a["seconds"] for a in answers)


def main() -> None:
    """Run the jobs, print the tables and write the JSON."""
    args = parser((__doc__ or "").splitlines()[0]).parse_args()
    report = Report("hybrid", args.quick)
    if args.quick:
        serving(report, 1, 200_000, 30)
        jobs(report, 1, 5_000, 4, 2, quick=True)
    else:
        serving(report, 5, 2_000_000, 100)
        jobs(report, 3, 100_000, 12, 3)
    report.finish()
    if args.json != "-":
        report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
