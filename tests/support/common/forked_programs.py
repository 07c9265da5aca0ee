"""Programs of tests as forks of a process that has imported torch and karvan, which takes seconds.

`ForkedProgram(command, …)` is used like `subprocess.Popen(command, text=True, …)` for commands of
`sys.executable` and a script, `-m` and a module, or `-c` and a text; `run_forked` is like `subprocess.run`
that captures text. It is a process with its own environment, arguments, folder, streams, signal handlers and
exit code; tests/test_forked_programs.py compares both. Tests of what a program imports, reads at its start or
does when the interpreter ends start new processes.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from contextlib import suppress
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, Popen, TimeoutExpired

_ROOM = "ROOM_FOR_VARIABLES"  # that /proc shows, in the process that is forked
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
_PR_SET_PDEATHSIG = 1
_servers = {}  # in processes that may use them: where fork servers listen
_options = ()  # in forks of a server: those of commands that they run


def fork_context():
    """Processes that are forked from the one that has imported all of that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fork_imports"])
    # It outlives the test that first needs it, so it is not to look like a process of that test's job.
    jobs = os.environ.pop("KARVAN_JOBS", None)
    os.environ[_ROOM] = "x" * 16_000
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[_ROOM]
        if jobs is not None:
            os.environ["KARVAN_JOBS"] = jobs
    return context


