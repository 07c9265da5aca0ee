"""Programs of tests as forks of a process that has imported torch and karvan, which takes seconds.

`ForkedProgram(command, …)` is used like `subprocess.Popen(command, text=True, …)` for commands of
`sys.executable` and a script, `-m` and a module, or `-c` and a text; `run_forked` is like `subprocess.run`
that captures text. It is a process with its own environment, arguments, folder, streams, signal handlers and
exit code; tests/test_forked_programs.py compares both. Tests of what a program imports, reads at its start or
does when the interpreter ends start new processes.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import types
from contextlib import suppress
from multiprocessing.reduction import DupFd
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired


def fork_context():
    """Processes that are forked from the one that has imported all of that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fork_imports"])  # as tests/conftest.py does
    return context


def prepare_fork(environment, folder):
    """Give a fork what a new process has: its environment and folder, Ctrl-C, random numbers, threads."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import numpy as np
    import torch

    np.random.seed()
    if "OMP_NUM_THREADS" in environment:  # torch has read that of the process that was forked
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


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
            files.append(_SentFile(file))
            pipes.append(pipe)
        self.stdin, self.stdout, self.stderr = pipes
        values = (self.args, dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd()), files)
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


class _SentFile:
    """A file that is sent to a fork with its arguments; there, it is the number of an open file."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _receive, (DupFd(self.number),)


def _receive(sent):
    return sent.detach()


def _run(arguments, environment, folder, files):
    """The main function of a fork."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in {*files} - {0, 1, 2}:
        os.close(file)
    # Those of the process that was forked are for other files, and multiprocessing has closed its stdin.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    prepare_fork(environment, folder)
    code = 1
    try:
        if arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            sys.path = [folder, *sys.path]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path = ["", *sys.path]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = arguments
            sys.path = [os.path.dirname(os.path.abspath(arguments[0])), *sys.path]
            runpy.run_path(arguments[0], run_name="__main__")
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
