"""Elastic jobs: what they cost while nothing happens, how fast they recover, and how fast a master leases.

- elastic_vs_fixed: samples a second of a launched job (DLRM of `train.py`, two trainers of one thread, one
  server) with `sharding: dynamic`, beside the same job with fixed shares; modes hybrid and sync, in turns.
- recovery: from a kill -9 of a trainer to the next step of the other, and to the first step of its
  replacement; from a kill of the server to the next step.
- loss_of_half_vs_ideal: a job that loses one of two trainers half-way, beside the time that the rates of two
  trainers and of one give.
- ray_vs_local: the elastic job of the first line on a Ray cluster of this machine (`--engine ray`), beside
  the same without Ray (`--engine local`), in turns.
- simulated_goodput: of 1,000 workers with these costs and published rates of preemption, the worst of them
  (`support/goodput.py`).

--quick measures elastic_vs_fixed in mode hybrid, and leases. --only measures one part.

A task is leased and acknowledged, each in a transaction of the ledger's file. The ledger alone is measured
with one task at a time; the service, in a process of its own, with clients that lease some at a time over
sockets, as trainers do. Memory is that of the ledger's process after a tenth of the tasks, and after all.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import train
from common import Report, parser
from support.elastic_jobs import TimedJob, rate
from support.goodput import DAY, PUBLISHED, Costs, simulate

from karvan.wire import Client
from karvan.work.ledger import Ledger, NoTask
from karvan.work.task import WorkSpec

PARTS = ("comparison", "engines", "recovery", "loss", "leases")
QUICK_PARTS = ("comparison", "leases")
TASKS_AT_ONCE = 32
CLIENTS = 2
MASTER = """
import sys
from pathlib import Path
from karvan.wire import Server
from karvan.work.service import WorkService
server = Server(WorkService(Path(sys.argv[1])), "127.0.0.1")
print(server.address, flush=True)
sys.stdin.read()
"""


def spec_of(tasks: int) -> WorkSpec:
    """Return work of this many tasks, in an order of its own."""
    return WorkSpec((("log", tasks * 100),), 100, seed=1)


def resident_mb() -> float:
    """Return the memory of this process in MB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def ledger_rate(folder: Path, tasks: int) -> float:
    """Return how many tasks a second the ledger leases and acknowledges, one by one."""
    ledger = Ledger(folder / "one.db", spec_of(tasks))
    begin = time.perf_counter()
    while not isinstance(leases := ledger.lease("trainer"), NoTask):
        ledger.acknowledge({lease.token: lease.task.records for lease in leases})
    seconds = time.perf_counter() - begin
    ledger.close()
    return tasks / seconds


