"""The largest magnitude of gradients, compared to that of each element."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan.dense.steps import largest_magnitude


def gradients_of(kinds):
    """Tensors of one allocation that are neighbours, have gaps, overlap, or are transposed, and others."""
    memory = torch.randn(8, 6, 4)
    made = []
    for kind, at in kinds:
        if kind == "part":
            made.append(memory[at])
        elif kind == "parts":
            made += memory[at : at + 3].unbind()
        elif kind == "transposed":
            made.append(memory[at].t())
        elif kind == "double":
            made.append(torch.randn(at + 1, dtype=torch.float64))
        else:
            made.append(torch.randn(at + 1))
    return made


KINDS = st.tuples(st.sampled_from(["part", "parts", "transposed", "double", "other"]), st.integers(0, 6))


@given(
    st.lists(KINDS, min_size=1, max_size=8), st.sampled_from([None, math.nan, math.inf, -math.inf]), st.data()
)
def test_it_is_that_of_all_elements(kinds, bad, data):
    gradients = gradients_of(kinds)
    if bad is not None:
        chosen = data.draw(st.sampled_from(gradients))
        chosen[tuple(data.draw(st.integers(0, size - 1)) for size in chosen.shape)] = bad
    expected = torch.cat([each.double().reshape(-1).abs() for each in gradients]).max()
    found = largest_magnitude(gradients).double()
    assert torch.equal(found, expected) or (found.isnan() and expected.isnan())


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_of_large_neighbours(bad):
    memory = torch.rand(3, 600, 1000)
    if bad is not None:
        memory[1, 77, 5] = bad
    found = largest_magnitude([*memory.unbind(), torch.ones(2)])
    assert bool(torch.isfinite(found)) == (bad is None)
    if bad is None:
        assert found == 1
