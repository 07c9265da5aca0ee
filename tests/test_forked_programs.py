"""Forked programs are what new processes are: environment, streams, signals and ends."""

import signal
import subprocess
import sys
from subprocess import PIPE, STDOUT

import pytest
from forked_programs import ForkedProgram

_PROGRAM = """
import atexit, os, signal, sys, threading, time
import neighbour_module

def raise_error():
    raise ValueError("wrong")

def ignore():
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    time.sleep(100)

atexit.register(print, "atexit", file=sys.stderr)
print(__name__, sys.argv[1:], os.getcwd(), sorted(os.environ.items()), neighbour_module.NAME)
print("read", sys.stdin.read())
print(os.getpid(), signal.getsignal(signal.SIGINT).__name__, threading.active_count(), file=sys.stderr)
{
    "end": lambda: None,
    "thread": lambda: threading.Timer(0.2, print, ["thread"]).start(),
    "number": lambda: sys.exit(7),
    "text": lambda: sys.exit("not so"),
    "none": lambda: sys.exit(),
    "exception": raise_error,
    "wait": ignore,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "_exit": lambda: os._exit(3),
}[sys.argv[1]]()
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "neighbour_module.py").write_text("NAME = 'neighbour'\n")
    (tmp_path / "elsewhere").mkdir()

    def start(kind, how, module=False, text=False, **more):
        program = ["-m", "program"] if module else ["-c", _PROGRAM] if text else [tmp_path / "program.py"]
        more = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "env": {"A": "1", "LC_ALL": "C.UTF-8"}} | more
        folder = tmp_path if module or text else tmp_path / "elsewhere"
        more |= {"text": True} if kind is subprocess.Popen else {}
        return kind([sys.executable, *program, how, "é b"], cwd=folder, **more)

    return start


def ending(process):
    """How it ended, without its pid and the frames of a traceback."""
    output, errors = process.communicate("input\n", timeout=60)
    lines = [line for line in (errors or "").splitlines() if not line.startswith(" ")]
    return process.returncode, output, [line.replace(str(process.pid), "PID") for line in lines]


@pytest.mark.parametrize("how", ["end", "thread", "number", "text", "none", "exception", "kill", "_exit"])
def test_a_program_ends_like_a_new_process(start, how):
    expected = ending(start(subprocess.Popen, how))
    assert ending(start(ForkedProgram, how)) == expected
    assert expected[2][0] == "PID default_int_handler 1"


def test_a_module_ends_like_a_new_process(start):
    assert ending(start(ForkedProgram, "end", True)) == ending(start(subprocess.Popen, "end", True))


@pytest.mark.parametrize("how", ["number", "exception"])
def test_a_text_ends_like_a_new_process(start, how):
    assert ending(start(ForkedProgram, how, text=True)) == ending(start(subprocess.Popen, how, text=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_like_a_new_process(start, number):
    ends = []
    for kind in (subprocess.Popen, ForkedProgram):
        process = start(kind, "wait", stderr=subprocess.DEVNULL)
        process.stdin.close()
        assert process.stdout.readline().startswith("__main__")
        assert process.stdout.readline() == "read \n"
        assert process.stdout.readline() == "True\n"  # SIGTERM has no handler
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        ends.append(process.wait(60))
        process.stdout.close()
    assert ends == [-number, -number]


def test_errors_may_go_to_the_output_and_both_to_a_file(start, tmp_path):
    texts = []
    for kind in (subprocess.Popen, ForkedProgram):
        process = start(kind, "end", stderr=STDOUT)
        texts.append(process.communicate("", timeout=60)[0].replace(str(process.pid), "PID"))
        with (tmp_path / "output").open("w") as file:
            process = start(kind, "end", stdout=file, stderr=STDOUT)
            assert process.communicate("", timeout=60) == (None, None)
        texts.append((tmp_path / "output").read_text().replace(str(process.pid), "PID"))
    assert texts == [texts[0]] * 4
    assert "atexit" in texts[0]


def test_without_an_environment_it_has_that_of_the_test(start, monkeypatch):
    monkeypatch.setenv("A_NAME_OF_THIS_TEST", "value")
    _, output, _ = ending(start(ForkedProgram, "end", env=None))
    assert "('A_NAME_OF_THIS_TEST', 'value')" in output
