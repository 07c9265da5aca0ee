"""A process that owns a folder."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("owner_program.py")


class OwnerProcess:
    """A process that owns a folder, or is refused."""

    def __init__(self, folder, seconds="60"):
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, str(folder)],
            env={**os.environ, "KARVAN_LEASE_SECONDS": seconds},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def ask(self):
        self.process.stdin.write("check\n")
        self.process.stdin.flush()
        return self.line()

    def end(self):
        self.process.stdin.close()
        self.process.stdin = None
        self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
