"""A file in memory, which other processes of its user read by its path."""

import stat
import subprocess
from pathlib import Path

from karvan.launch.engines.ray.private_files import PrivateFile


def test_a_file_in_memory_is_read_by_its_path_and_rewritten():
    file = PrivateFile("address", b"a longer text")
    for content in (b"a longer text", b"short", b"a text that is longer"):
        file.write(content)
        assert subprocess.check_output(["cat", file.path]) == content
    assert stat.S_IMODE(Path(file.path).stat().st_mode) == 0o400
