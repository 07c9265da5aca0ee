"""Launched jobs whose master is killed, and its keeper: training goes on, nothing else is restarted."""

import os
import random
import signal
import time

import numpy as np
import pytest
from chaos_helpers import LaunchedJob, mutual_tls
from port_helpers import check_ports, sockets_of
from processes import parent_of

ROLES = ("parameter-server", "embedding-worker", "loader", "trainer")


def next_master(job, before):
    until = time.monotonic() + 60
    while not (found := [pid for pid in job.pids("master") if pid != before]):
        assert time.monotonic() < until, job.log.read_text()
        time.sleep(0.05)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])
def test_training_goes_on_while_the_master_is_killed_and_its_keeper(tmp_path, secured):
    extra = mutual_tls(tmp_path) if secured else ""
    with LaunchedJob(tmp_path, "sync", 1, trainers=2, loaders=1, workers=1, pause=1.0, extra=extra) as job:
        job.wait_for_step(3, 240)
        check_ports(job, "127.0.0.1" if secured else sockets_of(job))
        before = {role: job.pids(role) for role in ROLES}
        said = "The master was restarted: generation 0, 6 processes."
        for times, victim in enumerate((lambda pid: pid, parent_of), 1):
            [master] = job.pids("master")
            os.kill(victim(master), signal.SIGKILL)
            next_master(job, master)
            until = time.monotonic() + 60
            while job.log.read_text().count(said) < times:
                assert time.monotonic() < until, job.log.read_text()
                time.sleep(0.05)
            job.wait_for_step(job.step() + 2, 120)  # the first of them may have been in progress
        assert {role: job.pids(role) for role in ROLES} == before
        job.finish()
        assert "Generation 1 begins" not in job.log.read_text()
        np.testing.assert_array_equal(job.records()[1], 1)  # every record was looked up once


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_master_that_is_killed_again_and_again_while_trainers_connect_loses_nothing(tmp_path, seed):
    draw = random.Random(seed)
    with LaunchedJob(tmp_path, "hybrid", 4, trainers=2, pause=0.05) as job:
        killed = None
        for _ in range(4):
            killed = next_master(job, killed)
            time.sleep(draw.uniform(0.2, 3.0))  # also before it has started anything
            os.kill(killed, signal.SIGKILL)
        job.wait_for_step(5, 240)
        job.kill("trainer", 2)  # a rollback, during which it dies once more
        os.kill(job.pids("master")[0], signal.SIGKILL)
        job.wait_for_line("Generation 1 begins")
        job.finish()
        assert job.records()[0].all()
