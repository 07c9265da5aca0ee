"""Jobs launched on a Ray cluster of several nodes, without deaths."""

import json

import numpy as np
import pytest
from engine_helpers import HAS_RAY, NEEDS_RAY
from launch_helpers import wait_until
from processes import is_alive
from ray_jobs import RayJob, karvan

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_RAY, reason=NEEDS_RAY)]


def test_a_job_with_all_roles_trains_on_every_record_once(tmp_path, ray_address, nodes):
    where = {"address": ray_address, "resource": nodes.resource}
    with RayJob(tmp_path, "hybrid", 2, loaders=1, workers=1, pause=0.2, **where) as job:
        job.wait_for_step(2, 120)
        servers = job.nodes("parameter-server")
        assert len(set(servers)) == 2
        assert set(servers) < set(nodes.raylets)
        assert job.nodes("trainer") == job.nodes("loader")
        status = json.loads(karvan("status", "chaos", "--json", "-"))
        found = {f"{each['role']}-{each['index']}": each for each in status["processes"]}
        assert {each["state"] for each in found.values()} == {"running"}
        assert [found["trainer-0"]["pid"]] == job.pids("trainer")
        job.finish()
    times, _ = job.records()
    np.testing.assert_array_equal(times, 1)
    wait_until(lambda: job.left() == [], "all processes to end")
    said = karvan("logs", "chaos", "loader-0").splitlines()
    everything = karvan("logs", "chaos").splitlines()
    assert said
    assert [f"loader-0 | {line}" for line in said] == [
        line for line in everything if line.startswith("loader-0")
    ]


def test_a_job_without_an_address_has_a_cluster_of_its_own_which_ends_with_it(tmp_path):
    with RayJob(tmp_path, "sync", 1, pause=0.0) as job:
        job.wait_for_step(1, 120)
        [raylet] = set(job.nodes("trainer"))
        job.finish()
    text = job.log.read_text()
    assert text.count("Starting Ray on this machine") == 1
    assert "Waiting for room" not in text  # it only starts
    wait_until(lambda: not is_alive(raylet), "the cluster to end")
    times, _ = job.records()
    np.testing.assert_array_equal(times, 1)


def test_checkpoints_that_cannot_be_written_are_refused_before_anything_starts(tmp_path, ray_address):
    (tmp_path / "checkpoints").write_text("a file")
    with RayJob(tmp_path, "sync", 1, address=ray_address) as job:
        assert job.process.wait(120) == 2
    assert "checkpoints expects a folder that this user may write to, got " in job.log.read_text()
    assert job.left() == []


def test_a_cluster_that_does_not_answer_ends_the_job_with_75(tmp_path):
    with RayJob(tmp_path, "sync", 1, address="127.0.0.1:1") as job:
        assert job.process.wait(120) == 75
    assert "Expected a running Ray cluster at 127.0.0.1:1, got: " in job.log.read_text()
