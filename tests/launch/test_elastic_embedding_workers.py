"""Launched elastic jobs with embedding workers: these are killed and stopped, too, and nobody goes back."""

import os
import random
import signal
import time

import pytest
from elastic_launch import ElasticLaunch
from processes import kill

pytestmark = pytest.mark.slow


def job_of(folder, mode, **options):
    return ElasticLaunch(folder, mode=mode, **{"loaders": 2, "workers": 2, **options})


def wait_for_steps(job, steps):
    """Wait until the trainers have made so many more."""

    def newest():
        return max((step for step, _ in job.worlds().values()), default=0)

    before = newest()
    job.wait(lambda: newest() > before + steps)


@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_a_launched_job_restarts_killed_workers_and_nobody_goes_back(tmp_path, mode):
    with job_of(tmp_path, mode, records=1200, epochs=1) as job:
        job.wait_for_world(2)
        for pid in job.pids("embedding-worker"):
            os.kill(pid, signal.SIGKILL)
        wait_for_steps(job, 10)
        text = job.finish()
    assert "embedding-worker-0 was killed by SIGKILL; it is restarted." in text
    assert "embedding-worker-1 was killed by SIGKILL; it is restarted." in text
    assert "Generation 1 begins" not in text
    assert "Traceback" not in text
    assert job.pids("embedding-worker") == []


@pytest.mark.parametrize("mode", ["hybrid", "sync"])
def test_a_worker_that_hangs_is_replaced_and_nobody_goes_back(tmp_path, mode):
    with job_of(tmp_path, mode, records=1200, epochs=1) as job:
        job.wait_for_world(2)
        stopped = job.pids("embedding-worker")[0]
        os.kill(stopped, signal.SIGSTOP)
        job.wait(lambda: stopped not in job.pids("embedding-worker"))
        wait_for_steps(job, 10)
        text = job.finish()
    assert "Generation 1 begins" not in text


@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_of_trainers_workers_and_loaders_cost_nobody_a_rollback(tmp_path, mode, seed):
    draw = random.Random(seed)
    with job_of(tmp_path, mode, records=9600, epochs=1, trainers="{replicas: 3}") as job:
        job.wait(lambda: len(job.worlds()) > 1)
        for _ in range(8):
            for role in draw.choices(["trainer", "loader", "embedding-worker"], [2, 2, 3], k=3):
                pids = job.pids(role)
                if role == "trainer":  # one is left that has the state of training
                    pids = list(job.worlds()) if len(job.worlds()) > 1 else []
                if pids:
                    kill(draw.choice(pids))
                time.sleep(draw.choice([0.0, 0.5, 2.0]))
            wait_for_steps(job, 4)
        text = job.finish()
    assert "Generation 1 begins" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_random_kills_of_everything_lose_and_double_nothing(tmp_path, mode):
    draw = random.Random(7)
    roles = ["trainer", "loader", "embedding-worker", "parameter-server", "master"]
    with job_of(tmp_path, mode, records=2000, epochs=1, trainers="{replicas: 3}") as job:
        job.wait(lambda: job.worlds())
        for _ in range(12):
            for role in draw.choices(roles, [4, 2, 4, 1, 1], k=draw.choice([1, 2])):
                if pids := job.pids(role):
                    kill(draw.choice(pids))
            time.sleep(draw.uniform(0.0, 5.0))
            if job.process.poll() is not None or list(job.notes.glob("result-*")):
                break
        job.finish()
