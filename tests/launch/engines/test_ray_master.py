"""The master of a job on a Ray cluster is a detached actor, which survives launcher, process and node."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from engine_helpers import HAS_RAY, NEEDS_RAY, JobNodes, shared_cluster, token_settings
from launch_helpers import wait_until
from processes import is_alive, parent_of
from ray_jobs import DetachedJob, RayJob, karvan

from karvan.launch.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_RAY, reason=NEEDS_RAY)]


def test_a_detached_job_survives_the_deaths_of_its_master_and_its_actor(tmp_path, ray_address):
    with DetachedJob(tmp_path, address=ray_address) as job:
        [trainer] = job.pids("trainer")
        first = job.master()
        os.kill(first, signal.SIGKILL)
        job.wait_for_master(first)
        second = job.master()
        keeper = parent_of(second)
        os.kill(parent_of(keeper), signal.SIGKILL)  # the actor
        job.wait_for_master(second)
        assert not is_alive(second)
        assert not is_alive(keeper)
        wait_until(lambda: job.restarts() == 2, "both to say so")
        assert job.pids("trainer") == [trainer]  # nobody else was restarted
        status = json.loads(karvan("status", "chaos", "--json", "-"))
        assert status["master"] == job.master()
        assert {each["state"] for each in status["processes"]} == {"running"}
        assert [path.name for path in (tmp_path / "checkpoints" / "master").glob("run-*")] == [
            job.run_folder.shared.name
        ]
        assert "it was stopped, with code 143" in karvan("stop", "chaos")
        wait_until(lambda: job.left() == [], "all processes to end")
        assert sorted(path.name for path in job.run_folder.shared.iterdir()) == ["logs", "outcome.json"]
        assert "token" not in os.listdir(job.run_folder.path)
        wait_until(lambda: not job.run_folder.runs, "the actor to end")
        assert "it was stopped, with code 143" in karvan("status", "chaos")
        again = subprocess.run(job.command, capture_output=True, text=True)
        assert again.returncode == 0, again.stdout
        job.finish()


def test_a_job_whose_launcher_is_killed_stops_in_order(tmp_path, ray_address):
    with RayJob(tmp_path, "sync", 1, pause=1.0, address=ray_address) as job:
        job.wait_for_step(2, 150)
        job.process.kill()
        job.process.wait()
        folder = RunFolder.of_job("chaos")
        wait_until(lambda: folder.outcome(), "the end", 150)
        assert folder.outcome()["code"] == 143
        wait_until(lambda: job.left() == [], "all processes to end")
        assert any(Path(tmp_path, "checkpoints").glob("step-*"))
        wait_until(lambda: not folder.runs, "the actor to end")


def test_a_master_whose_node_dies_continues_on_another_one(tmp_path, monkeypatch):
    with shared_cluster(tmp_path / "ray-cluster") as cluster:
        for name, value in token_settings(cluster.token).items():
            monkeypatch.setenv(name, value)
        cluster.fill_head()
        roles, others = JobNodes(cluster, "roles", 1), JobNodes(cluster, "others", 2)
        with DetachedJob(tmp_path, address=cluster.address, resource=roles.resource) as job:
            first = job.master()
            raylet = parent_of(parent_of(parent_of(first)))
            assert raylet in (*roles.raylets, *others.raylets)
            if raylet in roles.raylets:
                roles.add()  # otherwise nobody else would have to move
            os.kill(raylet, signal.SIGKILL)
            job.wait_for_master(first)
            assert parent_of(parent_of(parent_of(job.master()))) != raylet
            job.finish()
