"""Commands of a shell that are forks do what the installed ones do, which start an interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import forked_commands

_PROGRAM = """
import os, signal, sys
print(sys.argv, os.getcwd(), sys.stdin.read(), flush=True)
print(os.environ.get("RANK"), os.environ["A_NAME"], file=sys.stderr)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
ends = {"code": lambda: sys.exit(4), "returns": lambda: None, "waits": signal.pause}
ends["killed"] = lambda: os.kill(os.getpid(), signal.SIGKILL)
ends[sys.argv[1]]()
"""


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """That of the installed commands, and that of the forks."""
    monkeypatch.setenv("A_NAME", "é")
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(_PROGRAM)
    installed = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with forked_commands(tmp_path / "bin") as forked:
        yield installed, forked


@pytest.mark.parametrize(
    "line",
    [
        "echo text | python program.py code 'two words'",
        "python program.py killed < /dev/null",
        "python program.py waits < /dev/null & until [ -s out ]; do sleep 0.01; done; kill $!; wait $!",
        "karvan version",
        "torchrun --nproc-per-node=2 program.py returns | wc -l",
    ],
)
def test_a_fork_gives_what_the_installed_command_gives(environments, line):
    ends = []
    for environment in environments:
        with open("out", "w") as out, open("errors", "w") as errors:
            ended = subprocess.run(["bash", "-c", line], env=environment, stdout=out, stderr=errors)
        said = Path("errors").read_text().splitlines()
        ends.append((ended.returncode, Path("out").read_text(), [text for text in said if "None" in text]))
    assert ends[0] == ends[1]
    assert ends[0][1]


def test_a_fork_dies_with_its_command(environments):
    _, forked = environments
    read, write = os.pipe()
    with subprocess.Popen(
        ["python", "program.py", "waits"], env=forked, stdin=subprocess.DEVNULL, stdout=write
    ) as command:
        os.close(write)
        with open(read) as output:
            assert "waits" in output.readline()
            command.send_signal(signal.SIGKILL)
            assert output.read() == ""  # which ends when nobody has the pipe
    assert command.returncode == -signal.SIGKILL
