"""Elastic jobs with rows on servers: what a dead trainer had sent counts exactly when its step does."""

import pytest
from checkpoint_bits import assert_same
from counted_rows import MODES, check, train_planned
from elastic_jobs import elastic_job


@pytest.mark.parametrize("mode", ["hybrid", "async", pytest.param("sync", marks=pytest.mark.slow)])
def test_rows_count_every_record_once_while_trainers_die_and_join(tmp_path, mode):
    with elastic_job(tmp_path, servers=2, least=2, PAUSE=0.15, **MODES[mode]) as job:
        one, two = job.start(), job.start()
        job.wait(lambda: job.step(one)[0] > 2)
        one.kill()
        job.wait(lambda: job.step(two)[1] == 1)
        three = job.start()
        job.wait(lambda: job.step(three)[1] == 2)
        two.kill()
        job.wait(lambda: job.step(three)[1] == 1)
        job.hurry()
        check(job, job.results(1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_trainers_die_and_rows_return_to_the_checkpoint(tmp_path, mode):
    with elastic_job(tmp_path, servers=2, PAUSE=0.1, **MODES[mode]) as job:
        trainers = [job.start(), job.start()]
        job.wait(lambda: min(job.step(each)[0] for each in trainers) > 12)
        for trainer in trainers:
            trainer.kill()
        job.hurry()
        job.start()
        check(job, job.results(1))


def kill_and_join(job, started):
    job.wait(lambda: job.step(started[0])[0] > 2)
    started[0].kill()
    third = job.start()
    job.wait(lambda: job.step(third)[1] == 2)
    job.hurry()


def test_rows_have_the_same_bits_on_any_number_of_trainers(tmp_path):
    state, rows = train_planned(tmp_path / "alone", 1)
    assert len(rows) >= 4
    others, other_rows = train_planned(tmp_path / "two", 2, kill_and_join, PAUSE=0.15)
    assert_same(others, state)
    assert other_rows == rows


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [2, 3, 4])
def test_rows_have_the_same_bits_undisturbed(tmp_path, trainers):
    state, rows = train_planned(tmp_path / "alone", 1)
    others, other_rows = train_planned(tmp_path / "others", trainers)
    assert_same(others, state)
    assert other_rows == rows
