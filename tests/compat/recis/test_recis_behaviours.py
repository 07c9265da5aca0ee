"""What RecIS's public tests show of its optimizers, tables, operations and metrics, through its names.

Numbers come from formulas written out here, from torch and from scikit-learn.
"""

import copy
import math
from collections import defaultdict, namedtuple
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from karvan.compat.recis.features import (
    Bucketize,
    Feature,
    FeatureCross,
    FeatureEngine,
    Hash,
    Mod,
    SelectField,
    SelectFields,
    SequenceTruncate,
)
from karvan.compat.recis.features.op import _OP
from karvan.compat.recis.hooks import HashTableFilterHook
from karvan.compat.recis.metrics.auroc import AUROC
from karvan.compat.recis.metrics.gauc import Gauc
from karvan.compat.recis.nn import (
    DynamicEmbedding,
    EmbeddingEngine,
    EmbeddingOption,
    HashTable,
    NoReduceEmbedding,
)
from karvan.compat.recis.nn.functional import array_ops, fused_ops, hash_ops, ragged_ops
from karvan.compat.recis.nn.hashtable_hook import FilterHook
from karvan.compat.recis.nn.initializers import ConstantInitializer, TruncNormalInitializer
from karvan.compat.recis.nn.modules.hashtable import filter_out_sparse_param
from karvan.compat.recis.optim import (
    AdamWTF,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    SparseRowWiseAdagrad,
)
from karvan.compat.recis.ragged import RaggedTensor
from karvan.compat.recis.utils.data_utils import copy_data_to_device
from karvan.compat.unsupported import UnsupportedError


def rows_of(table):
    """id → vector, id → slots of the optimizer."""
    found = table.handle.snapshot()
    vectors = {int(key): torch.from_numpy(v) for key, v in zip(found.keys, found.vectors, strict=True)}
    slots = {int(key): torch.from_numpy(s) for key, s in zip(found.keys, found.state, strict=True)}
    return vectors, slots


def step(table, optimizer, ids, gradients):
    (table(torch.tensor(ids)) * gradients).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# Optimizers


def test_sparse_adagrad_is_torchs_for_an_embedding():
    torch.manual_seed(1)
    net, labels = nn.Linear(5, 7), torch.randint(7, (300,))
    table, same = HashTable([5], name="adagrad"), nn.Embedding(300, 5)
    with torch.no_grad():
        same.weight.zero_()
    options = {"lr": 0.01, "lr_decay": 0.001, "initial_accumulator_value": 0.03}
    sparse = SparseAdagrad(filter_out_sparse_param(table), **options)
    dense = torch.optim.Adagrad(same.parameters(), **options)
    seen = set()
    for _ in range(30):
        ids = torch.randperm(300)[: int(torch.randint(1, 40, ()))]
        seen |= set(ids.tolist())
        for lookup in (table, same):
            nn.functional.cross_entropy(net(lookup(ids)), labels[ids]).backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    vectors, slots = rows_of(table)
    assert set(vectors) == seen
    sums = dense.state[same.weight]["sum"]
    for key in seen:
        torch.testing.assert_close(vectors[key], same.weight[key].detach())
        torch.testing.assert_close(slots[key], sums[key])


