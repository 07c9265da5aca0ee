"""The combiner "index": distinct vectors and an index into them, against "sequence" and plain loops."""

import pytest
import torch
from embedding_helpers import ids, keys_of, one
from engine_pair import KEYS
from feature_helpers import nested
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import embedding

import karvan as kv
from karvan.embedding import HashStack
from karvan.embedding.feature_inputs import find_distinct
from karvan.ragged import IndexedRows
from karvan.store import MemoryStore
from karvan.store.cuda.store import CudaStore

LISTS = st.lists(st.lists(st.sampled_from(KEYS), max_size=5), max_size=6)
LENGTHS = st.none() | st.integers(1, 4)


def weighted(lists):
    """Weights that are sums of powers of two, so that few products are rounded."""
    return [[0.25 * (1 + at % 7) for at, _ in enumerate(row)] for row in lists]


def rows_of(engine):
    return [column.tolist() for table in engine.tables() for column in table.snapshot()]


@given(LISTS, LENGTHS)
def test_vectors_are_those_of_the_distinct_ids_in_ascending_order(lists, length):
    engine, handle = one(3, combiner="index", length=length)
    made = engine({"f": kv.Ragged.from_lists(lists)})["f"]
    taken = [row[:length] for row in lists]
    distinct = sorted({key for row in taken for key in row})
    assert isinstance(made, IndexedRows)
    assert torch.equal(made.vectors[1:], handle.vectors(distinct))
    assert not made.vectors[0].any()
    assert keys_of(handle) == distinct
    width = length or max(map(len, lists), default=0)
    expected = [[1 + distinct.index(key) for key in row] + [0] * (width - len(row)) for row in taken]
    assert made.index.tolist() == expected
    assert made.index.shape == (len(lists), width)
    assert made.index.dtype == torch.int64
    assert made.mask.tolist() == [[cell > 0 for cell in row] for row in expected]
    assert made.lengths().tolist() == list(map(len, taken))
    assert made.weights is None


@given(
    st.lists(LISTS, min_size=1, max_size=3),
    LENGTHS,
    st.booleans(),
    st.sampled_from([None, HashStack(2, 5)]),
)
@example([[[7] * 900 + [8], [7, 7]]], None, False, None)  # far more occurrences than a list of them holds
@example([[[7] * 600], [[], [7] * 300 + [9] * 300]], 500, True, None)
def test_a_sequence_of_it_trains_as_the_combiner_sequence(batches, length, weigh, stack):
    """Rows, state and counts are the same bits, also of gradients that are accumulated over batches."""
    options = {"name": "t", "hash_stack": stack}
    engines = [
        kv.EmbeddingEngine(
            {"f": kv.Table(3, combiner=name, length=length, **options), "g": kv.Table(3, **options)}, seed=1
        )
        for name in ("sequence", "index")
    ]
    optimizers = [kv.optim.Adagrad(engine, lr=0.1) for engine in engines]
    for number, lists in enumerate(batches):
        entry = kv.Ragged.from_lists(lists, weights=weighted(lists) if weigh else None)
        batch = {"f": entry, "g": torch.arange(len(lists)) % 3}
        plain, made = (engine(batch) for engine in engines)
        sequence = made["f"].to_sequence()
        assert torch.equal(sequence.values, plain["f"].values)
        assert torch.equal(sequence.mask, plain["f"].mask)
        # Small integers: their sums are exact, in whatever order.
        gradient = torch.randint(-8, 8, sequence.values.shape).float()
        for values, outputs in ((plain["f"].values, plain), (sequence.values, made)):
            ((values * gradient).sum() + outputs["g"].sum()).backward()
        if number % 2 == 0:
            for optimizer in optimizers:
                optimizer.step()
    assert rows_of(engines[0]) == rows_of(engines[1])


@given(LISTS, st.booleans())
def test_a_ragged_of_it_is_that_of_the_combiner_ragged(lists, weigh):
    engines = [kv.EmbeddingEngine({"f": kv.Table(3, combiner=name)}) for name in ("ragged", "index")]
    entry = kv.Ragged.from_lists(lists, weights=weighted(lists) if weigh else None)
    plain, made = (engine({"f": entry})["f"] for engine in engines)
    assert made.to_ragged().equal(plain)


