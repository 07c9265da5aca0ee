"""Tomorrow's data on several ranks, and on another number of them."""

import daily_programs
import pytest
import torch
from ranks_helpers import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("days")


@pytest.fixture(scope="module")
def launched(folder):
    return run(2, "daily_programs:days", place=str(folder))


def test_two_ranks_continue_on_the_next_day_and_after_a_stop_in_it(launched):
    for each in launched:
        straight, stopped = each["straight"], each["stopped"]
        assert (straight["result"].step, straight["result"].epoch, straight["result"].trained) == (12, 1, 6)
        assert (stopped["result"].step, stopped["result"].trained) == (12, 3)
        for name, value in straight["dense"].items():
            assert torch.equal(value, stopped["dense"][name])
        for name, rows in straight["tables"].items():
            assert [part.tobytes() for part in rows] == [part.tobytes() for part in stopped["tables"][name]]


def test_all_ranks_refuse_a_day_while_another_is_unfinished(launched):
    for each in launched:
        assert "0 epochs and 3 batches of the next one, of 1 epoch" in each["error"]


def test_another_number_of_ranks_takes_the_next_day(launched, folder):
    result = daily_programs.fit_day(folder / "one day", 2)["result"]
    assert (result.trained, result.step, result.samples) == (12, 18, 96)


def test_another_number_of_ranks_finishes_a_day_and_takes_the_next(launched, folder):
    rest = daily_programs.fit_day(folder / "half", 2)["result"]
    assert (rest.samples, rest.step) == (96, 15)
    assert daily_programs.fit_day(folder / "half", 3)["result"].samples == 144
