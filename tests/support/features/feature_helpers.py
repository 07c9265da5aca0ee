"""Raggeds for property tests, and transforms done the slow and obvious way on Python lists."""

import itertools
import random
import struct

import torch
from hypothesis import strategies as st

from karvan import ids
from karvan.features import Feature, FeatureEngine
from karvan.ragged import NestedRagged, OptionalRagged, Ragged

INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 3)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rows(values, max_rows=6, max_length=8):
    """Rows of values: no rows, empty rows, only empty rows, and one huge row among others."""
    some = st.lists(st.lists(values, max_size=max_length), max_size=max_rows)
    empty = st.integers(0, 4).map(lambda n: [[] for _ in range(n)])
    few = st.lists(values, min_size=1, max_size=5)
    huge = st.tuples(some, few, st.integers(0, 99)).map(
        lambda made: [*made[0], random.Random(made[2]).choices(made[1], k=2000), []]
    )
    return some | empty | huge


def texts(alphabet="aBzZ ,\t-é0"):
    return st.lists(st.text(alphabet, max_size=12), max_size=6) | st.just(["x" * 3000, "", " ,"])


def ragged_text(strings):
    encoded = [s.encode() if isinstance(s, str) else s for s in strings]
    return Ragged.from_lists([list(s) for s in encoded], dtype=torch.uint8)


def strings_of(ragged):
    return [bytes(row) for row in ragged.to_lists()]


def nested(lists, dtype=torch.int64):
    inner = Ragged.from_lists([values for row in lists for values in row], dtype=dtype)
    outer = [0, *itertools.accumulate(len(row) for row in lists)]
    return NestedRagged(inner.values, inner.offsets, torch.tensor(outer))


def run(feature, entry, **others):
    """The result of one feature, whose own column is the entry."""
    made = FeatureEngine([feature])({feature.name: entry, **others})
    return made[feature.name]


def chain():
    return Feature("x")


def same(a, b):
    """Equal to the last bit, NaN included, of one kind and one type."""
    if type(a) is not type(b):
        return False
    parts = {
        torch.Tensor: lambda t: [t],
        Ragged: lambda r: [r.values, r.lengths(), r.weights],
        OptionalRagged: lambda r: [r.values, r.lengths()],
        NestedRagged: lambda n: [n.values, n.inner, n.outer],
    }[type(a)]
    return all(
        x is y is None or (x.dtype == y.dtype and x.shape == y.shape and bits(x) == bits(y))
        for x, y in zip(parts(a), parts(b), strict=True)
    )


def bits(tensor):
    if not tensor.numel():  # whose strides may be any
        return b""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def weights_like(lists, seed=0):
    source = random.Random(seed)
    return [[source.choice([0.5, 1.0, 2.0, 0.25]) for _ in row] for row in lists]


def slow_cross(columns, weights=None):
    """Rows of (id, weight): all combinations of the distinct ids (the first counts) of each column."""
    weights = weights or [[[1.0] * len(row) for row in column] for column in columns]
    made = []
    for row in range(len(columns[0])):
        distinct = [
            dict(reversed(list(zip(column[row], weight[row], strict=True))))
            for column, weight in zip(columns, weights, strict=True)
        ]
        ordered = [
            [(key, d[key]) for key in dict.fromkeys(c[row])] for c, d in zip(columns, distinct, strict=True)
        ]
        made.append([])
        for combination in itertools.product(*ordered):
            weight = 1.0
            for _, factor in combination:
                weight *= factor
            packed = struct.pack(f"<{len(combination)}q", *(key for key, _ in combination))
            made[-1].append((ids.murmur(packed), weight))
    return made
