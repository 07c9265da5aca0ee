"""Rules and features in plain Python, and what becomes of them in the native core."""

import re
from dataclasses import asdict, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from karvan import _native
from karvan.native import FLOATS, RULES
from karvan.store import LookupProgram, Rule
from karvan.store.messages import rule_from_json, rule_to_json
from karvan.store.types import RULE_NUMBERS, FeatureSpec

NUMBERS = [field.name for field in fields(Rule) if field.type == "float"]


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_starts_as_the_native_one(kind):
    native = _native.Rule(kind)
    for name, value in asdict(Rule(kind)).items():
        given = getattr(native, name)
        assert given == (np.float32(value) if name in NUMBERS else value), name
    named = [name for name in dir(_native.Rule) if not name.startswith("_")]
    assert sorted(named) == sorted(field.name for field in fields(Rule))


@given(st.sampled_from(list(RULES)), st.data())
def test_the_native_rule_has_all_numbers(kind, data):
    floats = st.floats(-1e30, 1e30)
    rule = Rule(
        kind, **{name: data.draw(floats) for name in NUMBERS}, accumulate_last=data.draw(st.booleans())
    )
    native = rule.native()
    assert (native.kind, native.accumulate_last) == (kind, rule.accumulate_last)
    for name in NUMBERS:
        assert getattr(native, name) == np.float32(getattr(rule, name)), name


def test_the_table_of_rules_names_all_numbers():
    assert sorted([*FLOATS, "accumulate_last"]) == sorted(RULE_NUMBERS)


def test_an_unknown_rule_is_an_error():
    with pytest.raises(ValueError, match=r"Unknown rule 'adamax': expected one of sgd, .*, amsgrad\."):
        Rule("adamax")
    with pytest.raises(AttributeError):
        Rule("sgd").momentum = 0.9


@pytest.mark.parametrize("value", ["0.1", None, [0.1], {"lr": 1}])
def test_a_rule_of_wrong_types_is_refused_when_it_is_read(value):
    sent = rule_to_json(Rule("sgd"))
    with pytest.raises(TypeError):
        rule_from_json({**sent, "lr": value})


def test_numbers_of_other_libraries_travel_as_floats():
    rule = Rule("adam", beta1=np.float32(0.5), beta2=1)
    assert rule_from_json(rule_to_json(rule)) == rule
    assert type(rule_to_json(rule)["beta1"]) is float


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 3)), max_size=12))
def test_tables_are_in_the_order_of_the_native_program(uses):
    features = [FeatureSpec(f"{i}", table, dim=4, stack=stack) for i, (table, stack) in enumerate(uses)]
    program = LookupProgram(features)
    assert program.tables == program.native.tables
    assert program.native is program.native


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"dim": 0},
            "Feature 'f' of table 't': expected a dim and a stack of at least 1, got dim 0 and stack 1.",
        ),
        ({"dim": 2, "stack": 0}, "expected a dim and a stack of at least 1, got dim 2 and stack 0."),
        ({"dim": 2, "mode": "tile"}, "expected a mode of pooled, padded, cells, got 'tile'."),
        (
            {"dim": 2, "combiner": "max"},
            "expected a combiner of sum, mean, sqrtn, mean_by_count, mean_by_density, got 'max'.",
        ),
    ],
)
def test_a_feature_that_cannot_be_is_an_error(wrong, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        FeatureSpec("f", "t", **wrong)


def test_features_of_one_table_have_one_dim():
    with pytest.raises(
        ValueError, match=r"Feature 'b' of table 't': expected dim 2 like .* before it, got 3"
    ):
        LookupProgram([FeatureSpec("a", "t", dim=2), FeatureSpec("b", "t", dim=3)])
