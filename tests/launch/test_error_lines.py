"""How programs of a job end: one line for errors of Karvan, a traceback for others, and an exit code."""

import os
import subprocess
import sys

import pytest
from forked_programs import run_forked

SAME = """
import json, multiprocessing, pickle, sys

class Mine:
    pass

def child(queue):
    queue.put(__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    pickled = type(pickle.loads(pickle.dumps(Mine()))).__name__
    seen = [__name__, __file__, sys.argv, sys.path[0], queue.get(), pickled]
    process.join()
    print(json.dumps(seen))
    sys.exit(7)
"""

# Program, exit code, whether Karvan has raised it, the beginning of what is said.
PROGRAMS = {
    "an error of the program": ("def f():\n    raise ValueError('mine')\nf()", 1, False, "ValueError: mine"),
    "a file that the program misses": ("open('/nowhere')", 1, False, "FileNotFoundError"),
    "a syntax error": ("a = (", 1, False, "SyntaxError"),
    "a full disk": ("raise OSError(28, 'No space left on device')", 75, False, "OSError: [Errno 28]"),
    "a connection": ("raise ConnectionRefusedError('no')", 75, False, "ConnectionRefusedError"),
    "wrong usage": (
        "import karvan as kv\nkv.Checkpoints('run', keep_last=0)",
        2,
        True,
        "error: Checkpoints expects keep_last of at least 1, or None, got 0.",
    ),
    "data that is not there": (
        "import karvan as kv\nkv.data.read('nowhere.parquet', 4)",
        3,
        True,
        "error: nowhere.parquet: There is no such file",
    ),
    "a lost rank": (
        "from karvan.distributed import RankError\nraise RankError('Rank 1 has died.')",
        75,
        True,
        "error: Rank 1 has died.",
    ),
    "a server that is away": (
        "from karvan.wire import WireError\nraise WireError('parameter-server 0 does not answer')",
        75,
        True,
        "error: parameter-server 0 does not answer",
    ),
}


def run(folder, text, *arguments, **environment):
    (folder / "program.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "karvan.launch.program", "program.py", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
    )


def run_with_karvan(folder, text, **environment):
    """The same for a program that imports torch, which a fork has already."""
    (folder / "program.py").write_text(text)
    command = [sys.executable, "-m", "karvan.launch.program", "program.py"]
    return run_forked(command, cwd=folder, env={**os.environ, **environment})


def test_a_program_finds_everything_as_if_python_had_run_it(tmp_path):
    done = run(tmp_path, SAME, "--lr", "1")
    (tmp_path / "program.py").write_text(SAME)
    plain = subprocess.run(
        [sys.executable, "program.py", "--lr", "1"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout == plain.stdout != ""
    assert done.returncode == plain.returncode == 7


@pytest.mark.parametrize("case", PROGRAMS)
def test_an_error_ends_a_program_with_its_code_and_one_line_if_it_is_ours(tmp_path, case):
    text, code, ours, said = PROGRAMS[case]
    done = (run_with_karvan if ours else run)(tmp_path, text)
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert ("Traceback" in done.stderr) == (not ours and case != "a syntax error")
    assert "karvan/launch/program.py" not in done.stderr
    if ours:
        assert lines[0].startswith(said)
        assert len(lines) <= 2
    else:
        assert any(line.startswith(said) for line in lines)


def test_the_traceback_of_an_error_of_ours_can_be_asked_for(tmp_path):
    done = run_with_karvan(tmp_path, PROGRAMS["wrong usage"][0], KARVAN_DEBUG="1")
    assert "Traceback" in done.stderr
    assert 'program.py", line 2' in done.stderr
    assert "error: Checkpoints expects" in done.stderr
    assert done.returncode == 2


def test_a_program_that_is_not_there_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "karvan.launch.program", "nowhere.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "error: nowhere.py: No such file or directory.\n")
