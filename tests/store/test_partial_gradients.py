"""Gradients that lack some keys, against dicts of sums."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_message_layout import as_message

import karvan as kv
from karvan.store import MemoryStore
from karvan.store import messages as exchange

DIMS = [1, 3]


@st.composite
def received(draw):
    """For each rank and slot: distinct keys, each with a gradient or None."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(draw(st.integers(1, 4))):
        made.append([])
        for dim in DIMS:
            keys = draw(st.lists(st.integers(-5, 5), unique=True, max_size=6))
            missing = draw(st.sets(st.sampled_from(keys))) if keys else set()
            made[-1].append(
                {key: None if key in missing else rng.normal(size=dim).astype(np.float32) for key in keys}
            )
    return made


@pytest.mark.parametrize("by_key", [False, True])
@given(ranks=received())
def test_sums_are_those_of_the_ranks_that_have_a_gradient(by_key, ranks):
    counts = [[len(of_slot) for of_slot in of_rank] for of_rank in ranks]
    messages = [as_message([list(of_slot) for of_slot in of_rank]) for of_rank in ranks]
    flat = [
        np.concatenate(
            [
                np.full(dim, np.nan, np.float32) if value is None else value
                for of_slot, dim in zip(of_rank, DIMS, strict=True)
                for value in of_slot.values()
            ]
            or [np.empty(0, np.float32)]
        )
        for of_rank in ranks
    ]
    found = exchange.sums(messages, counts, DIMS, flat, by_key)
    for slot, (keys, values) in enumerate(found):
        expected = {}
        for of_rank in ranks:
            for key, value in of_rank[slot].items():
                if value is not None:
                    expected.setdefault(key, []).append(value)
        assert keys.tolist() == sorted(expected)
        for key, value in zip(keys.tolist(), values, strict=True):
            total = np.zeros(DIMS[slot], np.float32)
            for each in expected[key]:  # in the order of ranks
                total = total + each
            assert (value == (total / np.float32(len(expected[key])) if by_key else total)).all()


class KeepsGradients(MemoryStore):
    """Notes what `reduce` gave."""

    def reduce(self, plan, addresses, strides):
        self.gradients = super().reduce(plan, addresses, strides)
        return self.gradients


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_gradients_are_packed_in_the_order_of_the_keys_that_were_sent(ids, ranks, random):
    """A feature without a gradient leaves its keys out, unless another feature has them."""
    used, unused = ([each[feature] for each in ids] for feature in range(2))
    store = KeepsGradients()
    engine = kv.EmbeddingEngine({"used": kv.Table(3, name="t"), "unused": kv.Table(3, name="t")}, store=store)
    kv.optim.SGD(engine, lr=1.0)  # without one there are no gradients
    out = engine({"used": torch.tensor(used), "unused": torch.tensor(unused)})
    factors = torch.arange(1.0, 3 * len(used) + 1).reshape(-1, 3)
    (out["used"] * factors).sum().backward()
    expected = {key: np.zeros(3, np.float32) for key in used}
    for key, factor in zip(used, factors.numpy(), strict=True):
        expected[key] += factor  # small integers: exact in any order

    keys = sorted({*used, *unused})
    random.shuffle(keys)
    sent = [keys[rank::ranks] for rank in range(ranks)]
    packed = torch.empty(3 * len(keys))
    exchange.pack(
        [as_message([each]) for each in sent],
        [[len(each)] for each in sent],
        [3],
        store.gradients,
        0.5,
        packed,
    )
    order = [key for each in sent for key in each]
    for key, value in zip(order, packed.reshape(-1, 3).numpy(), strict=True):
        if key in expected:
            assert (value == expected[key] * np.float32(0.5)).all(), key
        else:
            assert np.isnan(value[0]), key