def prepare_fork(environment, folder, command=(sys.executable,)):
    """Give a fork what a new process has: its environment and folder, Ctrl-C, random numbers, threads."""
    set_environment(command, environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "torch" not in sys.modules:
        return
    import numpy as np
    import torch

    np.random.seed()
    if "OMP_NUM_THREADS" in environment:  # torch has read that of the process that was forked
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def set_environment(command, environment):
    """Replace the environment, also what /proc shows of it and of the command."""
    sys.orig_argv = list(command)
    os.environ.clear()
    os.environ.update(environment)
    for text, (start, end) in zip(_shown(command, environment), _places(), strict=True):
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def fits(command, environment):
    """Whether /proc can show a command and its environment whole."""
    return all(
        len(text) <= end - start
        for text, (start, end) in zip(_shown(command, environment), _places(), strict=True)
    )


def _shown(command, environment):
    variables = [f"{name}={value}" for name, value in environment.items()]
    return [b"".join(os.fsencode(word) + b"\0" for word in words) for words in (command, variables)]


def _places():
    """Where this process has its command and its environment in memory; see proc(5), stat."""
    with open("/proc/self/stat") as file:
        numbers = list(map(int, file.read().rpartition(")")[2].split()[45:49]))
    return [numbers[:2], numbers[2:]]


def reset_signals(ignored=()):
    """The signal handlers of a new interpreter; ignored: the signals that its parent ignores."""
    always = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in {*ignored, *always} else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_fork(code):
    """End as an interpreter does, which forks do not: streams, threads, functions of atexit, streams."""
    _flush()
    threading._shutdown()
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


class ForkedProgram:
    """A program in a fork; as much of `subprocess.Popen` as tests use, with text in its pipes."""

    def __init__(self, command, *, env=None, cwd=None, stdin=None, stdout=None, stderr=None):
        interpreter, *self.args = map(os.fspath, command)
        assert interpreter == sys.executable, f"expected a command of {sys.executable}, got {interpreter}"
        self.returncode = None
        opened = []  # for the fork; closed here once it has them
        files = []
        pipes = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            pipe = None
            if stream == PIPE:
                read, write = os.pipe()
                file, end = (read, write) if number == 0 else (write, read)
                opened.append(file)
                pipe = os.fdopen(end, "w" if number == 0 else "r")
            elif stream == DEVNULL:
                file = os.open(os.devnull, os.O_RDWR)
                opened.append(file)
            elif stream == STDOUT:
                file = files[1].number
            elif stream is None:
                file = number
            else:
                file = stream if isinstance(stream, int) else stream.fileno()
            files.append(SentFile(file))
            pipes.append(pipe)
        self.stdin, self.stdout, self.stderr = pipes
        environment, folder = dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd())
        values = (self.args, environment, folder, files, fork_servers())
        self._process = fork_context().Process(target=_run, args=values, daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel  # ready when it has ended, for multiprocessing.connection.wait
        for file in opened:
            os.close(file)

    def poll(self):
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, and others have noticed
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, input=None, timeout=None):
        """Write and read until it ends; (stdout, stderr), None where there is no pipe."""
        if self.stdin is not None and not self.stdin.closed:
            with suppress(BrokenPipeError):
                self.stdin.write(input or "")
                self.stdin.close()
        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe is not None and not pipe.closed]
        texts = {}
        threads = [
            threading.Thread(target=lambda pipe=pipe: texts.update({pipe: pipe.read()}), daemon=True)
            for pipe in pipes
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        for pipe in pipes:
            pipe.close()
        return texts.get(self.stdout), texts.get(self.stderr)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.wait()


def run_forked(command, input=None, timeout=120, **options):
    """What a program says, and its exit code."""
    given = {"stdin": None if input is None else PIPE, "stdout": PIPE, "stderr": PIPE}
    program = ForkedProgram(command, **given, **options)
    stdout, stderr = program.communicate(input, timeout)
    return CompletedProcess(command, program.returncode, stdout, stderr)


class SentFile:
    """A file that is sent to a fork with its arguments; there, it is the number of an open file."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _receive, (DupFd(self.number),)


def _receive(sent):
    return sent.detach()


def _run(arguments, environment, folder, files, servers):
    """The main function of a fork."""
    use_servers(servers)
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in {*files} - {0, 1, 2}:
        os.close(file)
    run_program([sys.executable, *arguments], environment, folder)


def run_program(command, environment, folder):
    """Run a command of Python as a new process would, and end; the streams are those of this process."""
    prepare_fork(environment, folder, command)
    tempfile.tempdir = None  # which depends on the environment
    option, *rest = command[1:]
    arguments = rest if option in ("-P", "-IS") else [option, *rest]
    isolated = option == "-IS"
    _open_streams(unbuffered=not isolated and bool(environment.get("PYTHONUNBUFFERED")))
    kind, *rest = arguments if arguments[0] in ("-m", "-c") else ("", *arguments)
    start = {"-m": folder, "-c": ""}.get(kind, os.path.dirname(os.path.abspath(rest[0])))
    if not isolated:
        _set_path(environment, start, option == "-P" or bool(environment.get("PYTHONSAFEPATH")))
    code = 1
    try:
        sys.argv = [kind or rest[0], *rest[1:]]
        if kind == "-m":
            sys.modules.pop(rest[0], None)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(rest[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)  # which is how an interpreter ends
    except BaseException:
        sys.excepthook(*sys.exc_info())
    end_fork(code)


def _open_streams(unbuffered):
    """Those of the process that was forked are for other files, and multiprocessing has closed its stdin."""
    encoding, errors = sys.__stdout__.encoding, sys.__stdout__.errors
    streams = []
    for number, mode in enumerate(("rb", "wb", "wb")):
        file = os.fdopen(number, mode, 0 if unbuffered and number else -1, closefd=False)
        wrong = "backslashreplace" if number == 2 else errors
        at_lines = number == 2 and not unbuffered
        streams.append(io.TextIOWrapper(file, encoding, wrong, "\n", at_lines, unbuffered))
    sys.stdin, sys.stdout, sys.stderr = streams


def _set_path(environment, start, safe):
    """Where a program imports from: its own folder, unless it is safe, PYTHONPATH, and what is installed."""
    installed = [path.endswith(".zip") for path in sys.path].index(True)  # the first is that of Python itself
    given = environment.get("PYTHONPATH", "")
    folders = [os.path.abspath(path) for path in given.split(os.pathsep)] if given else []
    sys.path = [*([] if safe else [start]), *folders, *sys.path[installed:]]
    names = [name for name in dir(sys.flags) if name[0].islower()]
    flags = {name: getattr(sys.flags, name) for name in names}
    sys.flags = types.SimpleNamespace(**{**flags, "safe_path": safe})


# Launched jobs


def fork_servers():
    """Where the fork servers of this process listen; the first call starts them."""
    if not _servers:
        folder = tempfile.mkdtemp(prefix="forks-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        listeners = {kind: socket.socket(socket.AF_UNIX) for kind in ("preloaded", "bare")}
        for kind, listener in listeners.items():
            listener.bind(f"{folder}/{kind}")
            listener.listen()
            _servers[kind] = f"{folder}/{kind}"
        files = [SentFile(listener.fileno()) for listener in listeners.values()]
        server = fork_context().Process(target=_serve_preloaded, args=(_servers, *files), daemon=True)
        server.start()
        for listener in listeners.values():
            listener.close()
    return _servers


def use_servers(servers):
    """Have engines of this process fork their keepers."""
    from karvan.launch.engines.local import LocalEngine

    _servers.update(servers)
    LocalEngine.start_keeper = staticmethod(ForkedKeeper)


class ForkedKeeper:
    """A keeper in a fork; as much of `subprocess.Popen` as the engine uses."""

    def __init__(self, process, arguments, environment, lock, errors):
        server = "bare" if tuple(process.command[:2]) == (sys.executable, "-IS") else "preloaded"
        read, stdin = os.pipe()
        stdout, write = os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        order = {"arguments": arguments, "environment": environment, **_inherited()}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(fork_servers()[server])
            socket.send_fds(connection, [b"."], [read, write, errors.fileno(), lock])
            connection.sendall(json.dumps(order).encode())
        for file in (read, write):
            os.close(file)

    def wait(self):
        """The engine has waited for the keeper's lock."""


def _inherited():
    """What a new process has from the one that starts it, besides arguments, environment and files."""
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "parent": os.getpid(),
        "folder": os.getcwd(),
        "umask": int(next(line for line in status if line.startswith("Umask:")).split()[1], 8),
        "ignored": _ignored(),
        "mask": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "oom": Path("/proc/self/oom_score_adj").read_text(),
    }


