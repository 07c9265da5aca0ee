"""Wall clocks that tests set: those of a job's processes, each on its own, and not that of the machine.

`wall_clock.c` is what the processes load.
"""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from support_paths import support_path


class WallClocks:
    """The clocks of processes by role and index, such as trainer-0; the environment that they need."""

    def __init__(self, folder, names):
        self._folder = Path(folder)
        self._folder.mkdir()
        self.names = list(names)
        for name in self.names:
            (self._folder / name).write_bytes(bytes(8))
        library = self._folder / "wall_clock.so"
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no compiler for the library that changes the clock of a process")
        source = support_path("common/wall_clock.c")
        done = subprocess.run(
            [compiler, "-x", "c", "-O1", "-shared", "-fPIC", "-o", library, source, "-lpthread"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"cannot build the library that changes the clock of a process: {done.stderr}")
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._folder)}

    def set(self, names, seconds):
        """Let the clocks of these processes be so many seconds ahead of the machine's."""
        for name in names:
            with (self._folder / name).open("r+b", buffering=0) as file:
                file.write(struct.pack("=q", int(seconds)))
