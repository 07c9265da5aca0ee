"""Launched jobs for chaos tests: `karvan launch` in a process, whose roles are killed and paused."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import trustme
from forked_programs import ForkedProgram
from support_paths import support_path

import karvan as kv

PROGRAM = support_path("cluster/chaos_program.py")
ROWS = 2001


class LaunchedJob:
    """`karvan launch` in a process, with data of which every record has an id."""

    def __init__(
        self,
        folder,
        mode,
        staleness,
        trainers=1,
        loaders=0,
        workers=0,
        pause=0.02,
        extra="",
        program=PROGRAM,
        write_data=None,
        rows=ROWS,
    ):
        self.folder = folder
        self.rows = rows
        for name in ("data", "notes"):
            (folder / name).mkdir()
        write_data = write_data or partial(_write_data, rows=rows)
        write_data(folder / "data")
        arguments = [str(folder / "data"), str(folder / "notes"), str(pause)]
        (folder / "job.yaml").write_text(
            f"name: chaos\nentry: {program}\nmode: {mode}\nstaleness: {staleness}\n"
            f"checkpoints: {folder / 'checkpoints'}\nmax_restarts: 1000\nrestart_window: 1\n"
            f"roles:\n  trainers: {{replicas: {trainers}, args: {arguments}, threads: 1}}\n"
            f"  parameter_servers: {{replicas: 2, threads: 1}}\n"
            f"  embedding_workers: {{replicas: {workers}, threads: 1}}\n  loaders: {loaders}\n"
            f"data: {{train: {folder / 'data'}/*.parquet, batch_size: 16, shuffle: 64, seed: 3}}\n{extra}"
        )
        self.log = folder / "log"
        self._begun = time.monotonic()
        self.process = self.start([sys.executable, "-m", "karvan", "launch", str(folder / "job.yaml")])

    def start(self, command, **environment):
        """Start the launcher."""
        env = {**os.environ, **environment}
        return ForkedProgram(command, stdout=self.log.open("wb"), stderr=subprocess.STDOUT, env=env)

    def age(self):
        """Seconds since its start."""
        return time.monotonic() - self._begun

    def step(self):
        """How far the first trainer is; 0 if it has not begun."""
        with suppress(OSError, ValueError):
            pid, step = (self.folder / "notes" / "step-0").read_text().split()
            if Path(f"/proc/{pid}").exists():
                return int(step)
        return 0

    def wait_for_step(self, step, seconds=60.0):
        """Wait until the first trainer is so far."""
        until = time.monotonic() + seconds
        while self.step() < step:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)

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
        self.kill_together([role], after, how)

    def kill_together(self, roles, after, how=signal.SIGKILL):
        """Send a signal to one of each role at the same moment, once training has gone on for some steps."""
        begun = None
        until = time.monotonic() + 150  # a busy machine takes a while to start all roles
        while time.monotonic() < until:
            step = self.step()
            begun = step if begun is None or step < begun else begun
            if step and step >= begun + after and all(pids := [self.pids(role) for role in roles]):
                with suppress(ProcessLookupError):  # one that has just ended is not the one to disturb
                    for each in pids:
                        os.kill(random.choice(each), how)
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
        times, looked_up = np.zeros(self.rows), np.zeros(self.rows)
        times[rows[0]], looked_up[rows[0]] = rows[1][:, 0], rows[3]
        return times, looked_up

    def wait_for_line(self, text, seconds=60.0):
        """Wait until the log has this text, while the job runs."""
        until = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert time.monotonic() < until, f"no {text!r} in:\n{self.log.read_text()}"
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()


def _write_data(folder, rows):
    draw = np.random.default_rng(0)
    for part, ids in enumerate(np.array_split(np.arange(rows), 4)):
        columns = {
            "record": ids,
            "user": draw.integers(0, 50, len(ids)),
            "label": draw.integers(0, 2, len(ids)).astype(np.float32),
        }
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")


def mutual_tls(folder, host="127.0.0.1", *others):
    """Lines of a job.yaml with a token and certificates for every role, whose files are in the folder.

    others: hosts besides, at which roles listen.
    """
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", host, *others, socket.getfqdn())
    (folder / "cert").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    (folder / "key").write_bytes(issued.private_key_pem.bytes())
    (folder / "ca").write_bytes(authority.cert_pem.bytes())
    (folder / "token").write_text("secret" * 6)
    (folder / "token").chmod(0o600)
    files = ", ".join(f"{name}: {folder / name}" for name in ("cert", "key", "ca"))
    return f"host: {host}\ntoken_file: {folder / 'token'}\ntls: {{{files}, mutual: true}}\n"