def _ignored():
    return [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]


def _serve_preloaded(servers, listener, bare):
    """Fork keepers whose processes use torch or karvan, and start the server of the others."""
    from karvan.launch.engines import keeper

    use_servers(servers)
    forkserver._forkserver.__init__()  # programs may use multiprocessing themselves
    resource_tracker._resource_tracker.__init__()
    process.current_process()._config["daemon"] = False
    room = "x" * 1000  # for the commands of others
    command = [sys.executable, "-IS", __file__, keeper.__file__, room]
    Popen(command, stdin=bare, stdout=DEVNULL, env={**os.environ, _ROOM: room * 16})
    _serve(listener, keeper, ("-P", "-m", "-c"))


def _serve_bare():
    """Fork keepers whose processes start quickly: `python -IS PROGRAM`."""
    spec = importlib.util.spec_from_file_location("keeper", sys.argv[1])
    keeper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keeper)
    gc.freeze()
    _serve(0, keeper, ("-IS",))


def _serve(listener, keeper, options):
    """Fork a keeper for each connection, until the process ends that has started this one.

    options: the first of commands that forks can run.
    """
    global _options
    _options = options
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(listener, 3)
    os.closerange(4, 1 << 16)
    listener = socket.socket(fileno=3)
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                try:
                    listener.close()
                    _keep(connection, keeper)
                finally:
                    os._exit(1)


def _reap(number, frame):
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _keep(connection, keeper):
    """Be the keeper that a connection orders."""
    with connection:
        _, files, _, _ = socket.recv_fds(connection, 1, 4)
        with connection.makefile("rb") as file:
            order = json.loads(file.read())  # an error if the one who orders dies meanwhile
    folder, lock, *temporary = order["arguments"]
    lock = int(lock)
    for file, number in zip(files, (0, 1, 2, lock), strict=True):
        os.dup2(file, number)
    for file in {*files} - {0, 1, 2, lock}:
        os.close(file)
    os.setsid()
    for name, limit in order["limits"].items():
        resource.setrlimit(getattr(resource, name), tuple(limit))
    Path("/proc/self/oom_score_adj").write_text(order["oom"])
    os.umask(order["umask"])
    os.chdir(order["folder"])
    reset_signals(order["ignored"])
    signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])
    command = [sys.executable, "-IS", keeper.__file__, *order["arguments"]]
    # What a new process would be a child of; see `processes.family_of`.
    set_environment(command, {**order["environment"], "STARTED_BY": str(order["parent"])})
    os.execvpe = _execute
    code = 0
    try:
        keeper.main(folder, lock, *temporary)
    except SystemExit as end:
        code = end.code
    os._exit(code)


def _execute(file, command, environment, execute=os.execvpe):
    """Run a program in the fork of a keeper; one that needs another interpreter is executed."""
    interpreter, *words = command
    alike = words and (words[0] in _options or not words[0].startswith("-"))
    new = interpreter != sys.executable or not alike or "LD_PRELOAD" in environment
    if new or not fits(command, environment):
        execute(file, command, environment)
    os.closerange(3, 1 << 16)
    reset_signals(_ignored())
    run_program(command, environment, os.getcwd())


if __name__ == "__main__":
    _serve_bare()
