"""Columns as the data sections of jobs and configurations name them."""

import pytest
import torch

from karvan.data import Fixed, Raw, Varlen
from karvan.data.columns.declarations import column_from_settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("user", "user"),
        ({"name": "a"}, Fixed("a")),
        ({"name": "a", "kind": "fixed", "length": 2, "default": [1, 2]}, Fixed("a", [1, 2], 2)),
        ({"name": "a", "dtype": "float64"}, Fixed("a", dtype=torch.float64)),
        ({"name": "a", "dtype": None}, Fixed("a")),
        ({"name": "a", "kind": "varlen", "hash": "farm", "bucket": 10}, Varlen("a", "farm", 10)),
        ({"name": "a", "kind": "raw", "default": ""}, Raw("a", "")),
    ],
)
def test_columns(given, expected):
    assert column_from_settings(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "expects names, or mappings with a name and a kind of fixed, varlen, raw, got 3"),
        ({"kind": "raw"}, "expects names, or mappings"),
        ({"name": "a", "kind": "odd"}, "a kind of fixed, varlen, raw"),
        (
            {"name": "a", "kind": "raw", "length": 2},
            "column 'a' of kind raw has no 'length'; it has: name, default",
        ),
        ({"name": "a", "dtype": "int8"}, "column 'a' expects a dtype of int64, .*, got 'int8'"),
        ({"name": "a", "length": 0}, "data.columns.a: Fixed 'a' needs a length of at least 1"),
        ({"name": "a", "default": "x"}, "data.columns.a: Fixed 'a' needs numbers as default"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        column_from_settings(given)
