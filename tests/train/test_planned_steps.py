"""Steps with fixed batches: the same bits on any number of trainers, and while they come and go."""

import pytest
import torch
from checkpoint_bits import assert_same, state_of
from elastic_jobs import elastic_job


def train(folder, trainers, disturb=None, **settings):
    """The state that a job of so many trainers ends with."""
    folder.mkdir()
    options = {"KARVAN_GLOBAL_BATCHES": 3, "records": 250, "epochs": 2, **settings}
    with elastic_job(folder, program="planned_trainer", least=trainers, **options) as job:
        started = [job.start() for _ in range(trainers)]
        if disturb is None:
            job.hurry()
        else:
            disturb(job, started)
        return state_of(job.results(1)[0]["path"])


def come_and_go(job, started):
    job.wait(lambda: job.step(started[0])[0] > 3)
    started[0].kill()
    job.wait(lambda: job.step(started[1])[1] == 1)
    third = job.start()
    job.wait(lambda: job.step(third)[1] == 2)
    started[1].kill()
    job.wait(lambda: job.step(third)[1] == 1)
    job.hurry()


def test_elasticdl_10_four_batches_of_three_trainers_are_the_mean_of_one_process(tmp_path):
    with elastic_job(tmp_path, program="mean_trainer", least=3, records=25, KARVAN_GLOBAL_BATCHES=4) as job:
        for _ in range(3):
            job.start()
        results = job.results(3)
    assert sorted(result["batches"] for result in results) == [1, 1, 2]
    number = torch.arange(25, dtype=torch.float64)  # four batches: 8, 1, 8, 8
    inputs = torch.stack([number, torch.sin(number)], 1)
    expected = 2 * (inputs * torch.cos(number)[:, None]).mean(0)  # a step of 1.0 against the gradient at 0
    for result in results:
        assert result["step"] == 1
        torch.testing.assert_close(
            torch.tensor(result["weight"], dtype=torch.float64), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_any_number_of_trainers_ends_with_the_same_bits(tmp_path):
    alone = train(tmp_path / "1", 1)
    assert alone["/trainer/samples"] == 500
    for trainers in (2, 3, 4):
        assert_same(train(tmp_path / str(trainers), trainers), alone)
    disturbed = train(tmp_path / "disturbed", 2, come_and_go, PAUSE=0.25)
    assert_same(disturbed, alone)


def test_all_trainers_die_and_the_bits_are_the_same(tmp_path):
    def kill_all(job, started):
        job.wait(lambda: job.step(started[0])[0] > 9)
        for each in started:
            each.kill()
        job.hurry()
        for _ in started:
            job.start()

    alone = train(tmp_path / "alone", 1)
    again = train(tmp_path / "again", 2, kill_all, PAUSE=0.1, SAVE_EVERY=4)
    assert_same(again, alone)


def test_batches_that_loaders_read_are_the_same_bits(tmp_path):
    def lose_a_loader(job, started):
        job.wait(lambda: job.step(started[0])[0] > 3)
        job.loaders[0].kill()
        job.hurry()

    alone = train(tmp_path / "alone", 1)
    loaded = train(tmp_path / "loaded", 2, lose_a_loader, PAUSE=0.1, loaders=2)
    assert_same(loaded, alone)


@pytest.mark.slow
def test_other_batches_are_other_bits(tmp_path):
    with pytest.raises(AssertionError):
        assert_same(train(tmp_path / "2", 1, KARVAN_GLOBAL_BATCHES=2), train(tmp_path / "3", 1))
