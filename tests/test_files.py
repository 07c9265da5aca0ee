"""Files that are whole at any moment."""

import os
import signal
import stat
import sys

import pytest
from forked_programs import run_forked

from karvan.files import DamagedFileError, read_object, replace_file, replacing


def test_a_content_is_on_the_disk_before_it_takes_the_place_of_the_last_one(tmp_path, monkeypatch):
    path, done = tmp_path / "job.json", []
    replace_file(path, "old")
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert (os.fstat(descriptor).st_size, path.read_text()) == (len("new content"), "old")
        sync(descriptor)

    def note_replace(new, target):
        assert done == [str(new)]
        replace(new, target)
        done.append("replaced")

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    replace_file(path, "new content")
    assert done[1:] == ["replaced"]
    assert [each.name for each in tmp_path.iterdir()] == ["job.json"]


def test_an_error_leaves_the_last_content_and_nothing_else(tmp_path):
    path = tmp_path / "job.json"
    replace_file(path, "old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"new", None])
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_that_is_killed_while_it_writes_leaves_the_last_content(tmp_path):
    path = tmp_path / "job.json"
    replace_file(path, "old")
    program = (
        "import os, sys, signal; from pathlib import Path; from karvan.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n"
        "    file.write(b'new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_forked([sys.executable, "-c", program, path]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    [hidden] = [each for each in tmp_path.iterdir() if each != path]
    assert hidden.name.startswith(".job.json.tmp-")


def test_a_private_file_is_private_from_its_first_byte(tmp_path):
    with replacing(tmp_path / "secret", 0o600) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "it is empty"),
        ('{"a": 1', "7 bytes"),
        ("[1]", "3 bytes"),
        ("[" * 10**5, "100000 bytes"),
        ("{}", "with 'a'"),
        ('{"a": "1"}', "with 'a'"),
        ('{"a": true}', "with 'a'"),
    ],
)
def test_a_file_that_is_no_object_is_named(tmp_path, content, text):
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(DamagedFileError, match=f"{path} is damaged: .*{text}"):
        read_object(path, {"a": int, "b": int | None})


def test_an_object_is_read_and_an_absent_file_is_none(tmp_path):
    assert read_object(tmp_path / "job.json") is None
    replace_file(tmp_path / "job.json", '{"a": 1}')
    assert read_object(tmp_path / "job.json", {"a": int, "b": str | None}) == {"a": 1}
