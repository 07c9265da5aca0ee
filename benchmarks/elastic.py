"""Leased work: how many tasks a second a master leases, and how much memory it needs for many.

A task is leased and acknowledged, each in a transaction of the ledger's file. The ledger alone is measured
with one task at a time; the service, in a process of its own, with clients that lease some at a time over
sockets, as trainers do. Memory is that of the ledger's process after a tenth of the tasks, and after all.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from common import Report, parser

from karvan.protocol.work import WORK_CALLS
from karvan.wire import Client
from karvan.work.ledger import Ledger, NoTask
from karvan.work.spec import WorkSpec

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
        clients = [Client("master", address, calls=WORK_CALLS) for _ in range(CLIENTS)]
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
    """TaskLease and acknowledge tasks until there are none."""
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


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__ or "").parse_args()
    report = Report("elastic", arguments.quick)
    rounds = 3 if arguments.quick else 9
    rates: dict[str, list[float]] = {"ledger": [], "service": []}
    for _ in range(rounds):
        for name, measure, tasks in (("ledger", ledger_rate, 5_000), ("service", service_rate, 20_000)):
            with tempfile.TemporaryDirectory() as folder:
                rates[name].append(measure(Path(folder), tasks))
    for name, measured in rates.items():
        report.figures[f"{name}_leases_per_s"] = sorted(measured)[len(measured) // 2]
    many = 200_000 if arguments.quick else 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        early, late, size = memory_growth(Path(folder), many)
    report.figures |= {"tasks": many, "memory_mb_early": early, "memory_mb_late": late, "file_mb": size}
    report.ratios["memory_late_vs_early"] = late / early
    report.finish()
    report.show()
    report.write(arguments.json)


if __name__ == "__main__":
    main()
