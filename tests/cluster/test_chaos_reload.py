"""Servers that are killed inside saves while the job goes on: nothing twice, and what is lost is counted."""

import json
import os
import random
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos_helpers import LaunchedJob, mutual_tls
from slow_rows import owner_of
from support_paths import support_path

import karvan as kv

BATCHES, SIZE = 120, 16  # whole ones, so that every training of a record counts the same
RECORDS = BATCHES * SIZE
SERVER = "parameter-server"


class Job(LaunchedJob):
    """Each record's label is its id, which the program notes."""

    def __init__(self, folder, trainers=1, workers=0, extra=""):
        super().__init__(
            folder,
            "hybrid",
            4,
            trainers=trainers,
            loaders=min(workers, 1),
            workers=workers,
            pause=0.1,
            extra=f"on_server_loss: reload\n{extra}",
            program=support_path("cluster/reload_program.py"),
            write_data=_write_records,
        )

    def kill_in_save(self, delay):
        """Kill a server some seconds after a save has begun."""
        until = time.monotonic() + 120
        saved = self.folder / "checkpoints"
        while not (list(saved.glob(".step-*.tmp-*")) and len(pids := self.pids(SERVER)) == 2):
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(victim := random.choice(pids), signal.SIGKILL)
        step = self.step()
        while len(pids := self.pids(SERVER)) < 2 or victim in pids or self.step() <= step + 1:
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)


def _write_records(folder):
    for part, ids in enumerate(np.array_split(np.arange(RECORDS), 4)):
        columns = {"record": ids, "label": ids.astype(np.float32)}
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainers", "workers", "tls"), [(1, 0, False), (2, 0, False), (2, 2, False), (2, 1, True)]
)
def test_servers_that_are_killed_inside_saves(tmp_path, trainers, workers, tls):
    extra = mutual_tls(tmp_path) if tls else ""
    kills = 4
    with Job(tmp_path, trainers, workers, extra) as job:
        for _ in range(kills):
            if job.step() > BATCHES // trainers - 15:
                break
            job.kill_in_save(random.choice([0, random.uniform(0, 0.05)]))
        job.finish()
        log = job.log.read_text()
    assert "Generation" not in log, log
    assert "with the rows of step" in log or "without rows" in log, log

    newest = kv.Checkpoints(tmp_path / "checkpoints").latest()
    assert newest.verify() == []
    rows = [np.concatenate(column) for column in zip(*newest.parts("record"), strict=True)]
    trained = np.zeros(RECORDS)
    trained[rows[0]] = rows[1][:, 0]
    np.testing.assert_array_equal(trained, trained.astype(bool))  # none twice

    batches = []
    for rank in range(trainers):
        lines = (tmp_path / "notes" / f"batches-{rank}").read_text().splitlines()
        batches += [json.loads(line) for line in lines]
    assert sorted(record for batch in batches for record in batch) == list(range(RECORDS))
    lost = 0
    for batch in batches:
        for server in range(2):
            of_server = {trained[record] for record in batch if owner_of(record, 2) == server}
            assert len(of_server) == 1, (batch, server)  # an update is whole, or lost
            lost += of_server == {0.0}
    said = [(tmp_path / "notes" / f"done-{rank}").read_text().split() for rank in range(trainers)]
    assert [int(number) for _, number in said] == [lost] * trainers, log
