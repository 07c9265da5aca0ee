"""Nodes of a Ray cluster die while a job runs on them: it continues on others, and loses no record."""

import os
import random
import signal
from functools import partial

import numpy as np
import pytest
from engine_helpers import HAS_RAY, NEEDS_RAY
from launch_helpers import wait_until
from ray_jobs import ElasticRayJob, RayJob, karvan

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_RAY, reason=NEEDS_RAY)]


def test_a_job_continues_when_a_node_dies(tmp_path, ray_address, nodes):
    with RayJob(tmp_path, "sync", 1, pause=0.1, address=ray_address, resource=nodes.resource) as job:
        job.wait_for_step(7, 150)
        lost = job.kill_node("parameter-server", nodes)
        job.wait_for_line("was killed by SIGKILL; all trainers go back to the newest checkpoint", 150)
        job.wait_for_line("Generation 1 begins.", 150)
        job.wait_for_step(1, 150)
        assert lost not in job.nodes("parameter-server")
        job.finish()
    times, _ = job.records()
    np.testing.assert_array_equal(times, 1)
    wait_until(lambda: job.left() == [], "all processes to end")


def test_trainers_come_and_go_with_their_nodes_and_train_every_record_once(tmp_path, ray_address, nodes):
    with ElasticRayJob(tmp_path, address=ray_address, resource=nodes.resource) as job:
        job.wait(lambda: job.reached(1, 1))
        karvan("scale", "chaos", "trainers=2")
        job.wait(lambda: job.reached(3, 2))
        assert len(set(job.nodes("trainer"))) == 2
        lost = job.kill_node("trainer", nodes)
        job.wait_for_line("; the others continue, and it is restarted.")
        job.wait(lambda: job.reached(5, 2))
        assert lost not in job.nodes("trainer")
        job.finish()
    job.check_records()
    assert "all trainers" not in job.log.read_text()  # nobody went back
    wait_until(lambda: job.left() == [], "all processes to end")


def recovers(job, before):
    """Whether something has changed since these steps were the last."""
    return job.worlds() != before


@pytest.mark.parametrize("seed", range(2))
def test_random_deaths_of_nodes_lose_and_double_nothing(tmp_path, ray_address, nodes, seed):
    draw = random.Random(seed)
    where = {"address": ray_address, "resource": nodes.resource}
    size = {"servers": 2, "trainers": {"replicas": 2}, "needs": 0.3, "records": 3000}
    with ElasticRayJob(tmp_path, env={"SAVE_EVERY": "5", "PAUSE": "0.2"}, **size, **where) as job:
        job.wait(lambda: job.reached(1, 2))
        for _ in range(5):
            used = {raylet for role in ("trainer", "parameter-server") for raylet in job.nodes(role)}
            living = nodes.living()
            os.kill(draw.choice(sorted(used.intersection(living)) or living), signal.SIGKILL)
            nodes.add()
            # The next one dies while the job recovers from this one, or once all trainers are there again.
            before, soon = job.worlds(), draw.random() < 0.5
            job.wait(partial(recovers, job, before) if soon else partial(job.reached, 1, 2))
        job.finish()
    job.check_records()
    wait_until(lambda: job.left() == [], "all processes to end")
