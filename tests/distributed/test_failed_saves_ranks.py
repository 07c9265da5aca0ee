"""Saves that fail on one rank: all ranks agree, and the failure is reported once."""

import pytest
from ranks_helpers import run


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run(2, "failed_saves_programs:run", place=str(tmp_path_factory.mktemp("runs")))


def test_a_save_that_one_rank_cannot_write_is_tolerated_by_all_and_reported_once(seen):
    first, second = (each["survived"] for each in seen)
    assert first["error"] is second["error"] is None
    assert first["steps"] == [2, 6, 8]
    (line,) = first["lines"]
    assert "step 4 was NOT saved (failure 1 in a row, 3 are tolerated)" in line
    assert "rank 1: expected to write a checkpoint, got 'File too large" in line
    assert second["lines"] == []


def test_too_many_failures_are_the_same_error_on_all_ranks(seen):
    first, second = (each["too many"] for each in seen)
    assert first["error"] == second["error"]
    assert "could not be saved 2 times in a row" in first["error"]
    assert first["temporary"]
    assert second["temporary"]
    assert len(first["lines"]) == 1
    assert second["lines"] == []
    assert first["steps"] == [2]


def test_the_last_save_is_repeated_by_all_ranks_and_then_an_error(seen):
    first, second = (each["last"] for each in seen)
    assert first["error"] == second["error"]
    assert "the last checkpoint, of step 8, could not be saved in 0.5 seconds" in first["error"]
    assert first["steps"] == [2, 4, 6]