def service_rate(folder: Path, tasks: int) -> float:
    """Return how many tasks a second a master leases to clients of other threads, over sockets."""
    command = [sys.executable, "-c", MASTER, str(folder / "service.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as master:
        assert master.stdout is not None
        address = master.stdout.readline().strip()
        clients = [Client("master", address) for _ in range(CLIENTS)]
        for client in clients:
            client.call("open_work", {"spec": asdict(spec_of(tasks))})
        threads = [
            threading.Thread(target=work, args=(client, f"trainer {number}"))
            for number, client in enumerate(clients)
        ]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        for client in clients:
            client.close()
        master.kill()
    return tasks / seconds


def work(client: Client, holder: str) -> None:
    """Lease and acknowledge tasks until there are none."""
    head = {"holder": holder, "last_token": 0, "kinds": ["train"], "most": TASKS_AT_ONCE}
    while leases := client.call("lease_tasks", head).head["leases"]:
        done = [[lease["token"], lease["task"]["records"]] for lease in leases]
        client.call("acknowledge_records", {"holder": holder, "done": done})
        head["last_token"] = leases[-1]["token"]


def memory_growth(folder: Path, tasks: int) -> tuple[float, float, float]:
    """Return the memory after a tenth of the tasks and after all, and the size of the file, in MB."""
    path = folder / "many.db"
    ledger = Ledger(path, spec_of(tasks))
    done, early = 0, 0.0
    while not isinstance(leases := ledger.lease("trainer", most=1000), NoTask):
        ledger.acknowledge({lease.token: lease.task.records for lease in leases})
        done += len(leases)
        if done <= tasks // 10:
            early = resident_mb()
    late = resident_mb()
    size = path.stat().st_size / 2**20
    ledger.close()
    return early, late, size


FIXED = "mode: {mode}"
ELASTIC = "mode: {mode}\nsharding: dynamic"


def undisturbed(folder: Path, settings: str, trainers: str, epochs: int, engine: str = "local") -> float:
    """Return samples a second of a job that nothing happens to."""
    with TimedJob(folder, settings, trainers, epochs, engine) as job:
        job.wait()
        return rate(job.longest())


def compare(report: Report, folder: Path, rounds: int, epochs: int, modes: Sequence[str]) -> None:
    """Elastic jobs beside fixed ones, in turns."""
    for mode in modes:
        rates: dict[str, list[float]] = {"fixed": [], "elastic": []}
        for _ in range(rounds):
            for name, settings in (("fixed", FIXED), ("elastic", ELASTIC)):
                settings = settings.format(mode=mode)
                rates[name].append(undisturbed(folder, settings, "replicas: 2", epochs))
        medians = {name: statistics.median(measured) for name, measured in rates.items()}
        for name, median in medians.items():
            report.figures[f"{mode}_{name}_samples_per_s"] = median
        ratio = "elastic_vs_fixed" if mode == "hybrid" else f"elastic_vs_fixed_{mode}"
        report.ratios[ratio] = medians["elastic"] / medians["fixed"]


def compare_engines(report: Report, folder: Path, rounds: int, epochs: int) -> None:
    """The elastic job on a Ray cluster beside the same without one, in turns."""
    settings = ELASTIC.format(mode="hybrid")
    rates: dict[str, list[float]] = {"local": [], "ray": []}
    for _ in range(rounds):
        for engine, measured in rates.items():
            measured.append(undisturbed(folder, settings, "replicas: 2", epochs, engine))
    medians = {engine: statistics.median(measured) for engine, measured in rates.items()}
    for engine, median in medians.items():
        report.figures[f"{engine}_engine_samples_per_s"] = median
    report.ratios["ray_vs_local"] = medians["ray"] / medians["local"]


def recover(report: Report, folder: Path, epochs: int) -> Costs:
    """Kill a trainer and a server of an elastic job; returns what that costs."""
    with TimedJob(folder, ELASTIC.format(mode="hybrid"), "replicas: 2", epochs) as job:
        job.wait_for(20, trainers=2)
        before = job.longest()
        known = set(job.steps())
        moment = job.kill_trainer()
        # What the dead one had sent may complete a step of two: the next one is that of one trainer.
        next_step = job.wait_for_step_after(moment, most=1)
        joined = job.wait_for_step_after(moment, but=known)
        job.wait_for(len(before) + 20, trainers=2)
        steps = job.longest()
        gaps = [(late.time - early.time, late, early) for early, late in pairwise(steps)]
        rejoin = max((gap for gap, late, early in gaps if late.trainers > early.trainers), default=0.0)
        known = set(job.steps())
        restored = job.wait_for_step_after(job.kill_server(), but=known)  # all trainers start again
    step_seconds = statistics.median(late.time - early.time for early, late in pairwise(before))
    report.figures |= {
        "seconds_to_next_step_after_trainer": next_step,
        "seconds_to_replacement": joined,
        "seconds_of_pause_for_joiner": rejoin,
        "seconds_to_next_step_after_server": restored,
        "step_seconds": step_seconds,
    }
    return Costs(
        step_seconds=step_seconds,
        reform_seconds=next_step,
        replace_seconds=joined,
        rejoin_seconds=rejoin,
        checkpoint_seconds=step_seconds,
        checkpoint_every=600.0,
    )


def lose_half(report: Report, folder: Path, epochs: int, steps: int) -> None:
    """A job that loses one of two trainers half-way."""
    elastic, trainers = ELASTIC.format(mode="hybrid"), "replicas: {}, min: 1, max: 2"
    one = undisturbed(folder, elastic, trainers.format(1), max(1, epochs // 2))
    two = undisturbed(folder, elastic, trainers.format(2), epochs)
    samples = epochs * steps * train.BATCH
    with TimedJob(folder, elastic, trainers.format(2), epochs) as job:
        while sum(step.samples for step in job.longest()) < samples / 2:
            time.sleep(0.01)
        job.scale(1)
        job.wait()
        made = job.longest()
    both = [step for step in made if step.trainers == 2]
    alone = [step for step in made if step.trainers == 1]
    ideal = sum(each.samples for each in both) / two + sum(each.samples for each in alone) / one
    report.figures |= {"one_trainer_samples_per_s": one, "two_trainers_samples_per_s": two}
    report.ratios["loss_of_half_vs_ideal"] = (made[-1].time - made[0].time) / ideal


def goodput(report: Report, costs: Costs) -> None:
    """Simulate many workers with the costs of recovery that were measured."""
    for name, seconds in PUBLISHED.items():
        made = simulate(costs, workers=1000, mean_between_failures=seconds, seconds=7 * DAY, seed=0)
        report.figures[f"goodput: {name}"] = made.goodput
    report.ratios["simulated_goodput"] = min(
        value for name, value in report.figures.items() if str(name).startswith("goodput: ")
    )


def leases(report: Report, rounds: int, tasks: int) -> None:
    """How fast a master leases, and how much memory it needs for many tasks."""
    rates: dict[str, list[float]] = {"ledger": [], "service": []}
    for _ in range(rounds):
        for name, measure, count in (("ledger", ledger_rate, 5_000), ("service", service_rate, 20_000)):
            with tempfile.TemporaryDirectory() as folder:
                rates[name].append(measure(Path(folder), count))
    for name, measured in rates.items():
        report.figures[f"{name}_leases_per_s"] = sorted(measured)[len(measured) // 2]
    with tempfile.TemporaryDirectory() as folder:
        early, late, size = memory_growth(Path(folder), tasks)
    report.figures |= {"tasks": tasks, "memory_mb_early": early, "memory_mb_late": late, "file_mb": size}
    report.ratios["memory_late_vs_early"] = late / early


def main() -> None:
    """Measure and report."""
    arguments_parser = parser(__doc__ or "")
    arguments_parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    arguments = arguments_parser.parse_args()
    quick = arguments.quick
    parts = arguments.only or (QUICK_PARTS if quick else PARTS)
    steps, epochs, rounds = (40, 1, 1) if quick else (100, 2, 3)
    report = Report("elastic", quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train.Data(folder, steps, 20_000)
        if "comparison" in parts:
            compare(report, folder, rounds, epochs, ["hybrid"] if quick else ["hybrid", "sync"])
        if "engines" in parts and importlib.util.find_spec("ray") is not None:  # an extra
            compare_engines(report, folder, rounds, 2 * epochs)
        if "recovery" in parts:
            goodput(report, recover(report, folder, 1000))
        if "loss" in parts:
            lose_half(report, folder, 2 * epochs, steps)
    if "leases" in parts:
        leases(report, 1 if quick else 9, 100_000 if quick else 10_000_000)
    report.finish()
    report.show()
    report.write(arguments.json)


if __name__ == "__main__":
    main()
