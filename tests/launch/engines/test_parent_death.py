"""Processes that the kernel kills when the one that started them dies."""

import os
import select
import subprocess
import sys

from karvan.launch.engines.local import ending_with_parent

CHILD = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
from karvan.launch.engines.local import ending_with_parent
subprocess.Popen(ending_with_parent([sys.executable, "-c", {CHILD!r}, "a b"]))
time.sleep(600)
"""


def test_a_process_dies_with_its_parent_also_by_sigkill():
    read, write = os.pipe()  # which the child holds open, so that its end is the end of the pipe
    with os.fdopen(read, "rb") as output:
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=write)
        os.close(write)
        try:
            assert output.readline() == b"['a b']\n"
            assert not select.select([output], [], [], 0.2)[0]
        finally:
            parent.kill()
            parent.wait()
        assert select.select([output], [], [], 30)[0]
        assert output.read() == b""


def test_exit_codes_and_output_are_those_of_the_command():
    words = ending_with_parent([sys.executable, "-c", "import sys; print(sys.argv[1]); sys.exit(7)", "x"])
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (7, "x\n")


def test_a_process_whose_parent_has_died_already_does_not_begin():
    words = ending_with_parent([sys.executable, "-c", "print('begins')"])
    words[words.index(str(os.getpid()))] = "1"
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
