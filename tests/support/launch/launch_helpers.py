"""Runs jobs whose roles are small programs, and waits for what happens to them."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from bare_jobs import NoGroup, NoWork
from forked_programs import ForkedKeeper, ForkedProgram, fork_servers
from processes import is_alive, kill
from support_paths import support_path

from karvan.job.roles import start_order
from karvan.launch.engines.local import LocalEngine
from karvan.launch.health import Timing
from karvan.launch.job_spec import JobSpec
from karvan.launch.merged_logs import MergedLogs
from karvan.launch.run_folder import RunFolder
from karvan.launch.supervisor import Supervisor

NEW = partial(subprocess.Popen, text=True)
PATIENCE = 60.0  # seconds, on a busy machine; what is waited for takes a few hundredths
QUICK = Timing(backoff=0.01, check=0.01, settle=0.0, pause=1.0, lost=3.0)


class Known:
    """A registry that nobody talks to."""

    address = "127.0.0.1:4711"

    def __init__(self):
        self.sick = set()
        self.present = set()
        self.reports = {}
        self.generations = []

    def forget(self, role, index):
        pass

    def begin_generation(self, generation):
        self.generations.append(generation)

    def activities(self):
        return self.reports

    def healthy(self, role, index):
        name = f"{role}-{index}"
        return False if name in self.sick else True if name in self.present else None


def small_commands(folder):
    """Every role notes what happens to it in the folder."""
    command = (sys.executable, "-IS", str(support_path("launch/role_program.py")), str(folder))
    return dict.fromkeys(start_order(), command)


def wait_until(condition, what="something", seconds=PATIENCE):
    """Wait for a condition to be true of something, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {seconds:g} s for {what}")


def keepers_in(folder):
    """All keepers whose files are in this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = place.read_bytes().split(b"\0")
            if any(word.endswith(b"engines/keeper.py") for word in words) and any(
                word.startswith(os.fsencode(folder)) for word in words
            ):
                found.append(int(place.parent.name))
    return found


def spec_of(roles, **more):
    return JobSpec.model_validate({"name": "test", "entry": "train.py", "roles": roles, **more})


class Place:
    """A folder in which roles note what happens to them."""

    def __init__(self, folder):
        self.folder = folder

    def events(self, event, name=""):
        """What happened, to processes whose name begins so."""
        path = self.folder / "events"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a process may be writing the last line
        found = [json.loads(line) for line in whole.splitlines()]
        return [each for each in found if each["event"] == event and each["name"].startswith(name)]

    def wait_for(self, event, name, count=1):
        """Wait until something has happened so many times; all of it."""
        wait_until(lambda: len(self.events(event, name)) >= count, f"{event} of {name}, {count} times")
        return self.events(event, name)

    def order(self, file, text=""):
        """Leave a file that changes what roles do, whole from the start."""
        (self.folder / f"{file}.new").write_text(str(text))
        (self.folder / f"{file}.new").rename(self.folder / file)

    def kill(self, name):
        """Kill the newest process of this name."""
        os.kill(self.events("start", name)[-1]["pid"], signal.SIGKILL)


class Running(Place):
    """A job that runs in a thread of this process, forked or in new processes."""

    def __init__(self, folder, roles, timing=None, commands=None, group=None, work=None, forked=True, **more):
        super().__init__(folder)
        self.registry = Known()
        self._output = io.StringIO()
        logs = MergedLogs(stream=self._output)
        timing = timing or QUICK
        engine = LocalEngine(logs.write, folder / "run-folder")
        if forked:
            fork_servers()  # starting them takes seconds, for which nothing below waits
            engine.start_keeper = ForkedKeeper
        self.job = Supervisor(
            spec_of(roles, **more),
            engine,
            self.registry,
            logs,
            commands or small_commands(folder),
            work or NoWork(),
            group or NoGroup(),
            timing,
        )
        self._outcome = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        self._outcome = self.job.run()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:  # a job that is left running would hold up all other tests
            self.job.interrupt(signal.SIGINT)
            self.job.interrupt(signal.SIGINT)
        self._thread.join(PATIENCE)

    def outcome(self):
        """Wait for the end."""
        self._thread.join(PATIENCE)
        assert self._outcome is not None
        return self._outcome

    @property
    def lines(self):
        return self._output.getvalue().splitlines()


class Launched(Place):
    """A launcher that is a process of its own; kind: `NEW` for one whose job has new processes."""

    program = support_path("launch/launcher_program.py")

    def __init__(self, folder, text, args=(), kind=ForkedProgram, **more):
        super().__init__(folder)
        (folder / "job.yaml").write_text(f"name: test\nentry: train.py\n{text}\n")
        command = [sys.executable, str(self.program), str(folder), *args]
        self.process = kind(command, stdout=subprocess.PIPE, **more)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        for keeper in keepers_in(self.run_folder):
            kill(keeper)

    def output(self):
        """Wait for its end; what it printed."""
        return self.process.communicate(timeout=PATIENCE)[0].splitlines()

    @property
    def run_folder(self):
        """Where the launcher and its master leave their files."""
        return Path(os.environ["KARVAN_JOBS"]) / "test"

    def master(self):
        """The process of the master, once it listens."""
        path = self.run_folder / "master.json"
        wait_until(path.exists, "the master")
        return json.loads(path.read_text())["pid"]

    def ended(self):
        """Whether nothing of the job runs any more."""
        alive = [each["pid"] for each in self.events("start") if is_alive(each["pid"])]
        return not alive and not RunFolder(self.run_folder).runs
