"""The reference itself: formulas against torch.optim, pooling against autograd, hash goldens."""

import pytest
import reference as ref
import torch

SHAPE = (5, 3)


def train(rule, gradients, start):
    p, state = start.clone(), rule.initial(*SHAPE)
    for t, g in enumerate(gradients, start=1):
        p, state = rule.apply(p, g, state, t)
    return p


def train_torch(cls, gradients, start, **options):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = cls([parameter], **options)
    for g in gradients:
        parameter.grad = g.clone()
        optimizer.step()
    return parameter.detach()


@pytest.fixture
def start():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def gradients():
    return list(torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(2)))


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.5, "weight_decay": 0.1}])
def test_sgd_continues_like_one_torch_optimizer(options, start, gradients):
    expected = train_torch(torch.optim.SGD, gradients, start, lr=0.1, **options)
    assert_same(train(ref.SGD(lr=0.1, **options), gradients, start), expected)


@pytest.mark.parametrize(
    "options", [{}, {"initial_accumulator_value": 0.1, "weight_decay": 0.1}, {"eps": 0.01}]
)
def test_adagrad_formula_equals_torch(options, start, gradients):
    expected = train_torch(torch.optim.Adagrad, gradients, start, lr=0.1, **options)
    rule = ref.Adagrad(lr=0.1, **options)
    assert_same(train(rule, gradients, start), expected)
    rule.update = lambda p, g, state, t: rule.formula(p, g, state)
    assert_same(train(rule, gradients, start), expected)


def test_row_wise_adagrad_with_equal_gradients_in_a_row_is_adagrad(start, gradients):
    equal = [g[:, :1].expand(SHAPE) for g in gradients]
    assert_same(
        train(ref.Adagrad(lr=0.1, row_wise=True), equal, start),
        train_torch(torch.optim.Adagrad, equal, start, lr=0.1),
    )


def test_adagrad_that_accumulates_last_uses_the_accumulator_before_the_gradient():
    rule = ref.Adagrad(lr=0.1, initial_accumulator_value=4.0, accumulate="last", decay=0.5)
    p, state = rule.apply(torch.ones(1, 1), torch.full((1, 1), 3.0), rule.initial(1, 1), 1)
    assert_same(p, torch.tensor([[1 - 0.1 * 3 / 2]]))
    assert_same(state["sum"], torch.tensor([[0.5 * 4 + 9.0]]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_on_all_rows_equals_torch_adam(weight_decay, start, gradients):
    # torch.optim.Adam adds eps after the bias correction, SparseAdam before it: equal for a tiny eps
    options = {"lr": 0.01, "eps": 1e-20, "weight_decay": weight_decay}
    expected = train_torch(torch.optim.Adam, gradients, start, **options)
    assert_same(train(ref.Adam(**options), gradients, start), expected)


def test_adamw_and_adamwtf_on_all_rows_equal_torch_adamw(start, gradients):
    expected = train_torch(torch.optim.AdamW, gradients, start, lr=0.01, eps=1e-20, weight_decay=0.1)
    assert_same(train(ref.AdamW(lr=0.01, eps=1e-20, weight_decay=0.1), gradients, start), expected)
    assert_same(train(ref.AdamWTF(lr=0.01, eps=1e-20, weight_decay=0.001), gradients, start), expected)


def test_adam_is_one_sparse_adam_over_the_whole_table(start):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SparseAdam([parameter], lr=0.01)
    table = ref.ReferenceTable(3, ref.Adam(lr=0.01), init=lambda key: start[key])
    for rows in ([0, 1], [3], [0, 4], [1, 3]):
        g = torch.randn(len(rows), 3)
        parameter.grad = torch.sparse_coo_tensor([rows], g, SHAPE, check_invariants=True)
        optimizer.step()
        table.see(ref.Counter(rows), step=1)
        table.apply(dict(zip(rows, g, strict=True)))
    assert_same(torch.stack([table.vector(key) for key in (0, 1, 3, 4)]), parameter.detach()[[0, 1, 3, 4]])


def test_ftrl_without_regularisation_from_zero_is_adagrad(gradients):
    zero = torch.zeros(SHAPE)
    expected = train_torch(torch.optim.Adagrad, gradients, zero, lr=0.1, eps=0.0)
    assert_same(train(ref.FTRL(lr=0.1, beta=0.0), gradients, zero), expected)


def test_ftrl_l1_makes_exact_zeros(gradients):
    p = train(ref.FTRL(lr=0.1, l1=1e3), gradients, torch.ones(SHAPE))
    assert torch.equal(p, torch.zeros(SHAPE))


def test_clipping_and_bound(start):
    big = torch.full(SHAPE, 10.0)
    assert_same(train(ref.SGD(lr=1.0, clip_value=0.5), [big], start), start - 0.5)
    assert_same(train(ref.SGD(lr=1.0, clip_norm=3**0.5), [big], start), start - 1)
    assert_same(train(ref.SGD(lr=1.0, clip_norm=100.0), [big], start), start - 10)
    assert train(ref.SGD(lr=1.0, weight_bound=0.2), [big], start).abs().max() <= 0.2


def test_hash_stack_goldens():
    golden = {12: [2, 18], 23: [5, 10], 34: [0, 11], 56: [6, 17], 78: [7, 12], 90: [8, 16]}
    assert {key: ref.hash_stack(key, rounds=2, size=10) for key in golden} == golden


ROWS = [[1, 2, 2], [], [3]]
WEIGHTS = [[1.0, 2.5, 0.5], [], [2.0]]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "sequence", "tile", "ragged"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gradients_of_a_lookup_equal_autograd(combiner, weights):
    feature = ref.Feature(dim=2, combiner=combiner, length=2 if combiner == "tile" else None)
    lookup = ref.look_up(feature, ROWS, weights)
    table = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    w = WEIGHTS if weights else [[1.0] * len(row) for row in ROWS]
    parts = [
        table[row] * torch.tensor(x, dtype=torch.float64)[:, None] for row, x in zip(ROWS, w, strict=True)
    ]
    if combiner == "ragged":
        expected = torch.cat(parts)
    elif combiner in ("sequence", "tile"):
        length = feature.length or 3
        padded = [torch.cat([p[:length], p.new_zeros(length - len(p[:length]), 2)]) for p in parts]
        expected = torch.stack(padded).reshape(lookup.shape)
    else:
        divisor = {"sum": lambda x: 1.0, "mean": sum, "sqrtn": lambda x: sum(y * y for y in x) ** 0.5}[
            combiner
        ]
        expected = torch.stack([p.sum(0) / (divisor(x) or 1.0) for p, x in zip(parts, w, strict=True)])
    torch.testing.assert_close(lookup.forward(lambda key: table[key]), expected)
    gradient = torch.randn(lookup.shape, dtype=torch.float64)
    (expected * gradient).sum().backward()
    for key, received in lookup.backward(gradient).items():
        torch.testing.assert_close(received, table.grad[key])


def test_spacing_is_the_gap_between_stored_neighbours():
    x = torch.tensor([1.0, 1.9, 2.0, -0.3, 0.0])
    for dtype, bits in ((torch.bfloat16, 7), (torch.float16, 10)):
        expected = torch.tensor([2.0**-bits, 2.0**-bits, 2.0 ** (1 - bits), 2.0 ** (-2 - bits)])
        assert torch.equal(ref.spacing(x, dtype)[:4], expected)
        assert ref.spacing(x, dtype)[4] <= 2.0**-24
