"""Jobs launched on a Ray cluster of several nodes, also if a node or the master dies."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from chaos_helpers import LaunchedJob
from engine_helpers import HAS_RAY, NEEDS_RAY
from launch_helpers import is_alive, wait_until
from support_paths import support_path
from test_ray_engine import parent_of

from karvan.launch.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_RAY, reason=NEEDS_RAY)]
ROLES = ("parameter-server", "embedding-worker", "loader", "trainer", "master")


class RayJob(LaunchedJob):
    """A job whose roles run on the nodes that have some resource; without an address, on its own cluster."""

    needs = 0.01  # of the resource, for each process

    def __init__(self, folder, *arguments, address=None, resource=None, options=(), **more):
        self._options = [*options, *([] if address is None else ["--address", address])]
        self._resource = resource
        super().__init__(folder, *arguments, **more)

    def start(self, command):
        path = self.folder / "job.yaml"
        job = yaml.safe_load(path.read_text())
        for name, section in job["roles"].items() if self._resource else ():
            section = section if isinstance(section, dict) else {"replicas": section}
            job["roles"][name] = {**section, "resources": {self._resource: self.needs}}
        path.write_text(yaml.safe_dump(job))
        return super().start([*command, "--engine", "ray", *self._options])

    def nodes(self, role):
        """The raylets below which processes of a role run: process, keeper, actor, raylet."""
        return [parent_of(parent_of(parent_of(pid))) for pid in self.pids(role)]

    def left(self):
        return [pid for role in ROLES for pid in self.pids(role) if is_alive(pid)]

    def kill_node(self, role):
        """Kill a node that has a process of a role; its raylet."""
        [raylet, *_] = self.nodes(role)
        os.kill(raylet, signal.SIGKILL)
        return raylet


def karvan(*arguments):
    """Run a command; what it prints."""
    return subprocess.check_output([sys.executable, "-m", "karvan", *map(str, arguments)], text=True)


@pytest.fixture
def nodes(shared_ray, tmp_path):
    """The name of a resource that three nodes have, and their raylets."""
    name = f"job{os.getpid()}x{abs(hash(tmp_path.name)) % 10**6}"
    raylets = shared_ray.add_nodes(name, 3)
    yield name, raylets
    for raylet in raylets:
        if is_alive(raylet):
            os.kill(raylet, signal.SIGKILL)


def test_a_job_with_all_roles_trains_on_every_record_once(tmp_path, ray_address, nodes):
    resource, raylets = nodes
    where = {"address": ray_address, "resource": resource}
    with RayJob(tmp_path, "hybrid", 2, loaders=1, workers=1, pause=0.2, **where) as job:
        job.wait_for_step(2, 120)
        servers = job.nodes("parameter-server")
        assert len(set(servers)) == 2
        assert set(servers) < set(raylets)
        assert job.nodes("trainer") == job.nodes("loader")
        status = json.loads(karvan("status", "chaos", "--json", "-"))
        found = {f"{each['role']}-{each['index']}": each for each in status["processes"]}
        assert {each["state"] for each in found.values()} == {"running"}
        assert [found["trainer-0"]["pid"]] == job.pids("trainer")
        job.finish()
    times, _ = job.records()
    np.testing.assert_array_equal(times, 1)
    wait_until(lambda: job.left() == [], "all processes to end")
    said = karvan("logs", "chaos", "trainer-0").splitlines()
    everything = karvan("logs", "chaos").splitlines()
    assert said
    assert [f"trainer-0 | {line}" for line in said] == [
        f"trainer-0 | {line.partition(' | ')[2]}" for line in everything if line.startswith("trainer-0")
    ]


def test_a_job_continues_when_a_node_dies(tmp_path, ray_address, nodes):
    resource, raylets = nodes
    with RayJob(tmp_path, "sync", 1, pause=0.1, address=ray_address, resource=resource) as job:
        job.wait_for_step(7, 120)
        lost = job.kill_node("parameter-server")
        assert lost in raylets
        job.wait_for_line("was killed by SIGKILL; all trainers go back to the newest checkpoint")
        job.wait_for_line("Generation 1 begins.")
        job.finish()
    times, _ = job.records()
    np.testing.assert_array_equal(times, 1)
    wait_until(lambda: job.left() == [], "all processes to end")


def test_a_master_that_is_killed_adopts_its_processes_and_a_detached_job_is_stopped(tmp_path, ray_address):
    with RayJob(tmp_path, "sync", 1, pause=0.1, address=ray_address, options=["--detach"]) as job:
        assert job.process.wait(120) == 0, job.log.read_text()
        job.wait_for_step(2, 120)
        [trainer] = job.pids("trainer")
        before = RunFolder.of_job("chaos").master()
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(lambda: "The master was restarted" in karvan("logs", "chaos"), "another master")
        job.wait_for_step(job.step() + 5)
        assert job.pids("trainer") == [trainer]
        assert json.loads(karvan("status", "chaos", "--json", "-"))["master"] != before["pid"]
        assert "it was stopped, with code 143" in karvan("stop", "chaos")
        assert job.left() == []


def test_a_job_without_an_address_has_a_cluster_of_its_own_which_ends_with_it(tmp_path):
    with RayJob(tmp_path, "sync", 1, pause=0.0) as job:
        job.wait_for_step(1, 120)
        [raylet] = set(job.nodes("trainer"))
        job.finish()
    wait_until(lambda: not is_alive(raylet), "the cluster to end")
    times, _ = job.records()
    np.testing.assert_array_equal(times, 1)


def test_a_cluster_that_does_not_answer_ends_the_job_with_75(tmp_path):
    with RayJob(tmp_path, "sync", 1, address="127.0.0.1:1") as job:
        assert job.process.wait(120) == 75
    assert "Expected a running Ray cluster at 127.0.0.1:1, got: " in job.log.read_text()


class ElasticRayJob(RayJob):
    """Trainers that lease their records, on Ray; how often each was trained is in their results."""

    records_count, epochs = 1800, 2
    needs = 0.6  # one on each node

    def __init__(self, folder, **more):
        program = support_path("train/elastic_trainer.py")
        super().__init__(folder, "sync", 1, program=program, write_data=self._write, **more)

    def _write(self, folder):
        (folder / "records").write_text(str(self.records_count))
        for part in range(3):
            mine = pa.array(range(part, self.records_count, 3), pa.int64())
            pq.write_table(pa.table({"record": mine}), folder / f"{part}.parquet")

    def start(self, command):
        folders = [str(self.folder / name) for name in ("data", "checkpoints", "notes")]
        trainers = {"min": 1, "max": 2, "replicas": 1, "threads": 1, "args": [*folders, self.epochs]}
        path = self.folder / "job.yaml"
        job = yaml.safe_load(path.read_text())
        job |= {"sharding": "dynamic", "roles": {"parameter_servers": 0}}
        job["roles"]["trainers"] = {**trainers, "env": {"PAUSE": "0.5", "SAVE_EVERY": "1000"}}
        path.write_text(yaml.safe_dump(job))
        return super().start(command)

    def reached(self, step, trainers):
        """Whether so many trainers train together, in this step or a later one."""
        notes = [path.read_text().split() for path in (self.folder / "notes").glob("step-*")]
        return any(int(note[0]) >= step and int(note[1]) == trainers for note in notes if len(note) == 2)

    def results(self):
        return [json.loads(path.read_text()) for path in (self.folder / "notes").glob("result-*[0-9]")]


def test_trainers_come_and_go_with_their_nodes_and_train_every_record_once(tmp_path, ray_address, nodes):
    resource, raylets = nodes
    with ElasticRayJob(tmp_path, address=ray_address, resource=resource) as job:
        wait_until(lambda: job.reached(1, 1), "one trainer")
        karvan("scale", "chaos", "trainers=2")
        wait_until(lambda: job.reached(3, 2), "two trainers")
        assert len(set(job.nodes("trainer"))) == 2
        assert job.kill_node("trainer") in raylets
        job.wait_for_line("; the others continue, and it is restarted.")
        for path in (tmp_path / "notes").glob("step-*"):
            path.unlink()
        wait_until(lambda: job.reached(5, 2), "two trainers again")
        job.finish()
    results = job.results()
    assert len(results) == 2
    for result in results:
        np.testing.assert_array_equal(result["times"], job.epochs)
    assert "all trainers" not in job.log.read_text()  # nobody went back
    wait_until(lambda: job.left() == [], "all processes to end")
