"""`kv.Trainer` over real processes against one process on the same global batches."""

import math

import numpy as np
import pytest
import torch
import trainer_programs
from ranks_helpers import run
from shared_results import shared_result

PROGRAMS = {
    "uneven": ["uneven", {}],
    "again": ["uneven", {}],
    "without ahead": ["uneven", {"prefetch": 0}],
    "dicts": ["uneven", {"plain": True}],
    "heads": ["heads", {}],
    "models": ["models", {}],
    "accumulated": ["accumulated", {}],
    "fixed": ["fixed", {}],
    "rotating": ["fixed", {"together": 1, "batches": 5}],
    "stops": ["stops", {}],
    "failures": ["failures", {}],
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return shared_result(tmp_path_factory, "trainer_ranks", launch)


@pytest.fixture(scope="module")
def folder(shared):
    return shared[0]


@pytest.fixture(scope="module")
def launched(shared):
    return shared[1]


def launch(folder):
    """Results by world and program, one for each rank."""

    def fit(name, **options):
        return ["resumed", {"folder": str(folder / name), **options}]

    three = (
        {"refused": ["refused", {"folder": str(folder)}]}
        | PROGRAMS
        | {
            "straight": fit("straight", until=14),
            "before": fit("three", until=5),
            "after": fit("three", until=14),
            "begun": fit("begun", until=5),
            "by time": fit("time", until=8, times=[False, False, True]),
            "by steps": fit("steps", until=8, steps=3),
        }
    )
    plans = {
        3: three,
        2: PROGRAMS | {"fewer": fit("begun", until=100)},
        1: {name: PROGRAMS[name] for name in ("uneven", "accumulated", "fixed")},
    }
    results = {}
    for world, programs in plans.items():  # fewer ranks go on where more have stopped
        ranks = run(world, "trainer_programs:run_ranks", programs=list(programs.values()))
        results[world] = {name: [each[n] for each in ranks] for n, name in enumerate(programs)}
    return results


def alone(world, name):
    """The same in this process."""
    return trainer_programs.run_all(world, [PROGRAMS[name]])[0]


def whole_table(results, name):
    rows = {}
    for result in results:
        for key, *row in zip(*result["tables"][name], strict=True):
            assert key not in rows  # every key is on one rank
            rows[key] = row
    return rows


def assert_trained_the_same(results, expected, counts=True, tolerance=1e-5):
    for result in results:
        assert result["dense"].keys() == expected["dense"].keys()
        for name, value in expected["dense"].items():
            torch.testing.assert_close(result["dense"][name], value, rtol=tolerance, atol=tolerance)
    for name in expected["tables"]:
        received, wanted = whole_table(results, name), whole_table([expected], name)
        assert received.keys() == wanted.keys()
        for key, (vector, state, count, last) in wanted.items():
            np.testing.assert_allclose(received[key][0], vector, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(received[key][1], state, rtol=tolerance, atol=tolerance)
            if counts:
                assert received[key][2:] == [count, last]


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        for name, value in a["dense"].items():
            assert torch.equal(value, b["dense"][name])
        for name, rows in a["tables"].items():
            for left, right in zip(rows, b["tables"][name], strict=True):
                np.testing.assert_array_equal(left, right)


def assert_close(received, wanted):
    assert received.keys() == wanted.keys()
    for name, value in wanted.items():
        assert received[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_train_what_one_process_trains_also_when_some_have_no_data_left(launched, world):
    results, expected = launched[world]["uneven"], alone(world, "uneven")
    assert_trained_the_same(results, expected)
    for each in results:
        assert (each["result"].step, each["result"].samples) == (
            expected["result"].step,
            expected["result"].samples,
        )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_metrics_and_losses_are_those_of_all_ranks(launched, world):
    results, expected = launched[world]["uneven"], alone(world, "uneven")
    for each in results:
        assert_close(each["result"].metrics, expected["result"].metrics)
        assert_close(each["result"].evaluation, expected["result"].evaluation)
    times = ("samples_per_second", "memory")
    for received, wanted in zip(results[0]["log"], expected["log"], strict=True):
        known = {name: value for name, value in wanted.items() if name not in (*times, "kind")}
        assert received["kind"] == wanted["kind"]
        assert_close({name: received[name] for name in known}, known)
    assert all(each["log"] == [] for each in results[1:])


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_is_given_the_predictions_of_its_own_batches(launched, world):
    for rank, each in enumerate(launched[world]["uneven"]):
        assert each["predicted"] == trainer_programs.SIZES[rank]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("other", ["again", "without ahead", "dicts"])
def test_the_same_bits_come_again_with_the_feed_and_without(launched, world, other):
    assert_same_bits(launched[world]["uneven"], launched[world][other])
    for one, two in zip(launched[world]["uneven"], launched[world][other], strict=True):
        assert one["result"].metrics == two["result"].metrics
        assert one["result"].evaluation == two["result"].evaluation


@pytest.mark.parametrize("world", [2, 3])
def test_models_with_a_head_no_loss_meets_and_without_dense_parameters(launched, world):
    expected = alone(world, "heads")
    for place in (0, 1):
        assert_trained_the_same([each[place] for each in launched[world]["heads"]], expected[place])


@pytest.mark.parametrize("world", [2, 3])
def test_all_models_train_what_they_train_in_one_process(launched, world):
    for name, expected in alone(world, "models").items():
        assert_trained_the_same([each[name] for each in launched[world]["models"]], expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_accumulated_passes_weigh_as_their_rows(launched, world):
    if world > 1:
        assert_trained_the_same(launched[world]["accumulated"], alone(world, "accumulated"), counts=False)
    else:
        assert_trained_the_same(launched[1]["accumulated"], trainer_programs.accumulated(1))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_fixed_global_batch_trains_the_same_on_any_number_of_ranks(launched, world):
    expected = alone(world, "fixed")
    assert_trained_the_same(launched[world]["fixed"], expected, counts=False)
    assert {each["result"].step for each in launched[world]["fixed"]} == {5}
    if world > 1:
        rotating = launched[world]["rotating"]
        assert_trained_the_same(rotating, alone(world, "rotating"))
        assert {each["result"].samples for each in rotating} == {25}


@pytest.mark.parametrize("world", [2, 3])
def test_a_stop_on_one_rank_stops_all_at_the_same_step(launched, world):
    for stops in launched[world]["stops"]:
        assert stops["stop", 0] == (2, "enough", 120, None)
        assert stops["stop", 2] == (4, "enough", 120, None)  # those that were taken ahead are trained
        assert stops["signal", 0] == (2, "terminate", 120, None)
        assert stops["signal", 2] == (4, "terminate", 120, None)
        assert all(stops["ended", ahead].startswith("TerminatedError: SIGTERM has") for ahead in (0, 2))
        assert stops["early"][0] == 4
        assert stops["rest"] == {2: (80, 1), 3: (84, 1)}[world]


def test_what_cannot_begin_is_refused_on_all_ranks_and_none_waits(launched):
    for folder, half, samples in launched[3]["refused"]:
        assert folder.startswith("CheckpointError: ")
        assert "checkpoints cannot be written here: Not a directory" in folder
        assert half.startswith("ValueError: These tables would not be trained")
        assert samples == 120


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_that_one_rank_must_leave_out_is_left_out_by_all(launched, world):
    results = launched[world]["failures"]
    assert {each["result"].skipped for each in results} == {1}
    for each in results:
        for name, value in each["dense"].items():
            assert torch.equal(value, results[0]["dense"][name])
        assert all(math.isfinite(float(value.sum())) for value in each["dense"].values())


@pytest.mark.parametrize("world", [2, 3])
def test_data_that_fails_on_one_rank_is_an_error_on_all(launched, world):
    *others, last = [each["error"] for each in launched[world]["failures"]]
    assert last == "the disk is gone"
    for message in others:
        assert message == f"Rank {world - 1} could not take its next batch: OSError: the disk is gone"


def test_a_fit_that_goes_on_has_the_bits_of_one_that_was_never_stopped(launched):
    after, straight = launched[3]["after"], launched[3]["straight"]
    assert_same_bits(after, straight)
    for one, two in zip(after, straight, strict=True):
        assert (one["result"].trained, two["result"].trained) == (9, 14)
        assert one["result"].metrics == two["result"].metrics


def test_another_number_of_ranks_trains_on_what_is_left(launched, folder):
    assert {each["result"].samples for each in launched[2]["fewer"]} == {240}
    assert {each["result"].samples for each in launched[3]["begun"]} == {60}
    assert trainer_programs.resumed(1, folder / "three", until=100)["result"].samples == 240


def test_data_without_a_position_cannot_go_on_in_the_middle_of_an_epoch(launched, folder):
    class Listed(list):
        """The data that ranks have trained on, without its positions."""

        def identity(self):
            return trainer_programs.loader().identity()

    trainer = trainer_programs.trainer_of(trainer_programs.net_of(dropout=0.3))
    trainer.saver = trainer_programs.Kept(folder / "steps")
    with pytest.raises(ValueError, match=r"several ranks cannot skip its batches: .* got Listed"):
        trainer.fit(Listed(trainer_programs.shares(1)))


def test_checkpoints_are_saved_by_all_ranks_at_once(launched):
    assert [each["saved"] for each in launched[3]["by time"]] == [[3, 8]] * 3
    assert [each["saved"] for each in launched[3]["by steps"]] == [[3, 6, 8]] * 3
