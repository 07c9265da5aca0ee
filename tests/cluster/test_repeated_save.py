"""A parameter server that dies inside a save: the checkpoint is right, or there is none."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_rows import owner_of
from worker_helpers import Cluster

import karvan as kv
from karvan.store.remote.store import RemoteStore

KEYS = torch.arange(64)
SERVER = "parameter-server"


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "saved").mkdir()
    made = Cluster(2, 0, KARVAN_CHECKPOINTS=str(tmp_path / "saved"))
    made.wait()
    yield made
    kv.connect("memory")
    made.close()


class Training:
    """Every step takes 1 from the rows of all keys, and uses each key once."""

    def __init__(self, cluster, monkeypatch, folder, **options):
        monkeypatch.setenv("KARVAN_CHECKPOINTS", str(folder))
        cluster.connect(monkeypatch, 0, on_server_loss="reload")
        self.engine = kv.EmbeddingEngine({"user": kv.Table(1, init=kv.init.Constant(0.0))})
        self.optimizer = kv.optim.SGD(self.engine, lr=1.0)
        self.runs = kv.Checkpoints(folder, **options)

    def steps(self, count):
        for _ in range(count):
            self.engine({"user": KEYS})["user"].sum().backward()
            self.optimizer.step()
        self.engine.store.window.drain()

    def save(self, step):
        return self.runs.save(step, {}, self.engine).wait()


def expected(of_server):
    return [of_server[owner_of(key, 2)] for key in KEYS.tolist()]


def rows_of(checkpoint):
    """The values and use counts of all keys."""
    assert checkpoint.verify() == []
    rows = [np.concatenate(column) for column in zip(*checkpoint.parts("user"), strict=True)]
    order = rows[0].argsort()
    assert rows[0][order].tolist() == KEYS.tolist()
    return rows[1][order][:, 0].tolist(), rows[3][order].tolist()


def inside_save(monkeypatch, before=None, after=None):
    """Do something in the next save, after the capture: before servers write, or once they have."""
    original = RemoteStore.save_tables
    pending = [True]

    def save_tables(self, capture, folder, tables, waiting, **options):
        first, pending[:] = bool(pending), []
        if first and before is not None:
            before(folder)
        made = original(self, capture, folder, tables, waiting, **options)
        if first and after is not None:
            after(folder)
        return made

    monkeypatch.setattr(RemoteStore, "save_tables", save_tables)


def leave_partial_files(folder):
    """What a server leaves that is killed while it writes."""
    place = Path(folder) / "tables" / "user"
    place.mkdir(parents=True, exist_ok=True)
    (place / "rank-00001-part-00000-of-00001.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")


@pytest.mark.parametrize(
    "partial", [pytest.param(False, marks=pytest.mark.slow), True], ids=["before writing", "while writing"]
)
def test_a_server_that_dies_in_a_save_writes_its_rows_of_the_checkpoint_before(
    cluster, monkeypatch, tmp_path, partial
):
    training = Training(cluster, monkeypatch, tmp_path / "saved")
    training.steps(3)
    training.save(3)
    training.steps(2)

    def die(folder):
        if partial:
            leave_partial_files(folder)
        cluster.replace(1, SERVER)
        training.steps(1)  # which the checkpoint of step 5 must not have

    inside_save(monkeypatch, before=die)
    saved = training.save(5)
    assert rows_of(saved) == (expected([-5.0, -3.0]), expected([5, 3]))
    named = {entry.name for entry in saved.manifest.files}
    written = {str(path.relative_to(saved.path)) for path in saved.path.rglob("*.safetensors")}
    assert written == named  # nothing of the server that died stays
    assert training.engine.store.lost_updates == 2
    training.steps(1)
    assert rows_of(training.save(7)) == (expected([-7.0, -5.0]), expected([7, 5]))
    assert training.engine.store.lost_updates == 2


@pytest.mark.slow
def test_a_server_that_dies_when_it_has_written_leaves_a_whole_checkpoint(cluster, monkeypatch, tmp_path):
    training = Training(cluster, monkeypatch, tmp_path / "saved")
    training.steps(3)
    training.save(3)
    training.steps(2)

    def die(folder):
        cluster.replace(1, SERVER)
        training.steps(1)

    inside_save(monkeypatch, after=die)
    saved = training.save(5)
    assert rows_of(saved) == ([-5.0] * 64, [5] * 64)
    # The server restarted from step 3, before step 5 was published; 4 and 5 are lost to training.
    assert training.engine.store.lost_updates == 2
    cluster.replace(1, SERVER)  # from step 5, which has them; 6 is lost instead
    training.steps(1)
    assert rows_of(training.save(7)) == (expected([-7.0, -6.0]), expected([7, 6]))
    assert training.engine.store.lost_updates == 1


@pytest.mark.slow
def test_a_server_that_dies_in_the_save_of_a_delta(cluster, monkeypatch, tmp_path):
    training = Training(cluster, monkeypatch, tmp_path / "saved", full_every=10)
    training.steps(3)
    training.save(3)
    training.steps(1)
    assert training.save(4).kind == "delta"
    training.steps(1)
    inside_save(monkeypatch, before=lambda folder: cluster.replace(1, SERVER))
    saved = training.save(5)
    assert saved.kind == "delta"
    assert rows_of(saved) == (expected([-5.0, -4.0]), expected([5, 4]))
    training.steps(1)
    saved = training.save(6)  # the new server does not know what changed: a full one
    assert saved.kind == "full"
    assert rows_of(saved) == (expected([-6.0, -5.0]), expected([6, 5]))
    training.steps(1)
    assert training.save(7).kind == "delta"
    assert training.engine.store.lost_updates == 1


@pytest.mark.slow
def test_a_server_that_dies_before_the_first_save(cluster, monkeypatch, tmp_path):
    training = Training(cluster, monkeypatch, tmp_path / "saved")
    training.steps(2)
    cluster.replace(1, SERVER)
    saved = training.save(2)  # the first call that the new server gets
    values = {
        int(key): value
        for rows in saved.parts("user")
        for key, value in zip(rows.keys, rows.vectors[:, 0].tolist(), strict=True)
    }
    assert values == {key: -2.0 for key in KEYS.tolist() if owner_of(key, 2) == 0}
    assert training.engine.store.lost_updates == 2


@pytest.mark.slow
def test_the_manifest_says_what_each_server_has_of_a_run(cluster, monkeypatch, tmp_path):
    training = Training(cluster, monkeypatch, tmp_path / "saved")
    training.steps(3)
    saved = training.save(3)
    content = json.loads((saved.path / "manifest.json").read_text())
    counted = [share["trainers"] for share in content["tables"]["user"]["updates"]]
    assert counted == [{"0": 3}, {"0": 3}]
