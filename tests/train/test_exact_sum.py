"""Sums without rounding: any order and any division over processes gives the same bits."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from karvan.train.evaluation import ExactSum, exact_total

FINITE = st.floats(-1e150, 1e150, allow_subnormal=False)


def parts_of(values):
    made = ExactSum()
    for value in values:
        made.add(value)
    return made.parts()


@given(st.lists(st.lists(FINITE, max_size=20), max_size=4), st.randoms())
def test_sums_of_several_processes_are_the_exact_one_rounded_once(shares, order):
    values = [value for share in shares for value in share]
    exact = float(sum(map(Fraction, values)))
    assert exact_total(part for share in shares for part in parts_of(share)) == exact
    order.shuffle(values)
    assert exact_total(parts_of(values)) == exact


def test_what_is_not_finite_is_added_as_usual():
    assert exact_total([*parts_of([1.0, math.inf]), *parts_of([2.0])]) == math.inf
    assert math.isnan(exact_total([*parts_of([math.inf]), *parts_of([-math.inf])]))
    assert math.isnan(exact_total(parts_of([math.nan, 1.0])))
    assert exact_total([]) == 0.0
