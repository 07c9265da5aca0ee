"""Pairwise dot products against the formula, in all layouts, dtypes and directions."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import karvan as kv
from karvan import kernels
from karvan.models.parts import pairwise_dots


def formula(vectors, first=None):
    x = torch.stack(list(vectors), 1)
    row, column = torch.tril_indices(x.shape[1], x.shape[1], -1, device=x.device)
    pairs = (x[:, row] * x[:, column]).sum(2)
    return pairs if first is None else torch.cat([first, pairs], 1)


def _leaves(rows, n, dim, extra=0, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, dim, generator=random) for _ in range(n)]
    return [t.to(dtype).requires_grad_() for t in (*made, torch.randn(rows, extra, generator=random))]


def check_beside_doubles(vectors, first, seed):
    out = pairwise_dots(vectors, first)
    doubles = [t.detach().double().requires_grad_() for t in (*vectors, first)]
    expected = formula(doubles[:-1], doubles[-1])
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.device)
    made = torch.autograd.grad(out, [*vectors, first], gradient)
    wanted = torch.autograd.grad(expected, doubles, gradient.double())
    for got, exact in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, exact.float(), rtol=1e-4, atol=1e-4)


shapes = st.tuples(st.integers(0, 70), st.integers(1, 30), st.sampled_from([1, 2, 5, 8, 16, 17, 32, 64]))


@given(shapes, st.sampled_from([0, 1, 16]), st.integers(0, 2**20))
def test_products_and_gradients_are_those_of_the_formula_in_double(shape, extra, seed):
    *vectors, first = _leaves(*shape, extra, seed)
    check_beside_doubles(vectors, first, seed)


@pytest.fixture
def by_kernels(monkeypatch):
    """Kernels compute the products: on a GPU, or in Triton's interpreter."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few = st.tuples(
    st.integers(0, 17), st.sampled_from([2, 3, 16, 17, 27]), st.sampled_from([1, 5, 16, 128, 130])
)


@given(few, st.sampled_from([0, 1, 16]), st.booleans(), st.integers(0, 2**20))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kernels_give_products_and_gradients_of_the_formula(by_kernels, shape, extra, together, seed):
    rows, n, _ = shape
    *vectors, first = (t.detach().to(DEVICE) for t in _leaves(*shape, extra, seed))
    if together:  # as the outputs of an engine are
        vectors = [vectors[0], *torch.cat(vectors[1:]).unsafe_split_with_sizes([rows] * (n - 1))]
    check_beside_doubles([v.requires_grad_() for v in vectors], first.requires_grad_(), seed)


def test_kernels_take_vectors_of_any_layout_and_a_first_that_is_one_of_them(by_kernels):
    x = torch.randn(9, 5, 8, device=DEVICE)
    whole = formula(list(x.cpu().unbind(1)))
    for vectors in (
        x,
        list(torch.cat([x.flatten(1), x[:, 0]], 1).split(8, 1))[:5],
        [v.t().contiguous().t() for v in x.unbind(1)],
        [x[:, 0].clone(), *(v.clone() for v in x[:, 1:].unbind(1))],
    ):
        torch.testing.assert_close(pairwise_dots(vectors).cpu(), whole)
    vectors = [v.requires_grad_() for v in x.clone().unbind(1)]
    check_beside_doubles(
        [v.detach().requires_grad_() for v in vectors], vectors[0].detach().requires_grad_(), 1
    )
    out = pairwise_dots(vectors, vectors[0])
    gradient = torch.randn(out.shape[::-1], device=DEVICE).t()
    made = torch.autograd.grad(out, vectors, gradient)
    own = [v.detach().cpu().requires_grad_() for v in vectors]
    wanted = torch.autograd.grad(formula(own, own[0]), own, gradient.cpu())
    for got, exact in zip(made, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), exact, rtol=1e-4, atol=1e-4)


def test_pairs_come_in_the_order_of_tril_indices_after_the_first_block():
    vectors = [torch.full((1, 2), float(i)) for i in (1, 2, 3, 5)]
    first = torch.tensor([[7.0, 8.0, 9.0]])
    assert pairwise_dots(vectors).tolist() == [[4, 6, 12, 10, 20, 30]]
    assert pairwise_dots(vectors, first).tolist() == [[7, 8, 9, 4, 6, 12, 10, 20, 30]]
    assert pairwise_dots(vectors[:1], first).tolist() == [[7, 8, 9]]


def test_one_tensor_slices_and_columns_that_are_not_dense_give_the_same():
    x = torch.randn(9, 5, 8)
    whole = pairwise_dots(x)
    assert torch.equal(pairwise_dots(list(x.clone().unbind(1))), whole)
    assert torch.equal(pairwise_dots(list(torch.cat([x.flatten(1), x[:, 0]], 1).split(8, 1))[:5]), whole)
    assert torch.equal(pairwise_dots(x.transpose(1, 2).contiguous().transpose(1, 2)), whole)
    assert torch.equal(pairwise_dots([v.t().contiguous().t() for v in x.unbind(1)]), whole)


def test_first_may_be_one_of_the_vectors_and_gradients_of_any_layout_are_taken():
    vectors = _leaves(6, 4, 16)[:4]
    out = pairwise_dots(vectors, vectors[0])
    gradient = torch.randn(out.shape[::-1]).t()
    made = torch.autograd.grad(out, vectors, gradient)
    wanted = torch.autograd.grad(formula(vectors, vectors[0]), vectors, gradient)
    for got, exact in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)


def test_double_is_computed_in_double_and_passes_gradcheck():
    *vectors, first = _leaves(3, 4, 3, extra=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda f, *v: pairwise_dots(v, f), (first, *vectors))
    assert torch.allclose(pairwise_dots(vectors, first), formula(vectors, first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_float32_also_under_autocast(dtype):
    *vectors, first = _leaves(5, 6, 16, extra=2, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pairwise_dots(vectors, first)
    assert out.dtype == torch.float32
    assert torch.equal(out, pairwise_dots([v.float() for v in vectors], first.float()))
    out.sum().backward()
    assert all(t.grad.dtype == dtype for t in (*vectors, first))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    *vectors, first = _leaves(50, 6, 16, extra=2)
    there = pairwise_dots([v.cuda() for v in vectors], first.cuda())
    torch.testing.assert_close(there.cpu(), pairwise_dots(vectors, first), rtol=1e-4, atol=1e-4)


def test_the_number_of_threads_changes_no_bit():
    results = []
    for threads in (1, 2, 4):
        kv.set_num_threads(threads)
        vectors = _leaves(700, 9, 12)[:9]
        out = pairwise_dots(vectors)
        results.append([out, *torch.autograd.grad(out.square().sum(), vectors)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="at least one vector"):
        pairwise_dots([])
    with pytest.raises(ValueError, match=r"one shape \(B, dim\), got \(3, 4\) and \(3, 5\)"):
        pairwise_dots([torch.ones(3, 4), torch.ones(3, 5)])
    with pytest.raises(ValueError, match=r"first of shape \(3, e\), got \(2, 4\)"):
        pairwise_dots([torch.ones(3, 4)], torch.ones(2, 4))
