"""Comparisons of the rows and outputs that ranks return: each has `tables` and `outputs`."""

import numpy as np
import pytest
import torch


def whole_table(results, name):
    """The rows of all ranks, by key; every key is on one rank."""
    rows = {}
    for result in results:
        for key, *row in zip(*result["tables"][name], strict=True):
            assert key not in rows
            rows[key] = row
    return rows


def assert_same_tables(results, expected, tolerance):
    for name in expected["tables"]:
        received, wanted = whole_table(results, name), whole_table([expected], name)
        assert received.keys() == wanted.keys()
        assert len(wanted) > 5
        for key, row in wanted.items():
            vector, state, count, last = received[key]
            np.testing.assert_allclose(vector, row[0], rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(state, row[1], rtol=tolerance, atol=tolerance)
            assert (count, last) == (row[2], row[3])


def assert_equal(some, others):
    """Bit for bit."""
    for a, b in zip(some, others, strict=True):
        for name in a["tables"]:
            for x, y in zip(a["tables"][name], b["tables"][name], strict=True):
                np.testing.assert_array_equal(x, y)
        for name in a["outputs"]:
            assert torch.equal(a["outputs"][name], b["outputs"][name])


def check_fits(results, expected, tolerance):
    """Ranks have trained the same dense parameters, and the rows of one process."""
    assert_same_tables(results, expected, tolerance)
    for result in results:
        for name, value in expected["dense"].items():
            torch.testing.assert_close(result["dense"][name], value, rtol=tolerance, atol=tolerance)
        evaluation = result["result"].evaluation
        assert evaluation["loss"] == pytest.approx(expected["result"].evaluation["loss"], rel=tolerance)
