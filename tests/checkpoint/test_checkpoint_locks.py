"""The locks of a checkpoint folder: closed to other users, waited for aloud, dropped with their process."""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from checkpoint_helpers import Model
from forked_programs import ForkedProgram

import karvan as kv
from karvan.checkpoint import CheckpointError
from karvan.checkpoint.atomic_folder import HiddenFolder, try_writing

NOBODY = 65534
LIMIT = 60

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a process of another user")

# Takes a shared lock on everything below a folder that uid nobody can open, again and again, and holds it.
_STRANGER = f"""
import errno, fcntl, os, sys
folder = sys.argv[1]
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
held, refused = {{}}, set()
def take(path):
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except PermissionError:
        refused.add(os.path.basename(path))
        return
    key = os.fstat(number).st_ino
    if key in held:
        os.close(number)
        return
    held[key] = number
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
first = True
while True:
    take(folder)
    for where, folders, files in os.walk(folder):
        for name in folders + files:
            take(os.path.join(where, name))
    if first:
        print(len(held), *sorted(refused), flush=True)
        first = False
"""


@pytest.fixture
def open_folder():
    """A folder that every user can read; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.fixture
def processes():
    """Processes to be ended with the test."""
    started = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def _start(processes, script, *args):
    process = ForkedProgram([sys.executable, "-c", script, *map(str, args)], stdout=PIPE, cwd="/")
    processes.append(process)
    return process


@as_root
def test_a_stranger_who_may_read_cannot_hold_up_a_save(open_folder, processes):
    model = Model().train_on(2)
    checkpoints = kv.Checkpoints(open_folder, keep_last=2, full_every=2)
    checkpoints.save(1, model.state(), model, block=True)
    being_written = HiddenFolder(open_folder / "step-000000000009")
    stranger = _start(processes, _STRANGER, open_folder)
    opened, *refused = stranger.stdout.readline().split()
    assert int(opened) > 4  # it reads what others may read
    assert refused  # but no lock
    for step in range(2, 7):
        model.train_on(1, seed=step)
        checkpoints.save(step, model.state(), model).wait(timeout=LIMIT)
    being_written.remove()
    try_writing(open_folder)
    assert stranger.poll() is None
    assert [one.step for one in checkpoints.list()] == [5, 6]
    assert [name for name in os.listdir(open_folder) if name.startswith(".")] == []


@as_root
def test_the_leftovers_of_a_dead_process_go_although_a_stranger_locks_them(open_folder, processes):
    dead = open_folder / ".step-000000000008.tmp-1-0123abcd"
    dead.mkdir()
    (dead / "file").write_text("x")
    stranger = _start(processes, _STRANGER, open_folder)
    assert int(stranger.stdout.readline()) >= 3
    kv.Checkpoints(open_folder).save(1, {}, None).wait(timeout=LIMIT)
    assert os.listdir(open_folder) == ["step-000000000001"]


def _lock_name():
    return f".karvan-lock-{os.geteuid()}"


_HOLDER = """
import fcntl, json, os, sys, time
number = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(number, fcntl.LOCK_EX)
os.write(number, sys.argv[2].encode())
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("content", ["[1]", None])
def test_a_held_lock_is_waited_for_aloud_and_goes_with_its_process(tmp_path, processes, caplog, content):
    tells = {"pid": 4711, "host": "far.example.com", "since": "2026-01-02T03:04:05+00:00"}
    holder = _start(
        processes, _HOLDER, tmp_path / _lock_name(), json.dumps(tells) if content is None else content
    )
    assert holder.stdout.readline() == "held\n"
    with caplog.at_level(logging.WARNING):
        pending = kv.Checkpoints(tmp_path).save(1, {}, None)
        limit = time.monotonic() + LIMIT
        while not (lines := [one.getMessage() for one in caplog.records]):
            assert time.monotonic() < limit
            time.sleep(0.02)
    assert not pending.done()
    assert str(tmp_path) in lines[0]
    if content is None:
        assert "process 4711 on far.example.com" in lines[0]
        assert "2026-01-02T03:04:05+00:00" in lines[0]
    else:
        assert "unknown" in lines[0]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    pending.wait(timeout=LIMIT)
    assert os.listdir(tmp_path) == ["step-000000000001"]  # the dead process's lock file went, too


def test_a_lock_says_who_holds_it_and_is_closed_to_others(tmp_path):
    old = os.umask(0)
    try:
        being_written = HiddenFolder(tmp_path / "step-000000000009")
    finally:
        os.umask(old)
    (lock,) = being_written.path.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600
    tells = json.loads(lock.read_text())
    assert tells["pid"] == os.getpid()
    assert tells["host"]
    assert tells["since"]
    being_written.remove()


def test_a_writer_that_has_removed_other_files_is_not_a_leftover(tmp_path):
    first = HiddenFolder(tmp_path / "step-000000000001")
    for name in ("rows", "stale"):
        (first.path / name).write_text(name)
    first.remove_all_but(["rows"])
    second = HiddenFolder(tmp_path / "step-000000000002")  # removes what killed writers have left
    first.publish(lambda: None)
    assert [path.name for path in (tmp_path / "step-000000000001").iterdir()] == ["rows"]
    second.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]


def test_a_lock_that_is_a_link_is_refused_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    for make in (os.symlink, os.link):
        make(tmp_path / "precious", folder / _lock_name())
        with pytest.raises(CheckpointError, match=r"lock.* link"):
            try_writing(folder)
        (folder / _lock_name()).unlink()
    assert (tmp_path / "precious").read_text() == "precious"
    os.mkfifo(folder / _lock_name())
    with pytest.raises(CheckpointError, match="regular file"):
        try_writing(folder)


@as_root
def test_a_lock_file_that_another_user_has_made_is_an_error_that_names_the_user(open_folder):
    os.chmod(open_folder, 0o1777)
    lock = open_folder / _lock_name()
    lock.touch()
    os.chown(lock, NOBODY, NOBODY)
    os.chmod(lock, 0o666)
    with pytest.raises(CheckpointError, match=rf"belongs to uid {NOBODY}.*uid 0.*{lock.name}"):
        try_writing(open_folder)


_OTHER_USER = f"""
import os, sys
from pathlib import Path
from karvan.checkpoint.atomic_folder import HiddenFolder
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
hidden = HiddenFolder(Path(sys.argv[1]) / "step-000000000003")
(hidden.path / "file").write_text("x")
print("begun", flush=True)
sys.stdin.readline()
hidden.publish(lambda: None)
hidden.remove()
os._exit(0)
"""


@as_root
def test_two_users_write_into_one_folder_and_leave_each_others_work(open_folder):
    os.chmod(open_folder, 0o1777)
    command = [sys.executable, "-c", _OTHER_USER, open_folder]
    with ForkedProgram(command, stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout.readline() == "begun\n"
        abandoned = open_folder / ".step-000000000008.tmp-1-0123abcd"
        abandoned.mkdir()
        os.chown(abandoned, NOBODY, NOBODY)
        kv.Checkpoints(open_folder).save(1, {}, None).wait(timeout=LIMIT)
        assert abandoned.exists()  # its owner's next save removes it
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(LIMIT) == 0
    assert sorted(os.listdir(open_folder)) == [abandoned.name, "step-000000000001", "step-000000000003"]