def test_row_wise_adagrad_has_one_accumulator_and_its_decays():
    ids = [2, 5, 2, 9]  # twice the same: gradients add up before the square
    gradients = torch.tensor([[1.0, 2.0, 3.0], [2.0, -1.0, 0.0], [-1.0, 1.0, -1.0], [0.5, -0.5, 1.0]])
    table = HashTable([3], name="by_row")
    optimizer = SparseRowWiseAdagrad(
        filter_out_sparse_param(table),
        lr=0.1,
        lr_decay=0.02,
        initial_accumulator_value=0.3,
        eps=1e-4,
        weight_decay=0.07,
    )
    summed = torch.stack([gradients[0] + gradients[2], gradients[1], gradients[3]])
    accumulator, vectors = torch.full((3, 1), 0.3), torch.zeros(3, 3)
    for number in range(1, 4):
        step(table, optimizer, ids, gradients)
        decayed = summed + 0.07 * vectors
        accumulator += decayed.square().mean(1, keepdim=True)
        vectors -= 0.1 / (1 + (number - 1) * 0.02) * decayed / (accumulator.sqrt() + 1e-4)
    found, slots = rows_of(table)
    for at, key in enumerate((2, 5, 9)):
        torch.testing.assert_close(found[key], vectors[at], rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(slots[key], accumulator[at], rtol=2e-5, atol=2e-6)


def test_tables_count_their_own_steps():
    first, second = HashTable([1], name="first"), HashTable([1], name="second")
    optimizer = SparseAdagrad(
        {**filter_out_sparse_param(first), **filter_out_sparse_param(second)}, lr=0.1, lr_decay=0.1
    )
    step(first, optimizer, [1], 1.0)
    step(first, optimizer, [1], 1.0)
    step(second, optimizer, [2], 1.0)
    assert rows_of(second)[0][2].item() == pytest.approx(-0.1)
    step(second, optimizer, [2], 1.0)  # the second step of this table, the fourth of the optimizer
    assert rows_of(second)[0][2].item() == pytest.approx(-0.1 - 0.1 / 1.1 / math.sqrt(2))


@pytest.mark.parametrize(
    ("kind", "shrink"),
    [
        (SparseAdam, lambda lr, decay: 1.0),
        (SparseAdamW, lambda lr, decay: 1 - lr * decay),
        (SparseAdamWTF, lambda lr, decay: 1 - decay),
    ],
)
def test_adam_moves_touched_rows_and_leaves_the_moments_of_others(kind, shrink):
    lr, decay, b1, b2, eps = 0.02, 0.01, 0.8, 0.95, 1e-6
    table = HashTable([2], initializer=ConstantInitializer(0.5), name="adam")
    optimizer = kind(filter_out_sparse_param(table), lr, b1, b2, eps, decay)
    step(table, optimizer, [1, 2, 3], torch.tensor([[1.0, -1.0], [0.3, 2.0], [4.0, 5.0]]))
    vectors, slots = rows_of(table)
    p, m, v = vectors[1], *slots[1].split(2)
    step(table, optimizer, [1], torch.tensor([[0.5, 3.0]]))
    found, after = rows_of(table)
    for key in (2, 3):  # bit by bit
        assert torch.equal(found[key], vectors[key])
        assert torch.equal(after[key], slots[key])
    g = torch.tensor([0.5, 3.0])
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    alpha = lr * math.sqrt(1 - b2**2) / (1 - b1**2)  # the second step of the table
    torch.testing.assert_close(found[1], p * shrink(lr, decay) - alpha * m / (v.sqrt() + eps))
    torch.testing.assert_close(after[1], torch.cat([m, v]))


def test_dense_adamwtf_decays_by_weight_decay_alone():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in (1, 3, 4, 17)]
    expected = [each.detach().clone() for each in parameters]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in expected]
    optimizer = AdamWTF(parameters, lr=0.001, weight_decay=0.02)
    for number in range(1, 4):
        for at, each in enumerate(parameters):
            each.grad = g = torch.randn_like(each)
            m, v = (0.9 * moments[at][0] + 0.1 * g, 0.999 * moments[at][1] + 0.001 * g * g)
            moments[at] = (m, v)
            alpha = 0.001 * math.sqrt(1 - 0.999**number) / (1 - 0.9**number)
            expected[at] = expected[at] * 0.98 - alpha * m / (v.sqrt() + 1e-8)
        optimizer.step()
    for each, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(each.detach(), wanted)


