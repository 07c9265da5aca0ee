"""Tests pass in a background job of a script, whose processes ignore SIGINT."""

import signal
import subprocess
import sys
from pathlib import Path

_CHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
_SESSION = f"import conftest, subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}], check=True)"


def test_programs_that_tests_start_are_ended_by_sigint_also_in_a_background_job():
    def in_background_job(program):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    assert in_background_job(_CHILD) == "False\n"  # or this test would show nothing
    assert in_background_job(_SESSION) == "True\n"
