"""Layouts of outputs as messages: the same after their way, and refused where they contradict themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.embedding.feature_inputs import FeatureInput, make_program
from karvan.store.remote.workers import pack_layouts, unpack_layouts
from karvan.wire import RefusedError

TABLES = {
    "sum": kv.Table(2),
    "sequence": kv.Table(2, combiner="sequence"),
    "index": kv.Table(2, combiner="index"),
    "cut": kv.Table(2, combiner="index", length=2),
    "single": kv.Table(2),
}
PROGRAM = make_program(TABLES)
LISTS = st.lists(st.lists(st.integers(-3, 3), max_size=4), min_size=2, max_size=2)


def layouts_of(batch, weigh):
    made = []
    for name, table in TABLES.items():
        lists = batch[name]
        weights = [[0.5 + at for at, _ in enumerate(row)] for row in lists] if weigh else None
        entry = torch.arange(2) if name == "single" else kv.Ragged.from_lists(lists, weights=weights)
        made.append(FeatureInput(name, name, table, entry).layout)
    return made


@given(st.fixed_dictionaries(dict.fromkeys(TABLES, LISTS)), st.booleans())
def test_layouts_are_the_same_after_their_way(batch, weigh):
    layouts = layouts_of(batch, weigh)
    assert (layouts[2].row_index.weights is not None) == weigh
    received = unpack_layouts(PROGRAM, *pack_layouts(layouts))
    for sent, got in zip(layouts, received, strict=True):
        assert sent[:3] == got[:3]
        assert tensors(sent) == tensors(got)


def tensors(layout):
    given = [layout.offsets, *(layout.row_index or ())]
    return [(one.dtype, one.shape, one.tolist()) if isinstance(one, torch.Tensor) else one for one in given]


BATCH = {name: [[1, 2, 1], [3]] for name in TABLES}
DAMAGES = {
    "fewer features": (lambda sizes, arrays: (sizes[:-1], arrays), "5 features, got 4"),
    "an index beyond the vectors": (
        lambda sizes, arrays: (sizes, arrays._replace(rows=arrays.rows + 1)),
        "index of 2 samples into 4 of 5 vectors for 'index'",
    ),
    "an index below 0": (
        lambda sizes, arrays: (sizes, arrays._replace(rows=arrays.rows - 1)),
        "index of 2 samples into 4 of 5 vectors for 'index'",
    ),
    "an index that is too short": (
        lambda sizes, arrays: (sizes, arrays._replace(rows=arrays.rows[:-1])),
        "for 'cut'",
    ),
    "an index that is too long": (
        lambda sizes, arrays: (sizes, arrays._replace(rows=np.append(arrays.rows, np.int32(0)))),
        r"rows to be int32 \[10\], got int32 \[11\]",
    ),
    "more vectors than there are": (
        lambda sizes, arrays: ([*sizes[:2], [*sizes[2][:4], [9, 2, 3, True]], *sizes[3:]], arrays),
        "into 9 of 5 vectors",
    ),
    "weights that are too short": (
        lambda sizes, arrays: (sizes, arrays._replace(weights=arrays.weights[:-1])),
        "expected 4 weights for 'cut', got 3",
    ),
    "weights that are too long": (
        lambda sizes, arrays: (sizes, arrays._replace(weights=np.append(arrays.weights, np.float32(0)))),
        r"weights to be float32 \[10\]",
    ),
    "no index": (
        lambda sizes, arrays: ([*sizes[:2], [*sizes[2][:4], None], *sizes[3:]], arrays),
        "expected an index for features with that combiner only, got 'index'",
    ),
    "an index of another combiner": (
        lambda sizes, arrays: ([[*sizes[0][:4], [1, 2, 1, False]], *sizes[1:]], arrays),
        "expected an index for features with that combiner only, got 'sum'",
    ),
    "offsets that are too short": (
        lambda sizes, arrays: (sizes, arrays._replace(offsets=arrays.offsets[:-1])),
        "expected offsets of",
    ),
    "offsets that are too long": (
        lambda sizes, arrays: (sizes, arrays._replace(offsets=np.append(arrays.offsets, 0))),
        "offsets to be int64",
    ),
    "offsets that fall": (
        lambda sizes, arrays: (sizes, arrays._replace(offsets=arrays.offsets[::-1])),
        "expected offsets of 2 samples and 4 ids for 'sum'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_layouts_that_contradict_themselves_are_refused(damage):
    change, message = DAMAGES[damage]
    sizes, arrays = pack_layouts(layouts_of(BATCH, weigh=True))
    with pytest.raises(RefusedError, match=message):
        unpack_layouts(PROGRAM, *change(sizes, arrays))
