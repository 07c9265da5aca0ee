"""A whole engine that computes as it does on a GPU, with its kernels in triton's interpreter."""

import pytest
import torch
from feature_helpers import nested, ragged_text, same
from gpu_columns import WAITING_ONCE, WITHOUT_WAITING, columns
from many_features import many_features
from torch.utils._python_dispatch import TorchDispatchMode

from karvan import ids, kernels
from karvan.features import Feature, FeatureEngine
from karvan.ragged import OptionalRagged, Ragged, values_of

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU: see tests/gpu/test_features_gpu.py"
)


@pytest.fixture
def by_kernels(monkeypatch):
    """Runs a function as if its tensors were on a GPU."""

    def compute(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "on_gpu", lambda tensor: True)
            return function(*arguments)

    return compute


@pytest.mark.parametrize("seed", range(3))
def test_all_steps_give_the_same_with_and_without_kernels(seed, by_kernels):
    features, batch = many_features(seed)
    expected = FeatureEngine(features)(batch)
    made = by_kernels(FeatureEngine(features), batch)
    for name, entry in expected.items():
        if values_of(entry).is_floating_point():
            torch.testing.assert_close(values_of(made[name]), values_of(entry), equal_nan=True)
        else:
            assert same(made[name], entry), name


def test_the_functions_of_ids_give_the_same(by_kernels):
    strings = ragged_text(["", "a", "x" * 70, "hello"])
    some = torch.tensor([[-1, 0, 1], [5, -(1 << 63), (1 << 63) - 1]])
    calls = [(ids.farm, strings), (ids.murmur, strings), (ids.mod, some, 10), (ids.bucket, some, 0)]
    calls += [(ids.hash_strings, strings, kind) for kind in ids.HASHES]
    calls += [
        (ids.hash_strings, strings, kind, size) for kind in ("farm", "murmur") for size in (0, 1, 1 << 62)
    ]
    calls += [(ids.prefix, some, 3, 8), (ids.hash_stack, some, 2, 100), (ids.mod, some, torch.tensor([7]))]
    calls += [(ids.farm, Ragged(strings.values))]
    for function, *arguments in calls:
        assert torch.equal(by_kernels(function, *arguments), function(*arguments)), function


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (ids.hash_strings, (ragged_text(["a"]), "farm", 1 << 63), "A modulus must be from 1"),
        (ids.mod, (torch.zeros(2, dtype=torch.int64), 0), "A modulus must be from 1"),
        (ids.mod, (torch.zeros(2), 3), "Ids must be an int64 tensor"),
        (ids.hash_stack, (torch.zeros(2, dtype=torch.int64), 0, 5), "rounds must be at least 1"),
        (ids.hash_stack, (torch.zeros(2, dtype=torch.int64), 2, 1 << 62), r"rounds \* size below 2\^63"),
    ],
)
def test_errors_are_the_same(function, arguments, message, by_kernels):
    for call in (function, lambda *given: by_kernels(function, *given)):
        with pytest.raises((TypeError, ValueError), match=message):
            call(*arguments)


def test_columns_with_missing_values_give_the_same(by_kernels):
    batch = {
        "age": OptionalRagged(torch.tensor([3, 9]), torch.tensor([0, 1, 1, 2])),
        "none": OptionalRagged(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0, 0, 0])),
        "price": torch.tensor([1.0, float("nan"), 30.0]),
        "tags": nested([[[1, 2], [3]], [], [[4]]]),
    }
    features = [
        Feature("age").fill_missing(-1),
        Feature("none").fill_missing(5),
        Feature("filled").select("price", raw=True).fill_missing(0).bucketize([2, 20]),
        Feature("whole").select("price", raw=True).fill_missing(0).to_ids(10),
        Feature("price").bucketize([2, 20]),
        Feature("tags").flatten(),
        Feature("dense").select("tags").to_dense(2, -1),
        Feature("both").concat("age", "tags"),
        Feature("pair").cross("age", "tags"),
    ]
    expected = FeatureEngine(features)(batch)
    made = by_kernels(FeatureEngine(features), batch)
    assert expected["filled"].tolist() == [0, 0, 2]
    assert expected["age"].tolist() == [3, -1, 9]
    assert all(same(made[name], entry) for name, entry in expected.items())


def test_gradients_still_pass_through_rows(by_kernels):
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    entry = Ragged(values, torch.tensor([0, 3]))
    features = [Feature("a").select("x").truncate(2).to_dense(2, 0.0)]
    by_kernels(FeatureEngine(features), {"x": entry})["a"].sum().backward()
    assert values.grad.tolist() == [0, 1, 1]
    weights = torch.ones(3, requires_grad=True)
    entry = Ragged(torch.arange(3), torch.tensor([0, 3]), weights)
    by_kernels(FeatureEngine([Feature("x").truncate(2)]), {"x": entry})["x"].weights.sum().backward()
    assert weights.grad.tolist() == [0, 1, 1]


class Waits(TorchDispatchMode):
    """Records what would wait for a GPU: numbers and sizes from tensors, and copies from the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype == torch.bool for each in args[1] if hasattr(each, "dtype")
        )
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "bincount"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits_of(by_kernels, monkeypatch):
    """The waits of an engine, after a batch for which kernels are compiled and constants copied."""

    def count(features):
        engine = FeatureEngine(features)
        by_kernels(engine, columns(30, 1, "cpu"))
        batch = columns(25, 2, "cpu")
        with Waits() as waits, monkeypatch.context() as patch:
            to_list = torch.Tensor.tolist  # torch does not dispatch it
            patch.setattr(
                torch.Tensor, "tolist", lambda tensor: (waits.found.append("tolist"), to_list(tensor))[1]
            )
            made = by_kernels(engine, batch)
        expected = engine(batch)
        for name in (output for feature in features for output in feature.outputs()):
            if values_of(expected[name]).is_floating_point():
                torch.testing.assert_close(values_of(made[name]), values_of(expected[name]))
            else:
                assert same(made[name], expected[name]), name
        return waits.found

    return count


@pytest.mark.parametrize("feature", WITHOUT_WAITING, ids=lambda feature: feature.name)
def test_a_feature_whose_size_follows_from_shapes_does_not_wait(feature, waits_of):
    assert waits_of([feature]) == []


def test_many_such_features_do_not_wait(waits_of):
    assert waits_of(WITHOUT_WAITING) == []


@pytest.mark.parametrize("step", WAITING_ONCE)
def test_a_step_whose_sizes_depend_on_data_waits_once_for_all_its_features(step, waits_of):
    assert waits_of(WAITING_ONCE[step]) == ["tolist"] * (2 if step == "bucketize" else 1)
