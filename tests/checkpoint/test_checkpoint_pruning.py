"""Checkpoints that are pruned leave in an order in which whatever stays is complete."""

import os
import subprocess
from pathlib import Path

import pytest
from checkpoint_helpers import Model

import karvan as kv
from karvan.checkpoint.atomic_folder import remove_folders


def _saved(folder, steps, model=None, **options):
    """Checkpoints of these steps, by one process."""
    model = model or Model()
    checkpoints = kv.Checkpoints(folder, **options)
    for step in steps:
        model.train_on(1, seed=step)
        checkpoints.save(step, model.state(), model, block=True)
    return checkpoints


def _steps(folder):
    return [one.step for one in kv.Checkpoints(folder).list()]


@pytest.mark.parametrize("removed", range(6))
def test_a_delta_never_outlives_what_it_builds_on(tmp_path, monkeypatch, caplog, removed):
    checkpoints = _saved(tmp_path, range(1, 7), keep_last=None, full_every=3)
    kinds = [one.kind for one in checkpoints.list()]
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta"]

    rename, left = Path.rename, [1 + removed]  # the new one gets its name, then so many leave

    def fail_later(path, target):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_later)
    _saved(tmp_path, [7], keep_last=1)
    monkeypatch.undo()
    assert "the disk is gone" in caplog.text
    assert _steps(tmp_path) == [*range(1, 7 - removed), 7]
    assert kv.checkpoint.verify(tmp_path) == []


def _too_long_to_be_hidden(folder):
    """Give a checkpoint a name that has just enough room, so that a longer one is refused to anybody."""
    return folder.rename(folder.with_name(f"step-{int(folder.name[5:]):0250d}"))


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_and_tried_again(tmp_path, caplog):
    model = Model()
    checkpoints = _saved(tmp_path, [1], model, keep_last=1)
    stuck = _too_long_to_be_hidden(tmp_path / "step-000000000001")
    for step in (2, 3):
        caplog.clear()
        made = checkpoints.save(step, model.state(), model, block=True)
        assert made.error is None
        (warning,) = caplog.records
        assert warning.levelname == "WARNING"
        assert f"{stuck} could not be removed; the next save tries again: " in warning.message
        assert "File name too long" in warning.message
        assert _steps(tmp_path) == [1, step]
        assert checkpoints.latest().step == step
    assert kv.checkpoint.verify(tmp_path) == []

    stuck.rename(tmp_path / "step-000000000001")
    caplog.clear()
    checkpoints.save(4, model.state(), model, block=True)
    assert os.listdir(tmp_path) == ["step-000000000004"]
    assert caplog.records == []


def test_what_a_stuck_delta_builds_on_stays_with_it_and_all_else_goes(tmp_path, caplog):
    _saved(tmp_path, range(1, 10), keep_last=None, full_every=3)  # full ones at 1, 4 and 7
    _too_long_to_be_hidden(tmp_path / "step-000000000006")
    _saved(tmp_path, [10], keep_last=1)
    assert len(caplog.records) == 1
    assert _steps(tmp_path) == [4, 5, 6, 10]
    assert kv.checkpoint.verify(tmp_path) == []


def _hold(folder):
    """What is inside cannot be removed any more; root may do so unless a disk is mounted there."""
    if os.geteuid():
        folder.chmod(0o500)
        return "Permission denied"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a disk here: {mounted.stderr.decode().strip()}")
    return "Device or resource busy"


def _let_go(folder):
    if os.geteuid():
        folder.chmod(0o700)
    else:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("step", [1, 2], ids=["pruned", "replaced"])
def test_what_is_left_of_an_old_checkpoint_is_a_warning_and_tried_again(tmp_path, caplog, step):
    model = Model()
    checkpoints = _saved(tmp_path, [step], model, keep_last=1)
    reason = _hold(tmp_path / f"step-00000000000{step}" / "tables")
    left = None
    try:
        for later in (2, 3):
            caplog.clear()
            checkpoints.save(later, model.state(), model, block=True)
            (left,) = tmp_path.glob(".*")
            (warning,) = caplog.records
            assert f"{left} could not be removed; the next save tries again: " in warning.message
            assert reason in warning.message
            assert _steps(tmp_path) == [later]
    finally:
        _let_go((left or tmp_path / f"step-00000000000{step}") / "tables")
    checkpoints.save(4, model.state(), model, block=True)
    assert os.listdir(tmp_path) == ["step-000000000004"]


def test_a_folder_that_cannot_be_looked_into_is_a_warning(tmp_path, caplog):
    remove_folders(tmp_path / "gone", dict)
    assert f"Old checkpoints in {tmp_path / 'gone'} could not be removed" in caplog.text
    assert "No such file" in caplog.text
