"""Forked processes of jobs are what new processes are: arguments, environment, streams, signals and ends."""

import json
import os
import resource
import signal
import sys
import threading

import pytest
from forked_programs import ForkedKeeper
from launch_helpers import wait_until
from processes import kill, parent_of

from karvan.job.roles import Role
from karvan.launch.engines.base import Process
from karvan.launch.engines.local import LocalEngine, Restart

_PROGRAM = """
import sys
print("forked", "multiprocessing.forkserver" in sys.modules)
import gc, json, locale, logging, multiprocessing, os, resource, signal, threading, warnings
if not sys.flags.isolated:
    import neighbour_module

def name(handler):
    return getattr(handler, "__name__", str(handler))

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
environ = open("/proc/self/environ", "rb").read().rstrip(b"\\0").split(b"\\0")
limits = [each for each in dir(resource) if each.startswith("RLIMIT_")]
seen = {
    "arguments": [sys.argv, sys.orig_argv, open("/proc/self/cmdline").read().rstrip("\\0")],
    "main": [__name__, sys.modules["__main__"].__dict__ is globals()],
    "path": sys.path,
    "safe": [sys.flags.safe_path, sys.flags.isolated, sys.flags.no_site],
    "environment": sorted(os.environ.items()),
    "variables": sorted(map(os.fsdecode, environ)),
    "folder": os.getcwd(),
    "umask": status["Umask"],
    "oom": open("/proc/self/oom_score_adj").read(),
    "limits": {each: resource.getrlimit(getattr(resource, each)) for each in limits},
    "leader": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "files": sorted(os.listdir("/proc/self/fd")),
    "input": sys.stdin.read(),
    "streams": [
        (stream.encoding, stream.errors, stream.write_through, stream.line_buffering, stream.isatty())
        for stream in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "handlers": {int(each): name(signal.getsignal(each)) for each in signal.valid_signals()},
    # Without the signals above 31, which threads of the C library use.
    "kernel": [int(status[each], 16) & 0x7FFFFFFF for each in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")],
    "threads": [threading.active_count(), threading.current_thread().name],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "logging": [logging.root.level, len(logging.root.handlers)],
    "multiprocessing": multiprocessing.current_process().daemon,
    "locale": locale.getlocale(),
    "switch": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.excepthook is sys.__excepthook__],
}

if "torch" in sys.argv:
    import torch
    import karvan
    from karvan.clock import clock

    seen["torch"] = [
        torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
        torch.is_grad_enabled(), torch.distributed.is_initialized(), karvan.get_num_threads(),
        type(clock).__name__, sorted(karvan.__all__),
    ]
print("seen", json.dumps(seen))

def wait():
    print("ready")
    signal.pause()

{
    "return": lambda: None,
    "number": lambda: sys.exit(7),
    "text": lambda: sys.exit("not so"),
    "error": lambda: [][0],
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "wait": wait,
}[sys.argv[1]]()
"""

_TEXT = "import runpy; runpy.run_path('program.py', run_name='__main__')"


class Ran:
    """A process that an engine has run, and what it saw."""

    def __init__(self, folder, forked, monkeypatch, command, role=Role.TRAINER, number=None):
        keeper = ForkedKeeper if forked else LocalEngine.start_keeper
        self.lines, ended = [], threading.Event()
        with monkeypatch.context() as patch:
            if forked:
                patch.setattr(LocalEngine, "start_keeper", staticmethod(keeper))
            restart = Restart(unless=folder) if role is Role.MASTER else None
            engine = LocalEngine(
                lambda name, line: self.lines.append(line), folder, away=60.0, restart=restart
            )
            environment = {"MINE": "é\udcff", "KARVAN_PROCESS": "number"}
            process = Process(role, 0, tuple(map(str, command)), environment)
            self.handle = engine.start(process, lambda *_: ended.set())
            if number is not None:
                wait_until(lambda: "ready" in self.lines, "the process")
                kill(self.handle.pid, number)
            assert ended.wait(60)
        self.code = self.handle.poll()
        assert f"forked {forked}" in self.lines
        [text] = [line for line in self.lines if line.startswith("seen ")] or ["seen null"]
        self.seen = json.loads(text.removeprefix("seen "))
        self.rest = [line for line in self.lines if not line.startswith(("forked ", "seen ", " "))]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "neighbour_module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:elsewhere:{tmp_path}")
    torch = (sys.executable, tmp_path / "program.py", "return", "é b", "torch")

    def compare(command=torch, **more):
        """One process of each kind, which have seen the same and ended the same way."""
        new, forked = (Ran(tmp_path, kind, monkeypatch, command, **more) for kind in (False, True))
        assert forked.seen == new.seen
        assert forked.rest == new.rest
        assert forked.code == new.code
        return forked

    return compare


@pytest.mark.parametrize("how", ["return", "number", "text", "error", "kill", "abort"])
def test_a_forked_process_ends_like_a_new_one(compare, tmp_path, how):
    compare((sys.executable, tmp_path / "program.py", how))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_like_a_new_one(compare, tmp_path, number):
    compare((sys.executable, tmp_path / "program.py", "wait"), number=number)


@pytest.mark.parametrize(
    "options",
    [("-P", "-m", "program"), ("-m", "program"), ("-c", _TEXT), ("-IS", "-c", _TEXT)],
    ids=["safe", "module", "text", "bare"],
)
def test_every_kind_of_command_sees_the_same(compare, options):
    compare((sys.executable, *options, "return"))


def test_it_has_the_limits_ignored_signals_and_masks_of_the_one_that_started_it(compare, monkeypatch):
    core = resource.getrlimit(resource.RLIMIT_CORE)
    umask, ignores = os.umask(0o077), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (1, core[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        seen = compare().seen
        master = compare((sys.executable, "-P", "-m", "program", "return"), role=Role.MASTER).seen
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, core)
        signal.signal(signal.SIGHUP, ignores)
        os.umask(umask)
    assert seen["limits"]["RLIMIT_CORE"][0] == 1
    assert seen["umask"].strip() == "0077"
    assert seen["handlers"][str(int(signal.SIGHUP))] == "1"
    assert seen["torch"][0] == 2
    assert master["kernel"][0] != seen["kernel"][0]  # signals wait until the master is ready for them


def test_a_keeper_that_is_killed_takes_its_process_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalEngine, "start_keeper", staticmethod(ForkedKeeper))
    lines, ended = [], threading.Event()
    engine = LocalEngine(lambda name, line: lines.append(line), tmp_path)
    code = "import time; print('ready'); time.sleep(1000)"
    process = Process(Role.TRAINER, 0, (sys.executable, "-c", code), {"KARVAN_PROCESS": "number"})
    handle = engine.start(process, lambda *_: ended.set())
    wait_until(lambda: lines)
    keeper = parent_of(handle.pid)
    assert parent_of(keeper) != os.getpid()
    kill(keeper)
    assert ended.wait(60)
    assert handle.poll() == -9
