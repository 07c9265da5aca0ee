"""Parameter servers write below the job's checkpoint folder, and nowhere else."""

import json
import sys
from contextlib import contextmanager
from subprocess import PIPE

import numpy as np
import pytest
import torch
from cluster_helpers import serving
from forked_programs import ForkedProgram
from neighbour import needs_root, run_as_neighbour

import karvan as kv
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.store.messages import spec_to_json
from karvan.wire import Client, Server

HELLO = {
    "trainer": 0,
    "trainers": 1,
    "run": "a",
    "generation": 0,
    "staleness": 1,
    "grad_reduce": "mean",
    "server": 0,
    "servers": 1,
}
CAPTURED = {"tables": ["t"], "parts": {"t": 1}, "store": 0, "used": []}
SAVE = {
    "capture": 1,
    "store": 0,
    "writers": 1,
    "tables": {"t": {"optimizer": None, "parts": 1, "delta": False, "base": None}},
}


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "job" / "checkpoints"
    made.mkdir(parents=True)
    return made


@contextmanager
def connected(root):
    """A trainer's peer of a server with this folder, which holds a table with one row."""
    with Server(ParameterServer(checkpoints=root)) as server:
        peer = Client("server", server.address, hello=HELLO)
        peer.call("add_table", {"spec": spec_to_json(kv.Table(2).spec("t", 0, 32))})
        peer.call(
            "lookup",
            {"tables": ["t"], "training": True, "step": 1, "now": 0.0},
            [np.array([3], np.int64), np.array([1], np.uint32)],
        )
        peer.call(
            "capture",
            {
                "capture": 1,
                "tables": ["t"],
                "parts": {"t": 1},
                "since": None,
                "track": False,
                "store": 0,
                "used": [],
            },
        )
        yield peer
        peer.close()


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_server_saves_below_its_folder(root):
    (root / ".step.tmp").mkdir()
    with connected(root) as peer:
        peer.call("save", {**SAVE, "folder": str(root / ".step.tmp")})
    assert len(files(root / ".step.tmp")) == 1


@pytest.mark.parametrize("how", ["elsewhere", "dots", "link", "link inside", "link of a table", "itself"])
def test_a_server_writes_nowhere_else(root, tmp_path, how):
    other = tmp_path / "other"
    (other / "tables").mkdir(parents=True)
    (root / "step").mkdir()
    match how:
        case "elsewhere":
            folder = other
        case "dots":
            folder = root / ".." / ".." / "other"
        case "link":
            folder = root / "link"
            folder.symlink_to(other)
        case "link inside":
            folder = root / "step"
            (folder / "tables").symlink_to(other / "tables")
        case "link of a table":
            folder = root / "step"
            (folder / "tables").mkdir()
            (folder / "tables" / "t").symlink_to(other)
        case "itself":
            folder = root
    with connected(root) as peer, pytest.raises(ValueError, match=r"below .*checkpoints, the job's .*, got "):
        peer.call("save", {**SAVE, "folder": str(folder)})
    assert files(tmp_path) == []


def test_a_folder_whose_name_begins_alike_is_elsewhere(root):
    alike = root.with_name("checkpoints-of-another")
    alike.mkdir()
    with connected(root) as peer, pytest.raises(ValueError, match="below"):
        peer.call("save", {**SAVE, "folder": str(alike)})


def test_a_folder_that_is_a_link_itself_is_the_place_that_it_leads_to(root, tmp_path):
    (tmp_path / "run").symlink_to(root)
    (root / "step").mkdir()
    with connected(tmp_path / "run") as peer:
        peer.call("save", {**SAVE, "folder": str(tmp_path / "run" / "step")})
    assert len(files(root / "step")) == 1


def test_a_server_without_a_folder_names_the_setting_that_is_missing(tmp_path):
    with connected(None) as peer, pytest.raises(ValueError, match=r"`checkpoints` of the job.*--checkpoints"):
        peer.call("save", {**SAVE, "folder": str(tmp_path)})
    assert files(tmp_path) == []


