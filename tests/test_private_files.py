"""What a job writes or shares besides its services: who else on the machine can read it."""

import io
import os
import stat

import pytest
import torch
from neighbour import needs_root, run_as_neighbour

import karvan as kv
from karvan import _native
from karvan.launch.merged_logs import MergedLogs

OPEN = """
try:
    os.close(os.open(sys.argv[1], os.O_RDONLY))
    print("open")
except PermissionError:
    print("no")
"""


@pytest.fixture
def _private_umask():
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_private_umask")
def test_checkpoints_and_logs_are_as_private_as_the_umask_says(tmp_path):
    engine = kv.EmbeddingEngine({"user": kv.Table(4)})
    engine({"user": torch.arange(9)})
    kv.Checkpoints(tmp_path / "run").save(1, {"step": torch.ones(1)}, engine, block=True)
    logs = MergedLogs(["trainer-0"], tmp_path / "logs", stream=io.StringIO())
    logs.write("trainer-0", "hello")
    logs.close()
    found = [
        path for folder in ("run", "logs") for path in (tmp_path / folder, *(tmp_path / folder).rglob("*"))
    ]
    assert len(found) > 5
    assert [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


@needs_root
def test_memory_that_ranks_share_is_closed_to_other_users():
    board = _native.Board(0, 2)
    process, file = board.place[:2]
    path = f"/proc/{process}/fd/{file}"
    os.close(os.open(path, os.O_RDONLY))  # a rank of the same user may
    assert run_as_neighbour(OPEN, path) == "no\n"
