"""Launched jobs whose processes are killed: the final model has every record once."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trustme

import karvan as kv

HERE = Path(__file__).parent
ROWS = 2001


class LaunchedJob:
    """`karvan launch` in a process, with data of which every record has an id."""

    def __init__(self, folder, mode, staleness, trainers=1, loaders=0, workers=0, pause=0.02, extra=""):
        self.folder = folder
        for name in ("data", "notes"):
            (folder / name).mkdir()
        draw = np.random.default_rng(0)
        for part, ids in enumerate(np.array_split(np.arange(ROWS), 4)):
            columns = {
                "record": ids,
                "user": draw.integers(0, 50, len(ids)),
                "label": draw.integers(0, 2, len(ids)).astype(np.float32),
            }
            pq.write_table(pa.table(columns), folder / "data" / f"{part}.parquet")
        arguments = [str(folder / "data"), str(folder / "notes"), str(pause)]
        (folder / "job.yaml").write_text(
            f"name: chaos\nentry: {HERE / 'chaos_program.py'}\nmode: {mode}\nstaleness: {staleness}\n"
            f"checkpoints: {folder / 'checkpoints'}\nmax_restarts: 1000\nrestart_window: 1\n"
            f"roles:\n  trainers: {{replicas: {trainers}, args: {arguments}, threads: 1}}\n"
            f"  parameter_servers: {{replicas: 2, threads: 1}}\n"
            f"  embedding_workers: {{replicas: {workers}, threads: 1}}\n  loaders: {loaders}\n"
            f"data: {{train: {folder / 'data'}/*.parquet, batch_size: 16, shuffle: 64, seed: 3}}\n{extra}"
        )
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "karvan", "launch", str(folder / "job.yaml")],
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
        )

    def step(self):
        """How far the first trainer is; 0 if it has not begun."""
        with suppress(OSError, ValueError):
            pid, step = (self.folder / "notes" / "step-0").read_text().split()
            if Path(f"/proc/{pid}").exists():
                return int(step)
        return 0

    def pids(self, role):
        """The processes of a role."""
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                values = place.read_bytes().split(b"\0")
                checkpoints = f"KARVAN_CHECKPOINTS={self.folder / 'checkpoints'}".encode()
                if f"KARVAN_ROLE={role}".encode() in values and checkpoints in values:
                    found.append(int(place.parent.name))
        return found

    def kill(self, role, after, how=signal.SIGKILL):
        """Send a signal to one of a role once training has gone on for some steps."""
        begun = None
        until = time.monotonic() + 60
        while time.monotonic() < until:
            step = self.step()
            begun = step if begun is None or step < begun else begun
            if step and step >= begun + after and (pids := self.pids(role)):
                os.kill(random.choice(pids), how)
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)
        raise TimeoutError(self.log.read_text())

    def finish(self):
        """Let it run to its end."""
        (self.folder / "notes" / "hurry").touch()
        assert self.process.wait(120) == 0, self.log.read_text()

    def records(self):
        """For each record what its row has gathered, and how often it was looked up."""
        last = kv.Checkpoints(self.folder / "checkpoints").latest()
        rows = [np.concatenate(column) for column in zip(*last.parts("record"), strict=True)]
        times, looked_up = np.zeros(ROWS), np.zeros(ROWS)
        times[rows[0]], looked_up[rows[0]] = rows[1][:, 0], rows[3]
        return times, looked_up

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()


def test_a_job_outlives_the_death_of_each_role(tmp_path):
    with LaunchedJob(tmp_path, "hybrid", 4, loaders=1, workers=1) as job:
        for role in ("loader", "embedding-worker", "parameter-server", "trainer"):
            job.kill(role, 6)
        job.finish()
        times, _ = job.records()
        np.testing.assert_array_equal(times, 1)
        assert "begins" in job.log.read_text()
        most = int((tmp_path / "notes" / "done-0").read_text().split()[1])
        assert most <= 4


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_all_roles_with_a_token_and_mutual_tls(tmp_path, host):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", socket.getfqdn())
    (tmp_path / "cert").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    (tmp_path / "key").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "ca").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "token").write_text("secret")
    files = ", ".join(f"{name}: {tmp_path / name}" for name in ("cert", "key", "ca"))
    secured = f"host: {host}\ntoken_file: {tmp_path / 'token'}\ntls: {{{files}, mutual: true}}\n"
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
        assert "begins anew with the rows of step" in log, log
        assert "Generation" not in log, log
        steps, _, lost = map(int, (tmp_path / "notes" / "done-0").read_text().split())
        assert steps == -(-ROWS // 16)
        assert set(times.tolist()) <= {0.0, 1.0}
        assert lost or times.all()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["parameter-server", "trainer", "loader", "embedding-worker"])
def test_a_role_is_killed_twenty_times(tmp_path, role):
    with LaunchedJob(tmp_path, "hybrid", 4, loaders=2, workers=1) as job:
        for _ in range(20):
            job.kill(role, random.randint(1, 6))
            time.sleep(random.uniform(0, 0.3))
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)
        if role in ("loader", "embedding-worker"):  # which are replaced, while the others go on
            assert "Generation" not in job.log.read_text()


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
        until = time.monotonic() + 180
        while "does not answer any more" not in job.log.read_text():
            assert time.monotonic() < until, job.log.read_text()
            assert job.process.poll() is None, job.log.read_text()
            time.sleep(0.1)
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)
