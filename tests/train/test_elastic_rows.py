"""Elastic jobs with rows on servers: what a dead trainer had sent counts exactly when its step does."""

import pytest
from checkpoint_bits import assert_same, rows_of, state_of
from elastic_jobs import elastic_job

MODES = {
    "hybrid": {"KARVAN_MODE": "hybrid", "KARVAN_STALENESS": 4},
    "sync": {"KARVAN_MODE": "sync"},
    "async": {"KARVAN_MODE": "async", "KARVAN_STALENESS": 4},
}


def check(job, results):
    """Every record was trained once in every epoch, by its parameter and by its row."""
    for result in results:
        assert result["times"] == [float(job.epochs)] * job.records
        assert result["rows"] == [float(job.epochs)] * job.records
        assert result["samples"] == job.epochs * job.records


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


def train(folder, trainers, disturb=None, **settings):
    """The state and the rows that a job with fixed batches ends with."""
    folder.mkdir()
    options = {"KARVAN_GLOBAL_BATCHES": 3, "records": 200, "epochs": 2, **MODES["sync"], **settings}
    with elastic_job(folder, program="planned_trainer", servers=2, least=trainers, **options) as job:
        started = [job.start() for _ in range(trainers)]
        if disturb is None:
            job.hurry()
        else:
            disturb(job, started)
        path = job.results(1)[0]["path"]
        return state_of(path), rows_of(path)


def kill_and_join(job, started):
    job.wait(lambda: job.step(started[0])[0] > 2)
    started[0].kill()
    third = job.start()
    job.wait(lambda: job.step(third)[1] == 2)
    job.hurry()


def test_rows_have_the_same_bits_on_any_number_of_trainers(tmp_path):
    state, rows = train(tmp_path / "alone", 1)
    assert len(rows) >= 4
    others, other_rows = train(tmp_path / "two", 2, kill_and_join, PAUSE=0.15)
    assert_same(others, state)
    assert other_rows == rows


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [2, 3, 4])
def test_rows_have_the_same_bits_undisturbed(tmp_path, trainers):
    state, rows = train(tmp_path / "alone", 1)
    others, other_rows = train(tmp_path / "others", trainers)
    assert_same(others, state)
    assert other_rows == rows
