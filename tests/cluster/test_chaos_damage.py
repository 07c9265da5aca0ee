"""Launched jobs whose newest checkpoint is damaged when a role is killed: no record is lost or doubled."""

import os
import random
import signal
import time

import numpy as np
import pytest
from chaos_helpers import LaunchedJob

pytestmark = pytest.mark.slow


def _steps(folder):
    return sorted(folder.glob("step-*"))


def _wait_for_checkpoints(job, count):
    until = time.monotonic() + 60
    while len(_steps(job.folder / "checkpoints")) < count:
        assert time.monotonic() < until, job.log.read_text()
        assert job.process.poll() is None, job.log.read_text()
        time.sleep(0.02)


def _damage(checkpoint, seed):
    """Change, cut or remove some file of it."""
    draw = random.Random(seed)
    file = draw.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    match draw.randrange(3):
        case 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        case 1:
            file.write_bytes(data[: draw.randrange(len(data))])
        case _:
            file.unlink()


def _damage_and_kill(job, which, seed):
    """Stop the trainer, so that no newer checkpoint comes; damage some, then kill it."""
    _wait_for_checkpoints(job, 2)
    (trainer,) = job.pids("trainer")
    os.kill(trainer, signal.SIGSTOP)
    there = _steps(job.folder / "checkpoints")
    for number, checkpoint in enumerate(which(there)):
        _damage(checkpoint, seed + number)
    os.kill(trainer, signal.SIGKILL)
    return there


def test_kills_with_a_damaged_newest_checkpoint_lose_no_record(tmp_path):
    with LaunchedJob(tmp_path, "sync", 1, loaders=1) as job:
        for number in range(3):
            there = _damage_and_kill(job, lambda found: found[-1:], 10 * number)
            job.wait_for_line(f"Generation {number + 1} begins")
            job.wait_for_line(f"were renamed to damaged-{there[-1].name}")
            taken = int(there[-2].name.removeprefix("step-"))
            job.wait_for_step(taken + 7)  # behind the next checkpoint
        job.finish()
        times, _ = job.records()
    assert np.array_equal(times, np.ones(len(times)))
    log = job.log.read_text()
    assert log.count("is damaged: ") >= 3
    assert len(list((tmp_path / "checkpoints").glob("damaged-step-*"))) == 3


def test_a_launched_job_without_a_whole_checkpoint_ends_with_3_and_is_not_retried(tmp_path):
    with LaunchedJob(tmp_path, "sync", 1) as job:
        there = _damage_and_kill(job, lambda found: found, 1)
        assert job.process.wait(120) == 3, job.log.read_text()
    log = job.log.read_text()
    assert "Generation 1 begins" in log
    assert "Generation 2 begins" not in log
    assert "expected an intact checkpoint, got" in log
    assert _steps(tmp_path / "checkpoints") == there