def test_accumulated_gradients_are_those_of_one_large_batch():
    def trained(parts):
        torch.manual_seed(2)
        table, net = HashTable([3], initializer=ConstantInitializer(0.5), name="grads"), nn.Linear(3, 1)
        optimizer = SparseAdamWTF(filter_out_sparse_param(table), weight_decay=1e-6)
        for ids in torch.arange(30).reshape(parts, -1):
            (net(table(ids)).mean() / parts).backward()
        optimizer.step()
        return rows_of(table)

    (whole, slots), (parts, slots_of_parts) = trained(1), trained(5)
    for key in range(30):
        torch.testing.assert_close(parts[key], whole[key])
        torch.testing.assert_close(slots_of_parts[key], slots[key])


# Tables


def test_the_filter_frees_rows_that_are_new_and_used_again():
    table = HashTable(
        [8],
        initializer=ConstantInitializer(3.0),
        filter_hook=FilterHook("GlobalStepFilter", {"filter_step": 2}),
        name="freed",
    )
    optimizer = SparseAdamW(filter_out_sparse_param(table), lr=0.5)
    hook = HashTableFilterHook(filter_interval=1)
    start = table.handle.initial_state
    sizes = []
    for number in range(6):
        ids = list(range(1000 * number, 1000 * number + 1000))
        table(torch.tensor(ids))  # new rows, before they are trained
        vectors, slots = rows_of(table)
        assert vectors[ids[0]].tolist() == [3.0] * 8
        assert slots[ids[0]].tolist() == list(start)
        step(table, optimizer, ids, 1.0)
        hook.after_step(global_step=number)
        # two lookups a round: the rows of this one alone are left
        assert sorted(table.ids().tolist()) == ids
        sizes.append(table.handle.bytes)
    # From the second round on, new rows take the memory of removed ones; only the log of removed ids grows.
    numbers = 4 * 1000 * (8 + 16) * 4  # the bytes of vectors and moments of four rounds
    assert sizes[-1] - sizes[1] < numbers / 3
    table(torch.tensor([0]))  # a row that was trained and removed
    vectors, slots = rows_of(table)
    assert (vectors[0].tolist(), slots[0].tolist()) == ([3.0] * 8, list(start))


def test_features_that_a_batch_lacks_are_not_in_the_result():
    init = TruncNormalInitializer(mean=0, std=0.01)
    engine = EmbeddingEngine(
        {
            "a": EmbeddingOption(8, shared_name="a", initializer=init),
            "b": EmbeddingOption(8, shared_name="b", combiner="mean", initializer=init, trainable=False),
        }
    )
    ids = RaggedTensor(torch.tensor([5, 16385, 1, 32800, 16385]), torch.tensor([0, 1, 3, 5]))
    out = engine({"a": ids, "label": torch.ones(3)})
    assert set(out) == {"a", "label"}
    assert out["a"].shape == (3, 8)
    assert len(filter_out_sparse_param(engine)["b"].ids()) == 0
    large = RaggedTensor(torch.tensor([9155707040084860980, 11, 12]), torch.tensor([0, 3]))
    assert engine({"a": large, "b": large})["b"].shape == (1, 8)
    assert sorted(filter_out_sparse_param(engine)["b"].ids().tolist()) == [11, 12, 9155707040084860980]
    with pytest.raises(KeyError, match="expects samples with some of a, b"):
        engine({"label": torch.ones(3)})


