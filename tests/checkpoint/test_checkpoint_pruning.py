"""Checkpoints that are pruned leave in an order in which whatever stays is complete."""

from pathlib import Path

import pytest
from checkpoint_helpers import Model

import karvan as kv


@pytest.mark.parametrize("removed", range(6))
def test_a_delta_never_outlives_what_it_builds_on(tmp_path, monkeypatch, removed):
    model = Model()
    checkpoints = kv.Checkpoints(tmp_path, keep_last=None, full_every=3)
    for step in range(1, 7):
        model.train_on(1, seed=step)
        checkpoints.save(step, model.state(), model, block=True)
    kinds = [one.kind for one in checkpoints.list()]
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta"]

    rename, left = Path.rename, [1 + removed]  # the new one gets its name, then so many leave

    def fail_later(path, target):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_later)
    with pytest.raises(OSError, match="the disk is gone"):
        kv.Checkpoints(tmp_path, keep_last=1).save(7, model.state(), model, block=True)
    monkeypatch.undo()
    assert [one.step for one in checkpoints.list()] == [*range(1, 7 - removed), 7]
    assert kv.checkpoint.verify(tmp_path) == []
