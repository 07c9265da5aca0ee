"""Jobs that are launched on a Ray cluster, whose nodes are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from chaos_helpers import LaunchedJob
from launch_helpers import wait_until
from processes import is_alive, parent_of
from support_paths import support_path

from karvan.launch.run_folder import RunFolder

LONG = "master_timeout: 300\n"  # a busy machine is slow
ROLES = ("parameter-server", "embedding-worker", "loader", "trainer", "master")


class RayJob(LaunchedJob):
    """A job whose roles run on the nodes that have some resource; without an address, on its own cluster.

    before: words before the command that launches it. resources: of the roles, by their names in a job.yaml,
    if they differ.
    """

    needs = 0.01  # of the resource, for each process

    def __init__(
        self, folder, *arguments, address=None, resource=None, resources=None, options=(), before=(), **more
    ):
        self._before = before
        self._options = [*options, *([] if address is None else ["--address", address])]
        self._resource = resource
        self._resources = resources or {}
        super().__init__(folder, *arguments, **more)

    def start(self, command):
        path = self.folder / "job.yaml"
        job = yaml.safe_load(path.read_text())
        of_all = {self._resource: self.needs} if self._resource else {}
        for name, section in job["roles"].items():
            section = section if isinstance(section, dict) else {"replicas": section}
            job["roles"][name] = {**section, "resources": self._resources.get(name, of_all)}
        path.write_text(yaml.safe_dump(job))
        self.command = [*self._before, *command, "--engine", "ray", *self._options]
        return super().start(self.command)

    def nodes(self, role):
        """The raylets below which processes of a role run: process, keeper, actor, raylet."""
        found = []
        for pid in self.pids(role):
            with suppress(OSError, ValueError):  # one that is just dying
                found.append(parent_of(parent_of(parent_of(pid))))
        return found

    def left(self):
        return [pid for role in ROLES for pid in self.pids(role) if is_alive(pid)]

    def kill_node(self, role, nodes):
        """Kill one of the test's nodes, which has a process of a role; its raylet."""
        raylet = next(each for each in self.nodes(role) if each in nodes.living())
        os.kill(raylet, signal.SIGKILL)
        return raylet


def karvan(*arguments):
    """Run a command; what it prints."""
    return subprocess.check_output([sys.executable, "-m", "karvan", *map(str, arguments)], text=True)


class Detached:
    """A job whose launcher has ended."""

    @property
    def run_folder(self):
        return RunFolder.of_job("chaos")

    def master(self):
        return self.run_folder.master()["pid"]

    def restarts(self):
        return karvan("logs", "chaos").count("The master was restarted")

    def wait_for_restart(self, before):
        """Wait until another process is the master."""
        wait_until(lambda: self.master() not in (before, None), "another master", 150)
        wait_until(lambda: self.restarts() > 0, "it to say so", 150)

    def finish(self):
        (self.folder / "notes" / "hurry").touch()
        wait_until(lambda: self.run_folder.outcome(), "the end", 150)
        assert self.run_folder.outcome()["code"] == 0, karvan("logs", "chaos")
        wait_until(lambda: self.left() == [], "all processes to end")

    def __exit__(self, *exception):
        if self.run_folder.outcome() is None:
            subprocess.run([sys.executable, "-m", "karvan", "stop", "chaos", "--now"], check=False)
        super().__exit__(*exception)


class DetachedJob(Detached, RayJob):
    """One that continues when all other processes are gone."""

    def __init__(self, folder, extra="", **more):
        extra += LONG
        super().__init__(folder, "sync", 1, pause=1.0, extra=extra, options=["--detach"], **more)
        assert self.process.wait(150) == 0, self.log.read_text()
        self.wait_for_step(2, 150)

    def wait_for_master(self, before):
        """Wait until another process is the master, and training continues."""
        self.wait_for_restart(before)
        self.wait_for_step(self.step() + 3, 150)

    def finish(self):
        super().finish()
        times, _ = self.records()
        np.testing.assert_array_equal(times, 1)


class ElasticRayJob(RayJob):
    """Trainers that lease their records, on Ray; how often each was trained is in their results.

    servers: if there are some, records are counted in rows as well. needs: of the nodes' resource, which each
    node has one of.
    """

    epochs = 2

    def __init__(self, folder, *, records=1800, servers=0, trainers=None, needs=0.6, env=None, **more):
        self.records_count, self.servers, self.needs = records, servers, needs
        self._trainers = trainers or {"min": 1, "max": 2, "replicas": 1}
        self._env = {"PAUSE": "0.5", "SAVE_EVERY": "1000", "ROWS": str(int(servers > 0)), **(env or {})}
        program = support_path("train/elastic_trainer.py")
        super().__init__(folder, "sync", 1, program=program, write_data=self._write, **more)

    def _write(self, folder):
        (folder / "records").write_text(str(self.records_count))
        for part in range(3):
            mine = pa.array(range(part, self.records_count, 3), pa.int64())
            pq.write_table(pa.table({"record": mine}), folder / f"{part}.parquet")

    def start(self, command):
        folders = [str(self.folder / name) for name in ("data", "checkpoints", "notes")]
        path = self.folder / "job.yaml"
        job = yaml.safe_load(path.read_text())
        job["sharding"] = "dynamic"
        job["roles"] = {
            "trainers": {**self._trainers, "threads": 1, "args": [*folders, self.epochs], "env": self._env},
            "parameter_servers": {"replicas": self.servers, "threads": 1},
        }
        path.write_text(yaml.safe_dump(job))
        return super().start(command)

    def worlds(self):
        """The last step of each living trainer, and how many trained together in it."""
        found = {}
        for path in (self.folder / "notes").glob("step-*"):
            with suppress(OSError, ValueError):
                step, world = path.read_text().split()
                if is_alive(pid := int(path.name.removeprefix("step-"))):
                    found[pid] = int(step), int(world)
        return found

    def reached(self, step, trainers):
        """Whether so many trainers train together, in this step or a later one."""
        found = list(self.worlds().values())
        return len(found) == trainers and all(at >= step and world == trainers for at, world in found)

    def wait(self, condition, seconds=150.0):
        """Wait for a condition while the job runs; nodes take Ray some seconds, more on a busy machine."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.log.read_text()
            assert self.is_running(), self.log.read_text()
            time.sleep(0.02)

    def is_running(self):
        return self.process.poll() is None

    def check_records(self):
        """Every record was trained once in every epoch."""
        found = [json.loads(path.read_text()) for path in (self.folder / "notes").glob("result-*[0-9]")]
        assert found
        for result in found:
            assert result["times"] == [float(self.epochs)] * self.records_count
            if self.servers:
                assert result["rows"] == [float(self.epochs)] * self.records_count


class DetachedElasticJob(Detached, ElasticRayJob):
    """Trainers that lease their records, whose launcher has ended."""

    def __init__(self, folder, extra="", **more):
        super().__init__(folder, extra=f"{extra}{LONG}", options=["--detach"], **more)
        assert self.process.wait(150) == 0, self.log.read_text()

    def is_running(self):
        return self.run_folder.outcome() is None