def test_lists_of_lists_are_cut_filled_up_and_pooled_list_by_list():
    lists = RaggedTensor(
        torch.tensor([1, 2, 3, 1, 1, 2, 3, 3]), [torch.tensor([0, 3, 4]), torch.tensor([0, 2, 3, 5, 8])]
    )  # [[1, 2], [3], [1, 1]] and [[2, 3, 3]]
    cut = SequenceTruncate(2, check_length=False, truncate_side="right", n_dims=3)(lists)
    assert cut.values().tolist() == [1, 2, 3, 2, 3, 3]
    assert [each.tolist() for each in cut.offsets()] == [[0, 2, 4], [0, 2, 3, 6, 6]]
    embedding = DynamicEmbedding(EmbeddingOption(2))
    filter_out_sparse_param(embedding)["embedding"].insert(
        torch.tensor([1, 2, 3]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    )
    assert embedding(cut).tolist() == [[[1, 1], [2, 2]], [[4, 5], [0, 0]]]
    with pytest.raises(ValueError, match="expects equally many lists in all rows, got 1 to 3"):
        embedding(lists)
    engine = FeatureEngine(
        [Feature("x").add_op(SelectField("x")).add_op(SequenceTruncate(2, n_dims=2))],
    )
    with pytest.raises(
        TypeError,
        match="Feature 'x', SequenceTruncate: expected lists, or rows that have one list each, for n_dims=2",
    ):
        engine({"x": lists})
    with pytest.raises(TypeError, match="expected lists of lists for n_dims=3"):
        SequenceTruncate(2, n_dims=3)(RaggedTensor(torch.arange(3), torch.tensor([0, 3])))


def test_lists_that_are_alone_in_their_rows_are_cut_as_lists_by_default():
    alone = RaggedTensor(torch.arange(8), [torch.tensor([0, 1, 2]), torch.tensor([0, 5, 8])])
    feature = Feature("x").add_op(SelectField("x")).add_op(SequenceTruncate(4)).add_op(Mod(1000))
    for made in (FeatureEngine([feature])({"x": alone})["x"], SequenceTruncate(4, False)(alone)):
        assert made.values().tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert [each.tolist() for each in made.offsets()] == [[0, 4, 7]]


@pytest.mark.parametrize("error", [AssertionError, ValueError])
@pytest.mark.parametrize("truncate", [True, False])
def test_an_operation_alone_checks_the_length_by_default_as_in_recis(error, truncate):
    long = RaggedTensor(torch.arange(3), torch.tensor([0, 3]))
    lists = RaggedTensor(torch.arange(3), [torch.tensor([0, 3]), torch.tensor([0, 1, 2, 3])])
    for entry, n_dims in ((long, 2), (lists, 3)):
        with pytest.raises(error, match="expected at most 2 values, but received a row of 3"):
            SequenceTruncate(2, truncate=truncate, n_dims=n_dims)(entry)
    engine = FeatureEngine([Feature("x").add_op(SelectField("x")).add_op(SequenceTruncate(2))])
    assert engine({"x": long})["x"].values().tolist() == [1, 2]


def test_features_without_an_embedding_are_dense_except_for_bytes():
    engine = EmbeddingEngine({"user": EmbeddingOption(2)})
    samples = {
        "user": RaggedTensor(torch.tensor([1, 2]), torch.tensor([0, 1, 2])),
        "price": RaggedTensor(torch.tensor([0.5, 1.5, 2.5]), torch.tensor([0, 1, 3])),
        "lists": RaggedTensor(torch.tensor([7, 8]), [torch.tensor([0, 0, 2]), torch.tensor([0, 1, 2])]),
        "text": RaggedTensor(torch.tensor([65], dtype=torch.int8), torch.tensor([0, 1, 1])),
        "label": torch.ones(2, 1),
    }
    made = engine(samples)
    assert made["price"].tolist() == [[0.5, 0.0], [1.5, 2.5]]
    assert made["lists"].tolist() == [[[0], [0]], [[7], [8]]]
    assert made["text"] is samples["text"]
    assert made["label"] is samples["label"]
    none = torch.tensor([0])
    empty = engine(
        {
            "user": RaggedTensor(torch.tensor([], dtype=torch.int64), none),
            "price": RaggedTensor(torch.tensor([]), none),
            "other": RaggedTensor(torch.tensor([]), none),
        }
    )  # as a rank has it whose data has ended
    assert (empty["price"].shape, empty["other"].shape) == ((0, 2), (0, 1))


class Scale(_OP):
    """An operation of a program."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return x * self.factor


class Halves(Mod):
    """One that changes an operation of RecIS, and has two results."""

    def forward(self, x):
        return {"low": super().forward(x), "all": x}


def test_operations_of_the_program_are_computed_and_trained():
    engine = FeatureEngine(
        [
            Feature("price").add_op(SelectField("price", dim=1)).add_op(Scale(2.0)),
            Feature("bucket").add_op(SelectField("price")).add_op(Scale(4.0)).add_op(Bucketize([1.0])),
            Feature("user").add_op(SelectField("user")).add_op(Halves(10)),
            Feature("plain").add_op(SelectField("user")).add_op(Mod(5)),
        ]
    )
    made = engine({"price": torch.tensor([[0.5], [0.1]]), "user": torch.tensor([[11], [22]])})
    assert made["price"].tolist() == [[1.0], [pytest.approx(0.2)]]
    assert made["bucket"].tolist() == [[1], [0]]
    assert (made["user_low"].tolist(), made["user_all"].tolist()) == ([[1], [2]], [[11], [22]])
    assert made["plain"].tolist() == [[1], [2]]
    made["price"].sum().backward()
    assert [each.grad is not None for each in engine.parameters()] == [True, False]


def test_a_feature_alone_computes_its_operations():
    cross = Feature("x").add_op(SelectFields([SelectField("a"), SelectField("b")])).add_op(FeatureCross())
    ids = RaggedTensor(torch.tensor([1001]), torch.tensor([0, 1]))
    ones = RaggedTensor(torch.tensor([1]), torch.tensor([0, 1]))
    assert cross({"a": ids, "b": ones}).values().tolist() == [-7808879811642834040]


@pytest.mark.parametrize("trainable", [True, False])
def test_without_reduction_each_distinct_id_has_one_vector(trainable):
    engine = EmbeddingEngine(
        {
            "seq": EmbeddingOption(2, shared_name="items", no_reduce=True, trainable=trainable),
            "user": EmbeddingOption(2, shared_name="users"),
        }
    )
    tables = filter_out_sparse_param(engine)
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    tables["items"].insert(torch.tensor([10, 20, 30]), vectors)
    optimizer = SparseAdagrad(tables, lr=1.0)
    ids = torch.tensor([20, 10, 20, 30, 30, 30])
    offsets = torch.tensor([0, 2, 2, 6])
    out = engine({"seq": RaggedTensor(ids, offsets), "user": torch.tensor([1, 2, 3])})
    found = out["seq"]
    assert isinstance(found, NoReduceEmbedding)
    assert found.emb.shape == (3, 2)
    assert found.offsets.tolist() == offsets.tolist()
    assert torch.equal(found.emb[found.reverse_index], vectors[ids // 10 - 1])
    assert found.emb.requires_grad is trainable
    (found.emb[found.reverse_index].sum() + out["user"].sum()).backward()  # gradients 1, 2 and 3
    optimizer.step()
    moved = vectors - 1.0 if trainable else vectors  # of Adagrad, g / sqrt(g²)
    torch.testing.assert_close(tables["items"].handle.vectors(torch.tensor([10, 20, 30])), moved)


@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_combiners_against_torch_forward_and_backward(mode):
    torch.manual_seed(4)
    lengths = torch.randint(0, 7, (11,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.randint(0, 9, (int(offsets[-1]),))
    weights = None if mode == "tile" else torch.rand(len(ids)) + 0.1
    kwargs = {"tile_len": 5} if mode == "tile" else None
    embedding = DynamicEmbedding(EmbeddingOption(4, combiner=mode, combiner_kwargs=kwargs))
    start = torch.randn(9, 4)
    table = filter_out_sparse_param(embedding)["embedding"]
    table.insert(torch.arange(9), start)
    optimizer = SparseAdagrad({"embedding": table}, lr=1.0)
    out = embedding(RaggedTensor(ids, offsets, weights))
    weight = nn.Parameter(start.clone())
    rows = []
    for first, last in pairwise(offsets.tolist()):
        vectors = weight[ids[first:last]]
        if mode == "tile":
            padded = torch.cat([vectors[:5], torch.zeros(max(0, 5 - len(vectors)), 4)])
            rows.append(padded.reshape(-1))
            continue
        factors = weights[first:last, None]
        total = (vectors * factors).sum(0)
        rows.append(total / factors.sum() if mode == "mean" and last > first else total)
    expected = torch.stack(rows)
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(expected)
    (out * gradient).sum().backward()
    (expected * gradient).sum().backward()
    optimizer.step()
    torch.optim.Adagrad([weight], lr=1.0).step()
    touched = ids.unique()
    torch.testing.assert_close(table.handle.vectors(touched), weight.detach()[touched])


# Operations


def test_hashes_of_several_features_at_once():
    """Two rows of bytes for each, as in the fused kernels' test."""
    texts = {"a": [0, 1, 2, 1, 2, 3], "b": [0, 5, 5, 5, 6, 7]}
    expected = {
        "farm": {
            "a": [-7736835464683084646, -5546720800891377920],
            "b": [-4442022684725028445, -909183002746659612],
        },
        "murmur": {
            "a": [-4003751876240412087, -1042754718167355375],
            "b": [-5541886947548579749, 4434088491466393040],
        },
    }
    for kind, wanted in expected.items():
        engine = FeatureEngine([Feature(n).add_op(SelectField(n)).add_op(Hash(kind)) for n in texts])
        made = engine(
            {
                name: RaggedTensor(
                    torch.tensor(values, dtype=torch.int8), [torch.tensor([0, 1, 2]), torch.tensor([0, 3, 6])]
                )
                for name, values in texts.items()
            }
        )
        assert {name: made[name].values().tolist() for name in texts} == wanted


def test_bucketize_and_mod_against_numpy():
    random = np.random.default_rng(5)
    numbers = random.normal(size=500).astype(np.float32)
    boundaries = sorted(random.normal(size=20).astype(np.float32).tolist())
    found = Bucketize(boundaries)(torch.from_numpy(numbers))
    assert found.tolist() == np.searchsorted(np.array(boundaries, np.float32), numbers, "right").tolist()
    assert Bucketize([18, 25, 35, 45, 55, 65])(torch.tensor([20.0, 30, 40, 50, 60])).tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]
    ids = random.integers(-(2**63), 2**63, 500)
    assert Mod(9973)(torch.from_numpy(ids)).tolist() == (ids.view(np.uint64) % np.uint64(9973)).tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_of_ragged_rows(side):
    lengths = [256, 0, 3, 128, 129]
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    rows = RaggedTensor(torch.arange(bounds[-1]), torch.tensor(bounds), torch.rand(bounds[-1]))
    made = SequenceTruncate(128, check_length=False, truncate_side=side)(rows)
    expected = [list(range(a, b)) for a, b in pairwise(bounds)]
    expected = [row[-128:] if side == "left" else row[:128] for row in expected]
    values = [value for row in expected for value in row]
    assert made.values().tolist() == values
    assert made.offsets()[0].diff().tolist() == [len(row) for row in expected]
    assert torch.equal(made.weight(), rows.weight()[values])  # weights are cut, too


