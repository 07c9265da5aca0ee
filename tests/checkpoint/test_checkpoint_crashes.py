"""Killed processes, full disks, several processes: what was complete stays complete."""

import os
import random
import select
import signal
import subprocess
import sys

import pytest
from checkpoint_helpers import Model, contents, same_rows
from forked_programs import ForkedProgram, run_forked
from support_paths import support_path

import karvan as kv
from karvan.checkpoint import CheckpointError


def _kill_again_and_again(folder, rounds):
    saver = ForkedProgram(
        [sys.executable, support_path("checkpoint/saver.py"), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # autograd does not fork where it has used a GPU
    )
    with saver:
        _kill_rounds(saver, folder, rounds)
        saver.stdin.close()
    # Once more, to its end: what the killed ones left is cleaned up.
    step = kv.Checkpoints(folder).latest().step
    kv.Checkpoints(folder, keep_last=2).save(step + 1, {}, Model(), block=True)
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []


def _kill_rounds(saver, folder, rounds):
    random_ = random.Random(rounds)
    reached = hidden = 0
    uninterrupted = Model()
    for _ in range(rounds):
        saver.stdin.write("\n")
        saver.stdin.flush()
        lines = [saver.stdout.readline(), saver.stdout.readline()]  # in either order
        child = int(next(line for line in lines if not line.startswith("from")))
        begun = int(next(line for line in lines if line.startswith("from")).split()[1])
        assert begun == reached
        for _ in range(random_.randrange(0, 6)):
            saver.stdout.readline()
        # A moment within a save, which takes some milliseconds.
        select.select([], [], [], random_.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        while not (line := saver.stdout.readline()).startswith("ended"):
            assert line
        assert line == f"ended {-signal.SIGKILL}\n"
        hidden += any(name.startswith(".") for name in os.listdir(folder))
        newest = kv.Checkpoints(folder).latest()
        if newest is None:
            continue
        assert newest.step >= reached
        for step in range(reached, newest.step):
            uninterrupted.train_on(1, seed=step)
        reached = newest.step
        assert kv.checkpoint.verify(folder) == []
        loaded = Model()
        loaded.restore(newest.load(loaded))
        assert same_rows(loaded.rows(), uninterrupted.rows())
    assert reached > 0
    assert hidden > rounds // 4  # it was in the midst of a save that they were killed


def test_killed_at_any_moment_the_newest_checkpoint_loads(tmp_path):
    _kill_again_and_again(tmp_path, 8)


@pytest.mark.slow
def test_killed_a_hundred_times_the_newest_checkpoint_loads(tmp_path):
    _kill_again_and_again(tmp_path, 100)


def test_the_leftovers_of_a_living_process_stay(tmp_path):
    from karvan.checkpoint.atomic_folder import HiddenFolder

    alive = HiddenFolder(tmp_path / "step-000000000009")
    dead = tmp_path / ".step-000000000008.tmp-1-0123abcd"  # its process, whose number lives on, has no lock
    dead.mkdir()
    (dead / "file").write_text("x")
    kv.Checkpoints(tmp_path).save(1, {}, None, block=True)
    assert alive.path.exists()
    assert not dead.exists()
    alive.remove()
    assert sorted(os.listdir(tmp_path)) == ["step-000000000001"]


_TOO_LARGE = """
import resource, sys
import numpy as np, torch, karvan as kv
from checkpoint_helpers import Model
model = Model().train_on(30, keys=5000)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
checkpoints = kv.Checkpoints(sys.argv[1])
try:
    checkpoints.save(2, model.state(), model).wait()
except kv.checkpoint.CheckpointError as error:
    print(error)
"""


def test_a_file_that_cannot_grow_is_an_error_and_leaves_nothing(tmp_path):
    model = Model().train_on(2)
    kv.Checkpoints(tmp_path).save(1, model.state(), model, block=True)
    before = contents(tmp_path)
    done = run_forked([sys.executable, "-c", _TOO_LARGE, tmp_path])
    assert done.returncode == 0, done.stderr
    assert "step-000000000002: expected to write a checkpoint, got 'File too large" in done.stdout
    assert contents(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["step-000000000001"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte, where the system lets us make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_an_error_that_leaves_the_old_checkpoints_and_no_rest(small_disk):
    model = Model().train_on(2)
    checkpoints = kv.Checkpoints(small_disk, keep_last=2)
    checkpoints.save(1, model.state(), model, block=True)
    before = contents(small_disk)
    model.train_on(200, keys=100_000, size=128)
    pending = checkpoints.save(2, model.state(), model)
    with pytest.raises(CheckpointError, match="No space left on device, so it was not saved"):
        pending.wait()
    assert contents(small_disk) == before
    assert os.listdir(small_disk) == ["step-000000000001"]
    small = Model().train_on(1)
    checkpoints.save(3, small.state(), small, block=True)  # the error has been told; there is room again
    assert [c.step for c in checkpoints.list()] == [1, 3]


_WRITER = """
import sys
import karvan as kv
from checkpoint_helpers import Model
model = Model().train_on(2, seed=int(sys.argv[2]))
checkpoints = kv.Checkpoints(sys.argv[1], keep_last=3, full_every=int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
for step in range(1, 13):
    model.train_on(1, seed=step)
    try:
        checkpoints.save(step, model.state(), model, block=True)
    except kv.checkpoint.CheckpointError as error:
        assert "expected its base" in str(error), error
print("end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 3])
def test_two_writers_and_a_reader_of_one_folder_do_no_harm(tmp_path, full_every):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, tmp_path, str(seed), str(full_every)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    reads = 0
    while any(writer.poll() is None for writer in writers):
        reads += len(kv.Checkpoints(tmp_path).list()) > 0
    for writer in writers:
        assert writer.wait() == 0
        assert writer.stdout.read() == "end\n"
        writer.stdin.close()
        writer.stdout.close()
    assert reads
    there = kv.Checkpoints(tmp_path).list()
    assert there[-1].step == 12
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    if full_every == 1:
        assert kv.checkpoint.verify(tmp_path) == []
        there[-1].load(Model())