@given(LISTS)
def test_the_gradient_of_a_vector_counts_once_however_often_its_id_occurs(lists):
    """As for keys of attention that a model computes once for each distinct id."""
    engine, handle = one(2, combiner="index")
    optimizer = kv.optim.SGD(engine, lr=1.0)
    made = engine({"f": kv.Ragged.from_lists(lists)})["f"]
    distinct = sorted({key for row in lists for key in row})
    before, gradient = handle.vectors(distinct), torch.rand(made.vectors.shape)
    made.vectors.backward(gradient)
    optimizer.step()
    torch.testing.assert_close(handle.vectors(distinct), before - gradient[1:])
    occurrences = [sum(row.count(key) for row in lists) for key in distinct]
    snapshot = handle.snapshot()
    assert dict(zip(snapshot.keys.tolist(), snapshot.counts.tolist(), strict=True)) == dict(
        zip(distinct, occurrences, strict=True)
    )


def test_ids_that_occur_often_cost_little():
    """A thousand ids, two of them distinct: seven vectors, with that of padding and four that only count."""
    lists = [[1, 2] * 50 for _ in range(10)]
    values, offsets, row_index = find_distinct(
        torch.tensor(lists).reshape(-1), torch.arange(11) * 100, None, 100
    )
    assert values[:2].tolist() == [1, 2]
    assert values.bincount().tolist() == [0, 500, 500]
    assert offsets.tolist() == [0, 0, 1, 2, 258, 514, 770, 1000]
    assert row_index.vectors == 3
    assert row_index.rows.tolist() == lists


def test_a_padded_cell_takes_part_in_nothing():
    engine, handle = one(2, combiner="index", length=3)
    optimizer = kv.optim.SGD(engine, lr=1.0)
    made = engine({"f": kv.Ragged.from_lists([[5], []])})["f"]
    before = handle.vectors([5])
    values = made.vectors[made.index]  # as a model may gather them by itself
    gradient = torch.full(values.shape, torch.nan)
    gradient[0, 0] = 1.0
    values.backward(gradient)
    optimizer.step()
    assert torch.equal(handle.vectors([5]), before - 1.0)


@pytest.mark.parametrize(
    ("entry", "index"),
    [
        (ids(4, 3, 4), [[2, 0], [1, 0], [2, 0]]),
        (ids(4, 3, 4).view(torch.uint64), [[2, 0], [1, 0], [2, 0]]),
        (ids(1, 2, 7, 3, 1, 7).reshape(2, 3), [[1, 2], [3, 1]]),
        (torch.zeros(2, 0, dtype=torch.int64), [[0, 0], [0, 0]]),
        (torch.zeros(0, dtype=torch.int64), []),
    ],
)
def test_ids_may_be_tensors(entry, index):
    engine, _ = one(combiner="index", length=2)
    made = engine({"f": entry})["f"]
    assert made.index.tolist() == index
    assert made.index.shape == (len(index), 2)
    assert len(made.vectors) == 1 + int(made.index.max() if len(index) else 0)
    made.vectors.sum().backward()


def test_weights_stay_with_the_index():
    lists, weights = [[3, 1, 3], [1]], [[0.5, 2.0, 1.5], [4.0]]
    entry = kv.Ragged.from_lists(lists, weights=weights)
    engine, handle = one(combiner="index", length=2)
    made = engine({"f": entry})["f"]
    assert torch.equal(made.vectors[1:], handle.vectors([1, 3]))
    assert made.weights.tolist() == [[0.5, 2.0], [4.0, 0.0]]
    engine, _ = one(combiner="index", use_weights=False)
    assert engine({"f": entry})["f"].weights is None


def test_evaluation_gives_zeros_for_unknown_ids_and_inserts_nothing():
    engine, handle = one(combiner="index")
    engine({"f": ids(1, 2)})
    engine.eval()
    made = engine({"f": kv.Ragged.from_lists([[9, 1], [8]])})["f"]
    assert made.index.tolist() == [[3, 1], [2, 0]]
    assert torch.equal(made.vectors[1], handle.vectors([1])[0])
    assert not made.vectors[2:].any()
    assert not made.vectors.requires_grad
    assert keys_of(handle) == [1, 2]


def test_features_that_read_alone_and_features_that_a_batch_lacks():
    tables = {
        "seen": kv.Table(2, name="item", combiner="index", read_only=True),
        "item": kv.Table(2),
        "gone": kv.Table(2, combiner="index", missing="empty", length=2),
    }
    engine = kv.EmbeddingEngine(tables)
    made = engine({"seen": kv.Ragged.from_lists([[1, 7], [7]]), "item": ids(1, 2)})
    assert torch.equal(made["seen"].vectors[1], made["item"][0])
    assert not made["seen"].vectors[2].any()
    assert not made["seen"].vectors.requires_grad
    assert made["gone"].index.tolist() == [[0, 0], [0, 0]]
    assert made["gone"].vectors.shape == (1, 2)
    assert keys_of(engine.table("item")) == [1, 2]


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [1, 2, 3], [0, 2], [0, -1, 3], [0, 9, 3]])
@pytest.mark.parametrize("store", [MemoryStore, lambda: CudaStore("cpu")])
def test_wrong_offsets_are_refused(offsets, store):
    engine = kv.EmbeddingEngine({"f": kv.Table(2, combiner="index", length=2)}, store=store())
    with pytest.raises(ValueError, match=r"'f'.*expected offsets that rise from 0 to its 3 ids, got \["):
        engine({"f": kv.Ragged(ids(1, 2, 3), ids(*offsets))})


