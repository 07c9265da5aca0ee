"""Launched jobs whose processes are killed: the final model has every record once."""

import random
import signal
import time

import numpy as np
import pytest
from chaos_helpers import ROWS, LaunchedJob, mutual_tls


def test_a_job_outlives_the_death_of_each_role(tmp_path):
    with LaunchedJob(tmp_path, "hybrid", 4, loaders=1, workers=1, rows=1001) as job:
        job.kill_together(["loader", "embedding-worker"], 6)  # each is replaced alone
        job.wait_for_step(job.step() + 12)  # after the batches whose ids both had
        assert "Generation" not in job.log.read_text()
        job.kill_together(["parameter-server", "trainer"], 0)  # which cost a rollback
        job.finish()
        times, _ = job.records()
        np.testing.assert_array_equal(times, 1)
        assert "begins" in job.log.read_text()
        most = int((tmp_path / "notes" / "done-0").read_text().split()[1])
        assert most <= 4


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_all_roles_with_a_token_and_mutual_tls(tmp_path, host):
    secured = mutual_tls(tmp_path, host)
    with LaunchedJob(tmp_path, "sync", 1, trainers=2, loaders=2, workers=2, extra=secured) as job:
        job.finish()
        np.testing.assert_array_equal(job.records()[1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_lost_server_takes_its_rows_as_they_were_saved(tmp_path, workers):
    extra = "on_server_loss: reload\n"
    with LaunchedJob(tmp_path, "hybrid", 4, loaders=min(workers, 1), workers=workers, extra=extra) as job:
        job.kill("parameter-server", 25)
        job.finish()
        times, _ = job.records()
        log = job.log.read_text()
        assert "is restarted with the rows of step" in log, log
        assert "Generation" not in log, log
        steps, _, lost = map(int, (tmp_path / "notes" / "done-0").read_text().split())
        assert steps == -(-ROWS // 16)
        assert set(times.tolist()) <= {0.0, 1.0}
        assert lost or times.all()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["parameter-server", "trainer", "loader", "embedding-worker"])
def test_a_role_is_killed_twenty_times(tmp_path, role):
    with LaunchedJob(tmp_path, "hybrid", 4, loaders=2, workers=1, rows=5001) as job:  # far from its end
        for _ in range(20):
            job.kill(role, random.randint(1, 6))
            time.sleep(random.uniform(0, 0.3))
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)
        if role in ("loader", "embedding-worker"):  # which are replaced, while the others go on
            assert "Generation" not in job.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("trainers", "times"), [(1, 8), (2, 4)])
def test_loaders_and_embedding_workers_are_killed_together(tmp_path, trainers, times):
    gathered = {}
    for kills in (0, times):
        folder = tmp_path / f"{kills}"
        folder.mkdir()
        with LaunchedJob(folder, "hybrid", 4, trainers=trainers, loaders=2, workers=2) as job:
            for _ in range(kills):
                job.kill_together(["loader", "embedding-worker"], random.randint(9, 14))
            job.finish()
            assert "Generation" not in job.log.read_text()  # each was replaced alone
            gathered[kills], _ = job.records()
    assert gathered[0].all()
    np.testing.assert_array_equal(gathered[times], gathered[0])


@pytest.mark.slow
def test_roles_are_killed_in_turn(tmp_path):
    with LaunchedJob(tmp_path, "hybrid", 4, trainers=1, loaders=2, workers=2) as job:
        for number in range(20):
            roles = ("loader", "parameter-server", "embedding-worker", "trainer")
            job.kill(roles[number % 4], random.randint(1, 6))
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)


@pytest.mark.slow
def test_synchronous_trainers_and_servers_are_killed(tmp_path):
    with LaunchedJob(tmp_path, "sync", 1, trainers=2) as job:
        for number in range(10):
            job.kill(("trainer", "parameter-server")[number % 2], random.randint(1, 6))
        job.finish()
        np.testing.assert_array_equal(job.records()[1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_roles_of_two_trainers_are_killed_in_turn(tmp_path, mode):
    roles = ("loader", "parameter-server", "embedding-worker", "trainer")
    gathered = {}
    for kills in (0, 20):
        folder = tmp_path / f"{kills}"
        folder.mkdir()
        with LaunchedJob(folder, mode, 4, trainers=2, loaders=2, workers=2) as job:
            for number in range(kills):
                job.kill(roles[number % 4], random.randint(1, 6))
            job.finish()
            gathered[kills], _ = job.records()
    assert gathered[0].all()  # by how much depends on the rows of the other trainer's batch
    np.testing.assert_array_equal(gathered[20], gathered[0])


@pytest.mark.slow
@pytest.mark.parametrize("role", ["trainer", "parameter-server", "embedding-worker", "loader"])
def test_a_role_that_hangs_is_killed_and_the_job_goes_on(tmp_path, role):
    with LaunchedJob(tmp_path, "hybrid", 4, loaders=1, workers=1, pause=0.5) as job:
        job.kill(role, 6, signal.SIGSTOP)
        job.wait_for_line("does not answer any more", 180)
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)
