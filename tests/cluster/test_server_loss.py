"""A parameter server that is lost, and takes its rows as they were saved while the others go on."""

import pytest
import torch
from slow_rows import owner_of
from worker_helpers import Cluster, Loader

import karvan as kv
from karvan.wire import PeerLostError

KEYS = torch.arange(64)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(2, 1, KARVAN_CHECKPOINTS=str(tmp_path))
    made.wait()
    yield made
    kv.connect("memory")
    made.close()


class Training:
    """Every step takes 1 from the rows of all keys."""

    def __init__(self, cluster, monkeypatch, way, folder, **options):
        monkeypatch.setenv("KARVAN_CHECKPOINTS", str(folder))
        connection = cluster.connect(monkeypatch, int(way == "worker"), **options)
        self.loader = Loader(cluster, 1, "batch").serve(connection) if way == "worker" else None
        self.engine = kv.EmbeddingEngine({"user": kv.Table(1, init=kv.init.Constant(0.0))})
        self.optimizer = kv.optim.SGD(self.engine, lr=1.0)
        self.runs = kv.Checkpoints(folder)

    def steps(self, count):
        for _ in range(count):
            batch = {"user": KEYS}
            self.engine(batch if self.loader is None else self.loader.send(batch))["user"].sum().backward()
            self.optimizer.step()
        self.engine.store.window.drain()

    def save(self, step):
        self.runs.save(step, {}, self.engine).wait()

    def values(self):
        return self.engine.table("user").vectors(KEYS)[:, 0].tolist()


def expected(of_server):
    return [of_server[owner_of(key, 2)] for key in KEYS.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["trainer", "worker"])
def test_a_lost_server_has_the_rows_that_were_saved_and_what_is_lost_is_counted(
    cluster, monkeypatch, tmp_path, way
):
    training = Training(cluster, monkeypatch, way, tmp_path, on_server_loss="reload")
    training.steps(3)
    training.save(3)
    training.steps(2)
    assert training.values() == [-5.0] * 64
    cluster.replace(1, "parameter-server")
    training.steps(2)
    store = training.engine.store
    assert training.values() == expected([-7.0, -5.0])
    assert store.lost_updates == 2
    training.save(7)
    cluster.replace(0, "parameter-server")
    training.steps(1)
    assert training.values() == expected([-8.0, -6.0])
    assert store.lost_updates == 2  # all of the first server's were saved


@pytest.mark.slow
@pytest.mark.parametrize("way", ["trainer", "worker"])
def test_without_being_asked_for_a_lost_server_is_an_error(cluster, monkeypatch, tmp_path, way):
    training = Training(cluster, monkeypatch, way, tmp_path)
    training.steps(1)
    cluster.replace(1, "parameter-server")
    with pytest.raises((PeerLostError, RuntimeError), match="parameter server 1 has restarted"):
        training.steps(2)
