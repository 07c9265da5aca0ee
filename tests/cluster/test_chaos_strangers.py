"""A hostile neighbour beside a running job: another user of the machine, who attacks all of its ports."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch.distributed as dist
from chaos_helpers import LaunchedJob, mutual_tls
from neighbour import needs_root
from port_helpers import listening
from processes import family_of
from support_paths import support_path

pytestmark = [pytest.mark.slow, needs_root]


class Stranger:
    """A process of another user that attacks ports until `end`."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, support_path("cluster/stranger_program.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},
        )
        assert self._process.stdout.readline() == "ready\n"

    def attack(self, ports):
        """These ports, "host:port", from now on."""
        self._process.stdin.write(json.dumps(ports) + "\n")
        self._process.stdin.flush()

    def wait_for_rounds(self, rounds):
        """Wait until it has attacked all ports that often."""
        for _ in range(rounds):
            assert self._process.stdout.readline().startswith("round")

    def end(self):
        """What it achieved."""
        self._process.stdin.close()
        lines = self._process.stdout.read().splitlines()
        assert self._process.wait(60) == 0
        return json.loads(lines[-1])

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def ports_of(job):
    found = {each for pid in family_of(job.process.pid) for each in listening(pid)}
    return [f"unix:{each.host}" if each.kind == "unix" else f"{each.host}:{each.port}" for each in found]


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("security", ["token", "mutual TLS"])
def test_a_hostile_neighbour_does_not_disturb_a_job(tmp_path, security):
    extra = mutual_tls(tmp_path) if security == "mutual TLS" else ""
    with (
        Stranger() as stranger,
        LaunchedJob(tmp_path, "sync", 1, trainers=2, loaders=1, workers=1, pause=3.0, extra=extra) as job,
    ):
        until = time.monotonic() + 120
        while not job.step():
            assert job.process.poll() is None, job.log.read_text()
            assert time.monotonic() < until, job.log.read_text()
            time.sleep(0.05)
        trainers = job.pids("trainer")
        before = [descriptors(pid) for pid in trainers]
        gloo = {each.port for pid in trainers for each in listening(pid)}
        assert gloo
        stranger.attack(ports_of(job))
        stranger.wait_for_rounds(2)
        assert job.pids("trainer") == trainers, job.log.read_text()
        after = [descriptors(pid) for pid in trainers]
        job.finish()
        achieved = stranger.end()
        log = job.log.read_text()
        assert not {"answered", "set", "torch store", "torch store set"} & set(achieved), achieved
        ports = {each.rpartition(":")[2] for each in achieved}
        assert not ports & set(map(str, gloo)), achieved
        assert security == "mutual TLS" or not achieved, achieved  # not even a connection
        assert max(map(int.__sub__, after, before)) < 20, (before, after)  # files of batches come and go
        assert "Generation" not in log, log
        np.testing.assert_array_equal(job.records()[1], 1)


def test_the_stranger_does_overwrite_and_fill_a_store_of_torchs_own():
    """So that what it does not achieve beside a job is not for want of trying."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("karvan/hello/0", "of rank 0")
    with Stranger() as stranger:
        stranger.attack([f"127.0.0.1:{store.port}"])
        stranger.wait_for_rounds(1)
        achieved = stranger.end()
    assert achieved["torch store set"]
    assert store.get("karvan/hello/0") == b"overwritten"
    assert store.num_keys() >= 50
