"""Tests pass in a background job of a script, whose processes ignore SIGINT."""

import sys
from pathlib import Path

from forked_programs import run_forked

_CHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
_START = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}], check=True)"


def test_programs_that_tests_start_are_ended_by_sigint_also_in_a_background_job():
    def in_background_job(program):
        ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        done = run_forked([sys.executable, "-c", ignore + program], cwd=Path(__file__).parent)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert in_background_job(_START) == "False\n"  # or this test would show nothing
    assert in_background_job("import conftest\n" + _START) == "True\n"
