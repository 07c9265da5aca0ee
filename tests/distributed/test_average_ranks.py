"""`kv.train.EMA` over two real processes, against one process on the same global batches."""

import torch
from average_programs import fit
from ranks_helpers import run


def close(one, other):
    for name, average in one["averages"].items():
        torch.testing.assert_close(average, other["averages"][name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one["evaluation"]["loss"], other["evaluation"]["loss"], rtol=1e-4, atol=1e-5)


def same(one, other):
    assert one["averages"].keys() == other["averages"].keys()
    for name, average in one["averages"].items():
        assert torch.equal(average, other["averages"][name]), name
    assert one["evaluation"] == other["evaluation"]


def test_averages_are_those_of_one_process_and_checkpoints_move_between_numbers_of_ranks(tmp_path):
    alone = fit(tmp_path / "alone", 2)
    fit(tmp_path / "begun", 1)
    ranks = run(
        2,
        "average_programs:straight_and_stopped",
        runs=str(tmp_path / "ranks"),
        begun=str(tmp_path / "begun"),
    )
    (straight, stopped, moved), others = ranks
    for one, other in zip((straight, stopped, moved), others, strict=True):
        same(one, other)  # on both ranks
    same(straight, stopped)
    close(straight, alone)
    close(moved, alone)
    assert any(
        not torch.equal(value, straight["parameters"][name]) for name, value in straight["averages"].items()
    )

    close(fit(tmp_path / "ranks" / "begun", 2), alone)
