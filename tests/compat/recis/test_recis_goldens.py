"""What RecIS's own tests show, through its names: hashes, operations, combiners, optimizers, metrics."""

import math
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open

from karvan.compat.cuda_fallback import cuda_fallback
from karvan.compat.recis.features.feature import Feature
from karvan.compat.recis.features.feature_engine import FeatureEngine
from karvan.compat.recis.features.op import (
    Bucketize,
    FeatureCross,
    Hash,
    IDMultiHash,
    Mod,
    SelectField,
    SelectFields,
    SequenceTruncate,
    StringMultiHash,
)
from karvan.compat.recis.hooks import HashTableFilterHook
from karvan.compat.recis.metrics.auroc import AUROC
from karvan.compat.recis.metrics.gauc import Gauc
from karvan.compat.recis.nn import DynamicEmbedding, EmbeddingEngine, EmbeddingOption, HashTable
from karvan.compat.recis.nn.hashtable_hook import AdmitHook, FilterHook
from karvan.compat.recis.nn.initializers import (
    ConstantInitializer,
    KaimingNormalInitializer,
    KaimingUniformInitializer,
    NormalInitializer,
    TruncNormalInitializer,
    UniformInitializer,
    XavierNormalInitializer,
    XavierUniformInitializer,
)
from karvan.compat.recis.nn.modules.hashtable import filter_out_sparse_param
from karvan.compat.recis.optim import (
    AdamWTF,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    SparseRowWiseAdagrad,
)
from karvan.compat.recis.ragged.tensor import RaggedTensor
from karvan.compat.recis.serialize import Loader, Saver
from karvan.compat.unsupported import UnsupportedError


def ragged(rows, weight=None, dtype=torch.int64):
    values = torch.tensor([value for row in rows for value in row], dtype=dtype)
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return RaggedTensor(values, offsets, None if weight is None else torch.tensor(weight))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("farm", [-7736835464683084646, -5546720800891377920]),
        ("murmur", [-4003751876240412087, -1042754718167355375]),
    ],
)
def test_hash_of_bytes(kind, expected):
    text = RaggedTensor(
        torch.tensor([0, 1, 2, 1, 2, 3], dtype=torch.int8), [torch.tensor([0, 1, 2]), torch.tensor([0, 3, 6])]
    )
    assert Hash(kind)(text).values().tolist() == expected


def test_mod_is_unsigned():
    assert Mod(10)(torch.tensor([-1])).tolist() == [5]
    assert Mod(1000)(ragged([[1001], [2]])).values().tolist() == [1, 2]


def test_bucketize_counts_boundaries_that_are_not_above():
    assert Bucketize([0, 0.5, 1])(torch.tensor([[0.5], [-1.0], [1.0]])).tolist() == [[2], [0], [3]]
    assert Bucketize(torch.tensor([0, 0.5, 1]))(torch.tensor([0.5])).tolist() == [2]


def test_cross_of_pairs():
    made = FeatureCross()([ragged([[1001], [1002], [1003]]), ragged([[1], [2], [3]])])
    assert made.values().tolist() == [-7808879811642834040, -4967483181219983279, 1752425377096056168]


def test_cross_multiplies_weights_of_distinct_pairs():
    made = FeatureCross()([ragged([[1, 2]], [2.0, 3.0]), ragged([[5]], [0.5])])
    assert made.weight().tolist() == [1.0, 1.5]
    assert made.offsets()[0].tolist() == [0, 2]


def test_multi_hash_of_ids():
    expected = [[1, 2, 3], [3, 6, 9], [5, 10, 15], [7, 14, 21]]
    alone = IDMultiHash([1000] * 4)(ragged([[1001, 1002, 1003]]))
    assert [alone[f"multi_hash_{i}"].values().tolist() for i in range(4)] == expected
    engine = FeatureEngine([Feature("a").add_op(SelectField("x")).add_op(IDMultiHash([1000] * 4))])
    made = engine({"x": ragged([[1001, 1002, 1003]])})
    assert [made[f"a_multi_hash_{i}"].values().tolist() for i in range(4)] == expected


