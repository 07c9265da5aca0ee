"""Features over real processes: a fit on shares of the data is the fit of one process on all of it."""

import feature_programs
import pytest
from ranks_helpers import run

import karvan as kv


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return run(2, "feature_programs:fit_shares", run_folder=str(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def alone():
    data = kv.data.read(feature_programs.records(), 17)
    return feature_programs.plain(feature_programs.engine_of().fit(data))


@pytest.mark.parametrize("shares", ["even", "uneven", "all on one", "twice", "resumed"])
def test_all_ranks_find_the_bits_of_one_process(fitted, alone, shares):
    assert [made[shares] for made in fitted] == [alone, alone]
    assert len(alone["city"]) == 3


def test_an_error_on_one_rank_is_an_error_on_all(fitted):
    assert "RankError: Rank 1 could not fit its features: " in fitted[0]["fails"]
    assert "needs column 'city'" in fitted[1]["fails"]


def test_no_data_on_any_rank_is_an_error_on_all(fitted):
    for made in fitted:
        assert (
            made["nothing"]
            == "ValueError: Feature 'price', normalise: expected values to fit, but there were none."
        )


def test_other_features_on_another_rank_are_an_error(fitted):
    for made in fitted:
        assert "equal features on all ranks" in made["other features"]


def test_statistics_that_differ_between_ranks_are_an_error_before_training(fitted):
    for made in fitted:
        assert "Call fit after kv.connect" in made["fitted apart"]


def test_columns_of_other_kinds_on_another_rank_are_an_error_on_all(fitted):
    for made in fitted:
        assert "column 'zip': Expected " in made["kinds apart"]


def test_statistics_that_a_checkpoint_replaces_are_told_of_by_the_first_rank_alone(fitted):
    first, second = (made["replaced"] for made in fitted)
    assert [line.partition(" had ")[0] for line in first] == ["Transform 'features'"]
    assert second == []
