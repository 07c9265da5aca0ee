"""Checkpoints of a RecIS program that ran on one number of ranks, on another: rows, slots and data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recis_clicks import RECORDS

PROGRAM = Path(__file__).parents[1] / "programs" / "recis_ranks.py"


def _run(folder, files, ranks, name, steps):
    """What each rank has written."""
    words = ["-m", "karvan", "run", "--as", "recis", str(PROGRAM), name, str(steps)]
    start = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv-backend=c10d"]
    done = subprocess.run(
        [sys.executable, *start, "--rdzv-endpoint=127.0.0.1:0", *words],
        cwd=folder,
        env={**os.environ, "CLICKS": str(files), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def _joined(parts):
    """The rows of all ranks; an id on two of them is an error."""
    joined = {}
    for part in parts:
        for table, rows in part.items():
            both = joined.setdefault(table, {})
            assert not set(rows) & set(both)
            both.update(rows)
    return joined


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_rows_slots_and_the_position_survive_another_number_of_ranks(tmp_path, files, before, after):
    first = _run(tmp_path, files, before, "first", steps=2)
    saved = _joined(rank["trained"] for rank in first)
    assert all(rank["trained"]["user"] for rank in first)  # every rank has some
    assert len(saved["user"]) == before * 2 * 4
    assert all(any(slots) for _, slots in saved["user"].values())  # moments of Adam
    second = _run(tmp_path, files, after, "second", steps=0)
    assert _joined(rank["loaded"] for rank in second) == saved
    users = [user for rank in (*first, *second) for user in rank["users"]]
    assert sorted(users) == list(range(RECORDS))  # each record once, over both runs
    assert len(_joined(rank["trained"] for rank in second)["user"]) == RECORDS