def test_multi_hash_of_one_bucket_has_its_name_too():
    ids = ragged([[1001, 1002]])
    assert IDMultiHash([1000])(ids)["multi_hash_0"].values().tolist() == [1, 2]
    feature = Feature("a").add_op(SelectField("x")).add_op(IDMultiHash([1000], prefix="h")).add_op(Mod(2))
    made = FeatureEngine([feature])({"x": ids})
    assert set(made) == {"x", "a_h_0"}
    assert made["a_h_0"].values().tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: IDMultiHash([]), "from 1 to 4 bucket counts"),
        (lambda: IDMultiHash([10] * 5), "from 1 to 4 bucket counts"),
        (lambda: SequenceTruncate(2, truncate_side="top"), "truncate_side 'left' or 'right', got 'top'"),
        (lambda: SequenceTruncate(0), "a length of at least 1"),
        (lambda: SequenceTruncate(2, n_dims=4), "n_dims 2 or 3"),
        (lambda: Bucketize([1, 0]), "increasing finite boundaries"),
        (lambda: Mod(0), "mod expects"),
        (lambda: Hash("md5"), "'farm' or 'murmur', got 'md5'"),
    ],
)
def test_arguments_of_operations_are_checked_at_once(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_truncate_on_the_left_keeps_the_tails():
    rows = ragged([list(range(256)), list(range(1000, 1256))])
    made = SequenceTruncate(seq_len=128, truncate_side="left", check_length=False)(rows)
    assert made.offsets()[0].tolist() == [0, 128, 256]
    assert made.values().tolist() == [*range(128, 256), *range(1128, 1256)]
    lists = RaggedTensor(
        torch.arange(6), [torch.tensor([0, 3]), torch.tensor([0, 2, 4, 6])]
    )  # one row of three lists
    cut = SequenceTruncate(seq_len=2, truncate_side="right", check_length=False, n_dims=3)(lists)
    assert cut.values().tolist() == [0, 1, 2, 3]


def test_lengths_are_checked_instead_of_cut():
    check = SequenceTruncate(seq_len=2, truncate=False)
    assert check(ragged([[1, 2], [3]])).values().tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="expected at most 2 values, but received a row of 3"):
        check(ragged([[1, 2, 3]]))
    unchanged = SequenceTruncate(seq_len=2, truncate=False, check_length=False)(ragged([[1, 2, 3]]))
    assert unchanged.values().tolist() == [1, 2, 3]


def test_an_engine_keeps_what_no_feature_names():
    engine = FeatureEngine(
        [
            Feature("a").add_op(SelectField("a")).add_op(Mod(10)),
            Feature("both").add_op(SelectFields([SelectField("a"), SelectField("b")])).add_op(FeatureCross()),
        ]
    )
    made = engine({"a": ragged([[11]]), "b": ragged([[2]]), "label": torch.ones(1)})
    assert set(made) == {"a", "b", "both", "label"}
    assert made["a"].values().tolist() == [1]
    alone = FeatureCross()([ragged([[11]]), ragged([[2]])])  # fields are those of the batch, not features
    assert made["both"].values().tolist() == alone.values().tolist()
    assert set(engine({"a": ragged([[11]]), "b": ragged([[2]])}, remain_no_use_data=False)) == {"a", "both"}


def test_ragged_tensors():
    rows = ragged([[1, 2], [], [3]])
    assert rows.shape == (3, 2)
    assert rows.to_dense(-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert rows.to_sparse().to_dense().tolist() == [[1, 2], [0, 0], [3, 0]]
    assert RaggedTensor.from_dense(torch.tensor([[1, 2], [3, 4]])).values().tolist() == [1, 2, 3, 4]
    padded = torch.tensor([[0, 2, 0], [3, 0, 0], [0, 0, 0]])
    trimmed = RaggedTensor.from_dense(padded, check_invalid=True)
    assert (trimmed.values().tolist(), trimmed.offsets()[0].tolist()) == ([0, 2, 3], [0, 2, 3, 3])
    lists = RaggedTensor(torch.arange(1, 6), [torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4, 5])])
    assert lists.to_dense().tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 0]]]
    assert rows.to(torch.float32).dtype is torch.float32
    assert rows.to(torch.float32).offsets()[0].dtype is torch.int64


def filled(option, values):
    """An embedding of a table that has these vectors."""
    made = DynamicEmbedding(option)
    table = filter_out_sparse_param(made)[option.shared_name]
    table.insert(torch.tensor(list(values)), torch.tensor(list(values.values())))
    return made


