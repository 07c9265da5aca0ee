"""What ranks are made of that needs no other process: empty batches, passes, states as bytes."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import assert_same, batches, model, trainer

import karvan as kv
from karvan.checkpoint.state_tree import pack, unpack
from karvan.data import KafkaReader, Stream
from karvan.ragged import NestedRagged
from karvan.train.epoch import Accumulation
from karvan.train.feed import describe, empty


def test_an_empty_batch_has_the_columns_of_a_full_one():
    offsets = torch.tensor([0, 1, 3])
    full = {
        "id": torch.tensor([1, 2]),
        "dense": torch.rand(2, 3, dtype=torch.float64),
        "flag": torch.tensor([True, False]),
        "one": kv.Ragged(torch.tensor([4, 5])),
        "list": kv.Ragged(torch.tensor([4, 5, 6]), offsets, torch.ones(3)),
        "wide": kv.Ragged(torch.rand(3, 2), offsets),
        "text": NestedRagged(torch.zeros(4, dtype=torch.uint8), torch.tensor([0, 1, 2, 4]), offsets),
    }
    for batch in (full, kv.Batch(full)):
        made = empty(json.loads(json.dumps(describe(batch))))
        assert type(made) is type(batch)
        assert list(made) == list(batch)
        assert kv.Batch(dict(made)).samples == 0
        for name, entry in batch.items():
            assert type(made[name]) is type(entry)
            for part in ("values", "offsets", "weights", "inner", "outer"):
                before, after = getattr(entry, part, None), getattr(made[name], part, None)
                if isinstance(before, torch.Tensor):
                    assert (after.dtype, after.shape[1:]) == (before.dtype, before.shape[1:])
                elif not isinstance(entry, torch.Tensor):
                    assert after is None
    assert made["dense"].shape == (0, 3)
    assert made["dense"].dtype == torch.float64


def test_a_column_that_cannot_be_empty_is_an_error_when_one_is_needed():
    with pytest.raises(
        TypeError, match=r"Column 'words': expected a Tensor, Ragged or NestedRagged.*got list"
    ):
        empty(describe({"words": ["a", "b"]}))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 50))
def test_a_fixed_number_of_batches_is_shared_out_evenly(together, world, step):
    ranks = [Accumulation(1, together, rank, world) for rank in range(world)]
    mine = [rank.mine(step) for rank in ranks]
    assert sum(mine) == together
    assert max(mine) == ranks[0].count
    assert max(mine) - min(mine) <= 1
    over_a_cycle = [sum(rank.mine(step + n) for n in range(world)) for rank in ranks]
    assert over_a_cycle == [together] * world


def test_one_process_has_all_of_a_fixed_global_batch():
    one = model()
    trainer(one, gradient_accumulation_steps=5).fit(batches())
    other = model()
    trainer(other, global_accumulation_steps=5).fit(batches())
    assert_same(one, other)


def test_batches_are_accumulated_by_rank_or_by_all():
    with pytest.raises(
        ValueError, match="gradient_accumulation_steps=2 is for every rank and global_accumulation_steps=4"
    ):
        trainer(gradient_accumulation_steps=2, global_accumulation_steps=4)
    with pytest.raises(ValueError, match="global_accumulation_steps must be at least 1, got 0"):
        trainer(global_accumulation_steps=0)


def test_state_travels_as_bytes():
    state = {"a": [torch.rand(3), torch.tensor(7), None], "b": (1, float("nan")), "c": torch.zeros(0, 2)}
    received = unpack(pack(state))
    assert torch.equal(received["a"][0], state["a"][0])
    assert received["a"][1:] == [torch.tensor(7), None]
    assert received["b"][0] == 1
    assert received["b"][1] != received["b"][1]
    assert received["c"].shape == (0, 2)


def test_positions_of_readers_are_merged_by_their_own_rule():
    states = [{"offsets": {"x/0": 9, "x/1": 2}}, {"offsets": {"x/0": 4, "x/1": 5}}]
    assert KafkaReader.merge(states) == {"offsets": {"x/0": 9, "x/1": 5}}
    with pytest.raises(TypeError, match="needs merge"):
        Stream([]).merge(states)
