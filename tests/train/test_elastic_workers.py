"""Elastic jobs whose rows embedding workers look up: whoever dies, every record counts once in its row."""

import pytest
from checkpoint_bits import assert_same
from counted_rows import MODES, check, train_planned
from elastic_jobs import elastic_job

SOME = [pytest.param(mode, marks=pytest.mark.slow if mode != "hybrid" else ()) for mode in MODES]


def job_of(folder, mode, **options):
    options = {"servers": 2, "loaders": 2, "workers": 2, "epochs": 1, "PAUSE": 0.1, **options}
    return elastic_job(folder, **MODES[mode], **options)


@pytest.mark.parametrize("mode", SOME)
def test_workers_and_a_trainer_are_killed_and_rows_count_every_record_once(tmp_path, mode):
    with job_of(tmp_path, mode, records=400, least=2) as job:
        one, two = job.start(), job.start()
        job.wait(lambda: min(job.step(one)[0], job.step(two)[0]) > 2)
        job.workers[0].kill()
        job.start_worker(0)
        before = job.step(two)[0]
        job.wait(lambda: job.step(two)[0] > before + 3)
        one.kill()
        job.wait(lambda: job.step(two)[1] == 1)
        job.workers[1].kill()
        job.start_worker(1)
        job.hurry()
        check(job, job.results(1))
        assert "Traceback" not in job.logs()


@pytest.mark.slow
@pytest.mark.parametrize("server", [-1, 0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_a_dead_worker_has_staged_at_some_servers_counts_once(tmp_path, mode, server):
    with job_of(tmp_path, mode, workers=1, worker_settings={"DIE_AT": f"5,{server}"}) as job:
        job.start()
        job.start()
        job.workers[0].wait()
        job.start_worker(0)
        job.hurry()
        check(job, job.results(2))
        assert "Traceback" not in job.logs()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_and_the_loaders_that_had_sent_its_ids_are_killed_at_once(tmp_path, mode):
    with job_of(tmp_path, mode, least=2) as job:
        trainers = [job.start(), job.start()]
        for _ in range(3):
            before = job.step(trainers[1])[0]
            job.wait(lambda before=before: job.step(trainers[1])[0] > before + 4)
            for process in (*job.workers.values(), *job.loaders.values()):
                process.kill()
            for index in range(2):
                job.start_worker(index)
                job.start_loader(index, 2)
        job.hurry()
        check(job, job.results(2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_trainers_die_and_workers_serve_the_next_run(tmp_path, mode):
    with job_of(tmp_path, mode, records=600) as job:
        trainers = [job.start(), job.start()]
        job.wait(lambda: min(job.step(each)[0] for each in trainers) > 12)
        for trainer in trainers:
            trainer.kill()
        job.hurry()
        job.start()
        check(job, job.results(1))


def kill_workers_and_a_trainer(job, started):
    job.wait(lambda: job.step(started[0])[0] > 1)
    for index in range(2):
        job.workers[index].kill()
        job.start_worker(index)
    job.wait(lambda: job.step(started[0])[0] > 3)
    started[0].kill()
    third = job.start()
    job.wait(lambda: job.step(third)[1] == 2)


@pytest.mark.slow
def test_rows_have_the_bits_of_a_job_without_workers(tmp_path):
    state, rows = train_planned(tmp_path / "without", 1, loaders=1, epochs=1)
    for name, trainers, disturb, pause in (
        ("alone", 1, None, 0),
        ("two", 2, None, 0),
        ("killed", 2, kill_workers_and_a_trainer, 0.2),
    ):
        others, other_rows = train_planned(
            tmp_path / name, trainers, disturb, loaders=2, workers=2, PAUSE=pause, epochs=1
        )
        assert_same(others, state)
        assert other_rows == rows
