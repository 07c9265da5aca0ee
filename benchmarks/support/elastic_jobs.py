"""Jobs of `karvan launch` whose steps are timed, for `elastic.py`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

PROGRAM = Path(__file__).parent.parent / "elastic_program.py"


class Step(NamedTuple):
    """A step as a process has noted it."""

    time: float
    number: int
    samples: int
    trainers: int


class TimedJob:
    """A launched job; ends with the block it is used in.

    folder: has the data. settings: lines of its job.yaml. trainers: the section of its trainers, without
    arguments. engine: the engine that runs its roles; Ray's has a cluster of its own, on this machine.
    """

    def __init__(
        self, folder: Path, settings: str, trainers: str, epochs: int, engine: str = "local"
    ) -> None:
        self._folder = folder
        for name in ("times", "jobs", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "times").mkdir()
        arguments = f"args: ['{folder}', {epochs}], threads: 1"
        (folder / "job.yaml").write_text(
            f"name: elastic\nentry: {PROGRAM}\n{settings}\ncheckpoints: {folder / 'checkpoints'}\n"
            f"roles:\n  trainers: {{{trainers}, {arguments}}}\n"
            "  parameter_servers: {replicas: 1, threads: 1}\n"
        )
        self._environment = {**os.environ, "KARVAN_JOBS": str(folder / "jobs")}
        self._environment.pop("RAY_ADDRESS", None)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "karvan", "launch", str(folder / "job.yaml"), "--engine", engine],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> TimedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def steps(self) -> dict[int, list[Step]]:
        """The steps of each process so far."""
        found = {}
        for path in (self._folder / "times").iterdir():
            lines = [line.split() for line in path.read_text().split("\n")[:-1]]
            found[int(path.name)] = [Step(float(a), int(b), int(c), int(d)) for a, b, c, d in lines]
        return found

    def longest(self) -> list[Step]:
        """The steps of the process that has made most."""
        return max(self.steps().values(), key=len, default=[])

    def wait_for(self, steps: int, trainers: int) -> None:
        """Wait until so many trainers have made so many steps together."""
        while sum(step.trainers == trainers for step in self.longest()) < steps:
            self._check()
            time.sleep(0.01)

    def wait(self) -> None:
        """Wait for its end."""
        while self._process.poll() is None:
            time.sleep(0.01)
        if self._process.returncode:
            raise RuntimeError((self._folder / "log").read_text())

    def kill_trainer(self) -> float:
        """Kill a trainer; when that was."""
        pid = min(self.steps())
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def kill_server(self) -> float:
        """Kill the parameter server; when that was."""
        for place in Path("/proc").glob("[0-9]*/environ"):
            try:
                values = place.read_bytes().split(b"\0")
            except OSError:
                continue
            of_job = f"KARVAN_CHECKPOINTS={self._folder / 'checkpoints'}".encode() in values
            if of_job and b"KARVAN_ROLE=parameter-server" in values:
                os.kill(int(place.parent.name), signal.SIGKILL)
        return time.time()

    def scale(self, trainers: int) -> None:
        """Change the number of trainers."""
        command = [sys.executable, "-m", "karvan", "scale", "elastic", f"trainers={trainers}"]
        subprocess.run(command, env=self._environment, check=True, stdout=subprocess.DEVNULL)

    def wait_for_step_after(
        self, moment: float, but: set[int] = frozenset(), most: int = sys.maxsize
    ) -> float:
        """Wait for a step after a moment, of other processes than these and of few trainers: seconds."""
        while True:
            later = [
                step.time - moment
                for pid, steps in self.steps().items()
                for step in steps
                if pid not in but and step.time > moment and step.trainers <= most
            ]
            if later:
                return min(later)
            self._check()
            time.sleep(0.01)

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "log").read_text())


def rate(steps: list[Step], skip: float = 0.25) -> float:
    """Return samples a second, without the first steps, in which everything is new."""
    counted = steps[int(skip * len(steps)) :]
    return sum(step.samples for step in counted[1:]) / (counted[-1].time - counted[0].time)
