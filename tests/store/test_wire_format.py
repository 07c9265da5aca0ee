"""What a remote store and its servers send: tables and rules come back, floats within their error."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.store import TableSpec
from karvan.store.messages import (
    from_wire,
    rule_from_json,
    rule_to_json,
    spec_from_json,
    spec_to_json,
    to_wire,
)

NUMBER = st.floats(allow_nan=False, allow_infinity=False, width=32)
FLOATS = st.lists(st.floats(width=32), max_size=40)
SPECS = st.builds(
    TableSpec,
    name=st.text(min_size=1),
    dim=st.integers(1, 2048),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    init=st.tuples(st.sampled_from(["zeros", "uniform", "normal"]), NUMBER, NUMBER, NUMBER, NUMBER),
    admit=st.tuples(st.sampled_from(["all", "probability", "min_count"]), NUMBER, st.integers(0, 2**40)),
    evict=st.tuples(st.sampled_from(["never", "lru", "ttl"]), NUMBER, st.integers(1, 2**40)),
    seed=st.integers(-(2**63), 2**63 - 1),
    shards=st.integers(1, 64),
)
NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "shrink", "alpha", "l1", "l2")
LIMITS = ("clip_value", "clip_norm", "bound")


@given(SPECS)
def test_a_table_comes_back_from_json(spec):
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize(
    "make",
    [
        lambda engine, lr: kv.optim.SGD(engine, lr=lr, momentum=0.9, clip_norm=0.3),
        lambda engine, lr: kv.optim.Adagrad(engine, lr=lr, accumulate="last", initial_accumulator_value=0.1),
        lambda engine, lr: kv.optim.AdamW(engine, lr=lr, weight_decay=0.3, clip_value=0.2),
        lambda engine, lr: kv.optim.FTRL(engine, lr=lr, l1=0.01, l2=0.2, weight_bound=0.5),
    ],
)
@given(lr=st.floats(2**-20, 10.0, width=32), number=st.floats(0.0, 1.0, width=32))
def test_a_rule_comes_back_from_json(make, lr, number):
    class Rules(kv.store.MemoryStore):
        def update(self, program, gradients, rules, steps):
            self.rules = rules

    store = Rules()
    engine = kv.EmbeddingEngine({"a": kv.Table(2)}, store=store)
    optimizer = make(engine, lr)
    engine({"a": torch.tensor([1])})["a"].sum().backward()
    optimizer.step()
    rule = store.rules["a"]
    rule.alpha = number
    back = rule_from_json(json.loads(json.dumps(rule_to_json(rule))))
    assert back.kind == rule.kind
    for name in (*NUMBERS, *LIMITS, "accumulate_last"):
        assert getattr(back, name) == getattr(rule, name), name


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@given(FLOATS)
def test_floats_travel_within_the_error_of_their_wire(wire, values):
    floats = torch.tensor(values, dtype=torch.float32)
    sent = to_wire(floats, wire)
    assert sent.dtype == (np.float32 if wire == "float32" else np.uint16)
    assert sent.nbytes == len(values) * (4 if wire == "float32" else 2)
    back = torch.from_numpy(from_wire(np.frombuffer(sent.tobytes(), sent.dtype), wire).copy())
    assert back.dtype == torch.float32
    if wire == "float32":
        assert torch.equal(back.view(torch.int32), floats.view(torch.int32))
        return
    dtype = getattr(torch, wire)
    limits = torch.finfo(dtype)
    for value, found in zip(values, back.tolist(), strict=True):
        if value != value:
            assert found != found
        elif abs(value) > limits.max:
            assert abs(found) in (limits.max, float("inf"))
            assert (found > 0) == (value > 0)
        else:
            smallest = limits.smallest_normal * limits.eps  # of numbers below the normal ones
            assert abs(found - value) <= max(abs(value) * limits.eps / 2, smallest / 2)
    # What a wire can carry exactly comes back exactly.
    assert torch.equal(torch.from_numpy(from_wire(to_wire(back, wire), wire)).nan_to_num(), back.nan_to_num())