def test_a_lost_server_takes_its_rows_from_the_jobs_folder_alone(root, tmp_path):
    with connected(root) as peer, pytest.raises(ValueError, match="job's checkpoint folder"):
        peer.call("restore", {"tables": {}, "folder": str(tmp_path)})


def trainer_of(folder):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = kv.EmbeddingEngine({"user": kv.Table(4)})
            self.top = torch.nn.Linear(4, 1)

        def forward(self, batch):
            return self.top(self.embedding(batch)["user"]).squeeze(-1)

    model = Net()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = kv.losses.BinaryCrossEntropy(label="label")
    return kv.Trainer(
        model, loss, dense_optimizer=dense, sparse_optimizer=kv.optim.SGD(lr=0.1), checkpoints=folder
    )


@pytest.mark.parametrize("setting", ["another folder", "none"])
def test_a_trainer_that_could_not_save_fails_before_training_begins(root, tmp_path, setting):
    seen = []

    def batches():
        seen.append(1)
        yield {"user": torch.arange(4), "label": torch.ones(4)}

    said = "checkpoint folder, got .*elsewhere" if setting == "another folder" else "--checkpoints"
    with serving(2, root if setting == "another folder" else None) as addresses:
        kv.connect("remote", servers=addresses)
        trainer = trainer_of(tmp_path / "elsewhere")
        with pytest.raises(kv.checkpoint.CheckpointError, match=f"parameter server 0 .*{said}"):
            trainer.fit(batches())
    assert seen == []
    with serving(2, root) as addresses:
        kv.connect("remote", servers=addresses)
        assert trainer_of(root / "run").fit([{"user": torch.arange(4), "label": torch.ones(4)}]).checkpoint


def test_a_checkpoint_of_another_run_can_be_loaded(root, tmp_path):
    with serving(1, root) as addresses:
        kv.connect("remote", servers=addresses)
        engine = kv.EmbeddingEngine({"user": kv.Table(4)})
        engine({"user": torch.arange(9)})
        saved = kv.Checkpoints(root).save(1, {}, engine).wait().path
    saved = saved.rename(tmp_path / saved.name)
    with serving(1, root) as addresses:
        kv.connect("remote", servers=addresses)
        engine = kv.EmbeddingEngine({"user": kv.Table(4)})
        kv.checkpoint.find(saved).load(engine)
        assert engine.table("user").rows == 9


SAVE_ELSEWHERE = """
import json
peer = Client("server", sys.argv[1], hello=json.loads(sys.argv[2]))
spec, save = json.loads(sys.argv[3]), json.loads(sys.argv[4])
try:
    peer.call("add_table", {"spec": spec}, deadline=60)
    of = {"tables": ["t"], "parts": {"t": 1}, "store": 0, "used": []}
    peer.call("capture", {"capture": 1, "since": None, "track": False, **of})
    peer.call("save", save)
    print("saved")
except (RefusedError, ValueError) as error:
    print("refused:", error)
"""


@needs_root
def test_another_user_cannot_have_a_server_write_into_folders_of_root(tmp_path):
    """Even if it was started by hand, without a token."""
    secret = tmp_path / "of-root"
    secret.mkdir(0o700)
    command = [
        sys.executable,
        "-m",
        "karvan",
        "role",
        "parameter-server",
        "--checkpoints",
        str(tmp_path / "run"),
    ]
    with ForkedProgram(command, stderr=PIPE) as process:
        try:
            address = next(line for line in process.stderr if " at 127.0.0.1:" in line).split()[-1]
            spec = spec_to_json(kv.Table(2).spec("t", 0, 32))
            given = [HELLO, spec, {**SAVE, "folder": str(secret)}]
            said = run_as_neighbour(SAVE_ELSEWHERE, address, *map(json.dumps, given))
            assert f"expected a folder below {tmp_path / 'run'}" in said
        finally:
            process.terminate()
    assert files(secret) == []