def test_a_chain_may_be_called_by_itself_and_equal_features_share_nothing():
    batch = {"a": RaggedTensor(torch.tensor([7, 7, 9]), torch.tensor([0, 2, 3]))}
    crossed = Feature("x").add_op(SelectFields([SelectField("a"), SelectField("a")])).add_op(FeatureCross())
    twice = FeatureEngine([crossed, Feature("y").add_op(SelectField("a")).add_op(Mod(5))])(batch)
    assert twice["x"].offsets()[0].tolist() == [0, 1, 2]  # ids of a row count once
    assert twice["y"].values().tolist() == [2, 2, 4]
    with pytest.raises(UnsupportedError, match="from_dict=False"):
        FeatureEngine([Feature("z").add_op(SelectFields([SelectField("a", from_dict=False)]))])


# Ragged tensors


def test_ragged_tensors_have_shapes_copies_and_texts():
    rows = RaggedTensor(torch.arange(1, 7), [torch.tensor([0, 2, 5, 6])])
    assert (rows.shape, rows.dim, rows.max_length, rows.dtype) == ((3, 3), 2, 3, torch.int64)
    assert (rows.real_shape(0, 1), rows.real_shape(1, 2), rows.get_shape(-1)) == ((3,), (3,), 3)
    assert rows.to_dense().tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    rows.set_dim_by_rank(10, 1)
    assert rows.shape == (3, 10)
    assert rows.to_dense(-1.0).tolist() == [[1, 2, -1], [3, 4, 5], [6, -1, -1]]  # as long as the longest
    shallow, deep = rows.clone(), copy.deepcopy(rows)
    rows.values()[0] = 999
    assert (shallow.values()[0], deep.values()[0]) == (999, 1)
    assert all(part in str({"x": rows}) for part in ("RaggedTensor", "values=", "offsets=", "dense_shape="))
    made = RaggedTensor.from_numpy(np.arange(6), [np.array([0, 2, 5, 6])])
    assert made.to_dense().tolist() == [[0, 1, 0], [2, 3, 4], [5, 0, 0]]
    with pytest.raises(UnsupportedError, match=r"use to_dense\(\)"):
        rows[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_dense_rows_become_ragged_and_dense_again(dtype):
    padded = torch.tensor([[1, 0, 3, 0, 0], [6, 7, 8, 0, 0]], dtype=dtype)
    trimmed = RaggedTensor.from_dense(padded, check_invalid=True)
    assert trimmed.values().tolist() == [1, 0, 3, 6, 7, 8]  # a pad before another value stays
    assert trimmed.offsets()[0].tolist() == [0, 3, 6]
    whole = RaggedTensor.from_dense(padded)
    assert torch.equal(whole.to_dense(), padded)
    assert whole.offsets()[0].tolist() == [0, 5, 10]


# Metrics


def test_auroc_is_scikit_learns_within_its_resolution():
    from sklearn.metrics import roc_auc_score  # slow to import, and few tests need it

    random = np.random.default_rng(6)
    labels = random.integers(0, 2, 2000)
    scores = np.clip(random.normal(0.3 + 0.2 * labels, 0.2), 0, 1)
    metric = AUROC(num_thresholds=200)
    for part in np.array_split(np.arange(2000), 7):
        metric.update(torch.tensor(scores[part]), torch.tensor(labels[part]))
    assert metric.compute().item() == pytest.approx(roc_auc_score(labels, scores), abs=1e-3)
    assert metric(torch.tensor([0.9, 0.7, 0.3, 0.1]), torch.tensor([1, 1, 0, 0])).item() == 1.0
    assert metric.compute().item() == pytest.approx(roc_auc_score(labels, scores), abs=1e-3)  # not counted
    with pytest.raises(ValueError, match="num_thresholds above 2"):
        AUROC(num_thresholds=2)


def test_gauc_weighs_groups_by_their_clicks():
    from sklearn.metrics import roc_auc_score

    labels = torch.tensor([1.0, 0, 0, 0, 1])
    predictions = torch.tensor([0.6, 0.4, 0.55, 0.45, 0.5])
    assert Gauc()(labels, predictions, torch.tensor([0, 0, 1, 1, 1])) == (0.75, 0.75)
    random = np.random.default_rng(7)
    users = np.sort(random.integers(0, 40, 400))
    clicks, scores = random.integers(0, 2, 400).astype(np.float32), random.random(400)
    total = weight = 0.0
    for user in np.unique(users):
        y, s = clicks[users == user], scores[users == user]
        if 0 < y.sum() < len(y):
            total, weight = total + y.sum() * roc_auc_score(y, s), weight + y.sum()
    found, _ = Gauc()(torch.tensor(clicks), torch.tensor(scores), torch.tensor(users))
    assert found == pytest.approx(total / weight)


def test_functions_on_tensors_do_what_their_operations_do():
    assert array_ops.bucketize(torch.tensor([[0.5, 1.0], [2.5, 9.0]]), [1.0, 2.0]).tolist() == [
        [0, 1],
        [2, 2],
    ]
    assert array_ops.bucketize_mod(torch.tensor([[12345, -1]]), 1000).tolist() == [[345, 615]]
    primes = [28979, 46997, 66977, 82997]  # the largest below 1000 times 29, 47, 67 and 83
    expected = [[1, 2, 3], [3, 6, 9], [5, 10, 15], [7, 14, 21]]
    ids, muls = torch.tensor([1001, 1002, 1003]), [1, 3, 5, 7]
    assert [each.tolist() for each in array_ops.multi_hash(ids, muls, primes, 1000)] == expected
    settings = ([torch.tensor(muls)], [torch.tensor(primes)], [torch.full((4,), 1000)])
    assert [each.tolist() for each in fused_ops.fused_multi_hash([ids], *settings)] == expected
    numbers, mods = [torch.tensor([11, 12]), torch.tensor([-1])], torch.tensor([10, 10])
    assert [each.tolist() for each in fused_ops.fused_uint64_mod_gpu(numbers, mods)] == [[1, 2], [5]]
    (bucket,) = fused_ops.fused_bucketize_gpu([torch.tensor([0.5])], [torch.tensor([0.0])])
    assert bucket.tolist() == [1]
    texts, lengths = fused_ops.fused_int64_to_string_int8([torch.tensor([123, -4])])
    assert (bytes(texts[0].tolist()), lengths[0].tolist()) == (b"123-4", [3, 2])
    strings, offsets = torch.tensor([0, 1, 2, 1, 2, 3], dtype=torch.int8), torch.tensor([0, 3, 6])
    assert hash_ops.farmhash([strings], [offsets])[0].tolist() == [-7736835464683084646, -5546720800891377920]
    assert hash_ops.murmurhash([strings], [offsets])[0].tolist() == [
        -4003751876240412087,
        -1042754718167355375,
    ]
    values, rows = ragged_ops.dense_to_ragged(torch.tensor([[1, 0, 3, 0], [6, 7, 0, 0]]), check_invalid=True)
    assert (values.tolist(), rows[0].tolist()) == ([1, 0, 3, 6, 7], [0, 3, 5])
    assert ragged_ops.ragged_to_dense(values, rows, -1).tolist() == [[1, 0, 3], [6, 7, -1]]
    assert ragged_ops.ragged_to_sparse(values, rows).to_dense().tolist() == [[1, 0, 3], [6, 7, 0]]
    one = torch.tensor([0, 1])
    crossed = ragged_ops.feature_cross_ragged(torch.tensor([1001]), one, torch.tensor([1]), one)
    assert [each.tolist() for each in crossed] == [[-7808879811642834040], [0, 1], [1.0]]


def test_data_is_copied_to_a_device_with_its_structure():
    @dataclass
    class Pair:
        a: torch.Tensor
        b: str

    Named = namedtuple("Named", "x y")
    data = {
        "list": [torch.ones(1), 3],
        "pair": Pair(torch.ones(1), "b"),
        "named": Named(torch.ones(1), None),
        "default": defaultdict(int, {"x": torch.ones(1)}),
        "ragged": RaggedTensor(torch.tensor([1]), torch.tensor([0, 1])),
    }
    made = copy_data_to_device(data, "meta")
    moved = [made["list"][0], made["pair"].a, made["named"].x, made["default"]["x"], made["ragged"]]
    assert {str(each.device) for each in moved} == {"meta"}
    assert (made["list"][1], made["pair"].b, made["named"].y, made["default"]["y"]) == (3, "b", None, 0)


def test_ids_of_a_tensor_have_weights_beside_them():
    embedding = DynamicEmbedding(EmbeddingOption(2))
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    filter_out_sparse_param(embedding)["embedding"].insert(torch.tensor([1, 2]), rows)
    weights = torch.tensor([[0.5, 2.0], [3.0, 0.0]])
    assert embedding(torch.tensor([[1, 2], [1, 1]]), weights).tolist() == [[0.5, 2.0], [3.0, 0.0]]
    ragged = RaggedTensor(torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="a RaggedTensor has weights of its own"):
        embedding(ragged, torch.ones(1, 1))
