"""Checkpoints that are pruned leave in an order in which whatever stays is complete."""

from checkpoint_helpers import Model

import karvan as kv
from karvan.checkpoint.checkpoints import _doomed


def test_a_delta_leaves_before_what_it_builds_on(tmp_path):
    model = Model()
    checkpoints = kv.Checkpoints(tmp_path, keep_last=None, full_every=3)
    for step in range(1, 8):
        model.train_on(1, seed=step)
        checkpoints.save(step, model.state(), model, block=True)
    kinds = {one.path: one.kind for one in checkpoints.list()}
    assert list(kinds.values()) == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    doomed = _doomed(tmp_path, 1, None)
    assert len(doomed) == 6
    for gone in range(len(doomed)):
        left = [one for one in checkpoints.list() if one.path not in doomed[:gone]]
        assert all(below.path not in doomed[:gone] for one in left for below in one.chain)