def test_lists_of_lists_are_refused():
    engine, _ = one(combiner="index")
    with pytest.raises(ValueError, match="a list of ids for each sample with the combiner 'index'"):
        engine({"f": nested([[[1, 2]], []])})


@given(LISTS)
def test_equal_batches_give_equal_bits_prepared_or_not(lists):
    entry = kv.Ragged.from_lists(lists)
    outs = []
    for ahead in (False, True):
        engine, _ = one(combiner="index")
        if ahead:
            assert engine.prepare({"f": entry}, training=True)
        outs.append(engine({"f": entry})["f"])
    assert torch.equal(outs[0].vectors, outs[1].vectors)
    assert torch.equal(outs[0].index, outs[1].index)


class Attention(nn.Module):
    """Attention over a history. distinct: keys are computed once for each distinct item."""

    def __init__(self, distinct):
        super().__init__()
        torch.manual_seed(3)
        combiner = "index" if distinct else "sequence"
        tables = {"item": kv.Table(4), "history": kv.Table(4, name="item", combiner=combiner, length=6)}
        self.embeddings, self.keys = kv.EmbeddingEngine(tables, seed=2), nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, batch):
        vectors = self.embeddings(batch)
        item, history = vectors["item"], vectors["history"]
        if isinstance(history, IndexedRows):
            keys, history = embedding(history.index, self.keys(history.vectors)), history.to_sequence()
        else:
            keys = self.keys(history.values)
        scores = (keys * item.unsqueeze(1)).sum(2).masked_fill(~history.mask, -1e9)
        return self.out((scores.softmax(1).unsqueeze(2) * history.values).sum(1)).squeeze(1)


def batch_of(seed, rows=12):
    generator = torch.Generator().manual_seed(seed)
    lists = [
        torch.randint(0, 9, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 9, (rows,), generator=generator)
    ]
    return {
        "item": torch.randint(0, 9, (rows,), generator=generator),
        "history": kv.Ragged.from_lists(lists),
        "label": torch.randint(0, 2, (rows,), generator=generator).float(),
    }


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, 1e-5), ({"precision": "bf16"}, 2e-2), ({"gradient_accumulation_steps": 3}, 1e-5)],
)
def test_attention_over_distinct_items_learns_what_it_learns_over_all(options, tolerance):
    models = [Attention(distinct) for distinct in (False, True)]
    for model in models:
        sparse, dense = kv.optim.Adagrad(model, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
        loss = kv.losses.BinaryCrossEntropy("label")
        trainer = kv.Trainer(model, loss, dense_optimizer=dense, sparse_optimizer=sparse, **options)
        trainer.fit([batch_of(seed) for seed in range(6)])
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    plain, distinct = (model.embeddings.table("item").snapshot() for model in models)
    assert plain.keys.tolist() == distinct.keys.tolist()
    assert plain.counts.tolist() == distinct.counts.tolist()
    torch.testing.assert_close(
        torch.from_numpy(plain.vectors), torch.from_numpy(distinct.vectors), rtol=tolerance, atol=tolerance
    )


def test_a_compiled_model_gives_the_same_outputs_and_trains():
    model = Attention(distinct=True)
    compiled = torch.compile(model, backend="eager")
    compiled(batch_of(0))
    model.eval()
    torch.testing.assert_close(compiled(batch_of(0)), model(batch_of(0)))
    model.train()
    sparse = kv.optim.SGD(model, lr=0.1)
    before = model.embeddings.table("item").snapshot().vectors.copy()
    compiled(batch_of(0)).sum().backward()
    sparse.step()
    assert (model.embeddings.table("item").snapshot().vectors != before).any()


def test_a_copy_on_another_device_has_all_tensors_there():
    engine, _ = one(combiner="index")
    for weights in (None, [[1.0, 2.0]]):
        made = engine({"f": kv.Ragged.from_lists([[1, 2]], weights=weights)})["f"]
        moved = made.to("meta")
        assert repr(moved) == repr(made)
        for field in ("vectors", "index") if weights is None else ("vectors", "index", "weights"):
            assert getattr(moved, field).is_meta
            assert getattr(moved, field).shape == getattr(made, field).shape