VECTORS = {1: [1.0, 0.0], 2: [0.0, 1.0], 3: [2.0, 2.0]}


def test_combiners():
    rows = ragged([[1, 2], [], [3]])
    sums = filled(EmbeddingOption(2, combiner="sum"), VECTORS)(rows)
    assert sums.tolist() == [[1, 1], [0, 0], [2, 2]]
    means = filled(EmbeddingOption(2, combiner="mean"), VECTORS)(rows)
    assert means.tolist() == [[0.5, 0.5], [0, 0], [2, 2]]
    tile = EmbeddingOption(2, combiner="tile", combiner_kwargs={"tile_len": 3})
    tiles = filled(tile, VECTORS)(rows)
    assert tiles.tolist() == [[1, 0, 0, 1, 0, 0], [0] * 6, [2, 2, 0, 0, 0, 0]]


def test_weights():
    rows = ragged([[1, 2]], [1.0, 2.5])
    means = filled(EmbeddingOption(2, combiner="mean"), {1: [1.5, 0.0], 2: [1.0, 0.0]})(rows)
    assert means[0, 0].item() == pytest.approx(4 / 3.5)
    long = ragged([[1] * 12], [0.5] * 12)  # RecIS divides by the number of ids where a batch has many
    assert filled(EmbeddingOption(2, combiner="mean"), VECTORS)(long).tolist() == [[0.5, 0.0]]
    ignored = filled(EmbeddingOption(2, combiner="sum", use_weight=False), VECTORS)(rows)
    assert ignored.tolist() == [[1, 1]]
    tile = EmbeddingOption(2, combiner="tile", combiner_kwargs={"tile_len": 2})
    assert filled(tile, VECTORS)(rows).tolist() == [[1, 0, 0, 1]]  # a tile ignores weights


def test_training_inserts_and_evaluation_does_not():
    table = HashTable([4], initializer=ConstantInitializer(2.0))
    assert table(torch.tensor([7, 7, 8])).tolist() == [[2.0] * 4] * 3
    assert sorted(table.ids().tolist()) == [7, 8]
    table.eval()
    assert table(torch.tensor([9])).tolist() == [[0.0] * 4]
    assert sorted(table.ids().tolist()) == [7, 8]
    table.clear()
    assert table.ids().tolist() == []


def test_read_only_inserts_nothing():
    read = filled(EmbeddingOption(2, admit_hook=AdmitHook("ReadOnly")), VECTORS)
    assert read(torch.tensor([1, 99])).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert len(filter_out_sparse_param(read)["embedding"].ids()) == 3


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda")])
def test_rows_are_on_the_device_of_the_option(device):
    option, ids = EmbeddingOption(2, device=device), torch.tensor([1])
    if torch.cuda.is_available():
        embedding = DynamicEmbedding(option)
        assert embedding(ids.cuda()).is_cuda
        assert filter_out_sparse_param(embedding)["embedding"].handle.stats()["device_bytes"] > 0
        return
    with pytest.raises(ValueError, match=r'Table\(device="cuda"\) of embedding expects a GPU'):
        DynamicEmbedding(option)
    with cuda_fallback():
        with pytest.warns(UserWarning, match="asks for a GPU, but there is none"):
            embedding = DynamicEmbedding(option)
        assert embedding(ids).is_cpu
        assert HashTable([2], device=device)(ids).is_cpu


def test_what_is_not_trainable_has_no_gradient():
    engine = EmbeddingEngine({"a": EmbeddingOption(2, trainable=False)})
    assert not engine({"a": torch.tensor([1])})["a"].requires_grad


def test_one_shared_name_has_one_dim_and_one_initializer():
    with pytest.raises(ValueError, match="'t' has dim 2, but feature 'b' asks for 4"):
        EmbeddingEngine({"a": EmbeddingOption(2, shared_name="t"), "b": EmbeddingOption(4, shared_name="t")})
    with pytest.raises(ValueError, match="'t' has init"):
        EmbeddingEngine(
            {
                "a": EmbeddingOption(2, shared_name="t"),
                "b": EmbeddingOption(2, shared_name="t", initializer=ConstantInitializer(1)),
            }
        )
    shared = EmbeddingEngine(
        {"a": EmbeddingOption(2, shared_name="t"), "b": EmbeddingOption(2, shared_name="t")}
    )
    shared({"a": torch.tensor([1]), "b": torch.tensor([1])})
    assert filter_out_sparse_param(shared)["t"].ids().tolist() == [1]


