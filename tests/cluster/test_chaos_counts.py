"""Launched jobs whose processes are killed: at the end every use has been counted once."""

import random

import numpy as np
import pyarrow.parquet as pq
import pytest
from chaos_helpers import ROWS, LaunchedJob
from support_paths import support_path

import karvan as kv


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "trainers"), [("hybrid", 1), ("hybrid", 2), ("async", 2)])
def test_uses_are_counted_once_whoever_is_killed(tmp_path, mode, trainers):
    program = support_path("cluster/counts_program.py")
    with LaunchedJob(tmp_path, mode, 8, trainers=trainers, pause=0.05, program=program) as job:
        for number in range(4):
            job.kill(("trainer", "parameter-server")[number % 2], random.randint(3, 8))
        job.finish()
        assert "Generation" in job.log.read_text()
    last = kv.Checkpoints(tmp_path / "checkpoints").latest()
    counts = {}
    for table in ("record", "once", "user"):
        rows = [np.concatenate(column) for column in zip(*last.parts(table), strict=True)]
        counts[table] = dict(zip(rows[0].tolist(), rows[3].tolist(), strict=True))
    assert counts["record"] == dict.fromkeys(range(ROWS), 1)
    assert counts["once"] == {}
    users = np.concatenate(
        [pq.read_table(path)["user"].to_numpy() for path in (tmp_path / "data").glob("*.parquet")]
    )
    assert counts["user"] == dict(
        zip(*map(np.ndarray.tolist, np.unique(users, return_counts=True)), strict=True)
    )