def expected_adam(kind, p, gradients, lr, decay, eps=1e-8, b1=0.9, b2=0.999):
    """The formulas of RecIS's documentation, one number at a time."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p *= {SparseAdam: 1.0, SparseAdamW: 1 - lr * decay}.get(kind, 1 - decay)
        p -= lr * math.sqrt(1 - b2**t) / (1 - b1**t) * m / (math.sqrt(v) + eps)
    return p


@pytest.mark.parametrize("kind", [SparseAdam, SparseAdamW, SparseAdamWTF])
def test_adam_of_rows(kind):
    table = HashTable([1], initializer=ConstantInitializer(1.0))
    table(torch.tensor([5, 6]))
    with nullcontext() if kind is not SparseAdam else pytest.warns(UserWarning, match="changes nothing"):
        optimizer = kind(filter_out_sparse_param(table), lr=0.1, weight_decay=0.02)
    for gradient in (0.5, -2.0, 1.0):
        (table(torch.tensor([5])) * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = dict(zip(table.ids().tolist(), table.embeddings()[:, 0].tolist(), strict=True))
    assert found[5] == pytest.approx(expected_adam(kind, 1.0, [0.5, -2.0, 1.0], 0.1, 0.02), rel=1e-5)
    assert found[6] == 1.0  # no gradient, no change, no decay


def test_dense_adamwtf_has_the_same_formula():
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = AdamWTF([parameter], lr=0.1, weight_decay=0.02, eps=1e-3)
    for gradient in (0.5, -2.0, 1.0):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
    expected = expected_adam(SparseAdamWTF, 1.0, [0.5, -2.0, 1.0], 0.1, 0.02, eps=1e-3)
    assert parameter.item() == pytest.approx(expected, rel=1e-12)
    assert optimizer.param_groups[0]["eps"] == 1e-3


@pytest.mark.parametrize("kind", [SparseAdagrad, SparseRowWiseAdagrad])
def test_adagrad_of_rows(kind):
    table = HashTable([2], initializer=ConstantInitializer(1.0))
    table(torch.tensor([5]))
    optimizer = kind(filter_out_sparse_param(table), lr=0.1, initial_accumulator_value=0.5)
    (table(torch.tensor([5])) * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    sums = [9.0, 16.0] if kind is SparseAdagrad else [12.5, 12.5]
    expected = [1 - 0.1 * g / math.sqrt(0.5 + a) for g, a in zip((3.0, 4.0), sums, strict=True)]
    assert table.embeddings()[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_repeated_rows_of_several_passes_are_summed_before_the_update():
    table = HashTable([1])
    table(torch.tensor([1, 2]))
    optimizer = SparseAdagrad(filter_out_sparse_param(table), lr=1.0)
    for ids, gradient in (([1, 1, 2], 1.0), ([1], 3.0)):
        (table(torch.tensor(ids)) * gradient).sum().backward()
    optimizer.step()
    found = dict(zip(table.ids().tolist(), table.embeddings()[:, 0].tolist(), strict=True))
    assert found == pytest.approx({1: -1.0, 2: -1.0})  # g / sqrt(g²), with g = 1 + 1 + 3, not three updates


def test_the_filter_removes_rows_that_were_not_used_for_some_steps():
    table = HashTable([1], filter_hook=FilterHook("GlobalStepFilter", {"filter_step": 3}), name="aged")
    hook = HashTableFilterHook(filter_interval=1)
    for step, ids in enumerate(([1, 2], [2], [2], [2]), 1):
        table(torch.tensor(ids))
        hook.after_step(global_step=step)
        # RecIS counts step + 1 when it filters: id 1, last used at 1, is removed as soon as 1 < step + 1 - 3.
        assert sorted(table.ids().tolist()) == ([1, 2] if step + 1 - 3 <= 1 else [2])
    table(torch.tensor([1]))
    assert table.embeddings().tolist() == [[0.0], [0.0]]  # new again


@pytest.mark.parametrize(
    ("initializer", "mean", "std", "bound"),
    [
        (ConstantInitializer(0.5), 0.5, 0.0, 0.5),
        (UniformInitializer(-1, 3), 1.0, 4 / math.sqrt(12), 3.0),
        (NormalInitializer(1, 2), 1.0, 2.0, math.inf),
        (TruncNormalInitializer(mean=0, std=0.01), 0.0, 0.01, 2.0),
        (TruncNormalInitializer(), 0.0, 0.8796, 2.0),
        (XavierUniformInitializer(), 0.0, math.sqrt(2 / (16 + 10240)), math.sqrt(6 / (16 + 10240))),
        (XavierNormalInitializer(2.0), 0.0, 2 * math.sqrt(2 / (16 + 10240)), math.inf),
        (KaimingUniformInitializer(), 0.0, math.sqrt(2 / 16), math.sqrt(6 / 16)),
        (KaimingNormalInitializer(mode="fan_out"), 0.0, math.sqrt(2 / 10240), math.inf),
    ],
)
def test_initializers_have_the_spread_of_blocks(initializer, mean, std, bound):
    embedding = DynamicEmbedding(EmbeddingOption(16, initializer=initializer))
    values = embedding(torch.arange(4000)).detach()
    assert values.mean().item() == pytest.approx(mean, abs=0.02 * max(std, 0.01))
    assert values.std().item() == pytest.approx(std, rel=0.02)
    assert values.abs().max().item() <= bound


def test_rows_depend_on_the_seed_of_torch():
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(DynamicEmbedding(EmbeddingOption(4, initializer=NormalInitializer()))(torch.tensor([3])))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_auroc_and_gauc():
    metric = AUROC(num_thresholds=200)
    scores, labels = torch.tensor([0.9, 0.7, 0.3, 0.1]), torch.tensor([1, 0, 1, 0])
    assert metric(scores, labels).item() == pytest.approx(0.75)
    for part in (slice(0, 2), slice(2, 4)):
        metric.update(scores[part], labels[part])
    assert metric.compute().item() == pytest.approx(0.75)
    other = AUROC()
    other.load_state_dict(metric.state_dict())
    assert other.compute().item() == pytest.approx(0.75)
    metric.reset()
    assert math.isnan(metric.compute().item())
    gauc = Gauc()
    users = torch.tensor([1, 1, 2, 2])
    assert gauc(torch.tensor([1, 0, 0, 1]), scores, users) == pytest.approx((0.5, 0.5))
    assert gauc(torch.tensor([1, 0, 1, 0]), scores, users) == pytest.approx((1.0, 0.75))


def test_tables_and_tensors_are_saved_and_loaded(tmp_path):
    table = HashTable([2], name="t")
    table.insert(torch.tensor([1, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    Saver(path=str(tmp_path / "saved"), hashtables={"t": table}, tensors={"w": torch.ones(3)}).save()
    for file in (tmp_path / "saved").rglob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            assert list(opened.keys())
    other, weights = HashTable([2], name="t"), torch.zeros(3)
    Loader(str(tmp_path / "saved"), hashtables={"t": other}, tensors={"w": weights}).load()
    ids, vectors = other.ids_embeddings()
    assert dict(zip(ids.tolist(), vectors.tolist(), strict=True)) == {1: [1.0, 2.0], 2: [3.0, 4.0]}
    assert weights.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: StringMultiHash([10]), "use IDMultiHash"),
        (lambda: EmbeddingOption(combiner="max"), "combiner 'max' is not supported: expected one of sum"),
        (lambda: EmbeddingOption(coalesced=True), "without it"),
        (lambda: EmbeddingOption(fp16_enabled=True), "fp16_enabled=True is not supported"),
        (lambda: AdmitHook("Frequency"), "kv.admission"),
        (lambda: FilterHook("Frequency"), "kv.eviction"),
        (lambda: DynamicEmbedding(EmbeddingOption(grad_reduce_by="hdmp_group_sum")), "hdmp_group_sum"),
        (lambda: HashTable([2, 3]), "expected one dimension"),
        (lambda: DynamicEmbedding(EmbeddingOption(device="mps")), 'device="mps" of a table'),
        (lambda: SparseRowWiseAdagrad({}, maximize=True), "negate the loss"),
        (
            lambda: DynamicEmbedding(
                EmbeddingOption(initializer=NormalInitializer(generator=torch.Generator()))
            ),
            "torch.manual_seed",
        ),
    ],
)
def test_what_has_no_counterpart_says_what_to_use(make, text):
    with pytest.raises(UnsupportedError, match=text):
        make()
