"""Trainers on parameter servers: checkpoints that servers write, and what becomes of a fit that goes on."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from cluster_helpers import Processes, serving
from torch.nn import functional as F

import karvan as kv
from karvan import distributed
from karvan.checkpoint import Checkpoint
from karvan.discovery.registry import Registry
from karvan.train.loggers import JSONLinesLogger
from karvan.wire import PeerLostError, RefusedError


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(dim=4, admit=kv.admission.MinCount(2)), "item": kv.Table(dim=4)}, seed=2
        )
        self.out = torch.nn.Linear(8, 1)

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.out(torch.cat([vectors["user"], vectors["item"]], 1)).squeeze(1)


def batches(count=12, rows=16):
    random = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        user = torch.randint(0, 60, (rows,), generator=random)
        item = torch.randint(0, 20, (rows,), generator=random)
        made.append({"user": user, "item": item, "label": ((user + item) % 2).float()})
    return made


def loss(output, batch):
    return F.binary_cross_entropy_with_logits(output, batch["label"])


def trainer_of(folder, **options):
    return kv.Trainer(
        Net(),
        loss,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        sparse_optimizer=kv.optim.Adam(lr=0.05),
        progress="none",
        checkpoints=folder,
        checkpoint_seconds=None,
        **options,
    )


def content(path):
    """All that a checkpoint has, however it is cut."""
    checkpoint = Checkpoint(path)
    tables = {
        name: [np.concatenate(column) for column in zip(*checkpoint.parts(name), strict=True)]
        for name in checkpoint.manifest.tables
    }
    return tables, checkpoint.state()


def assert_same_checkpoint(one, other):
    (tables, state), (expected_tables, expected_state) = content(one), content(other)
    for name, columns in expected_tables.items():
        for received, expected in zip(tables[name], columns, strict=True):
            np.testing.assert_array_equal(received, expected)
    for name, tensor in expected_state["model"].items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(state["model"][name], tensor)


def fit(folder, steps, **options):
    trainer = trainer_of(folder, **options)
    trainer.fit(batches(), epochs=2, max_steps=steps)
    return trainer


def test_a_fit_moves_between_memory_and_any_number_of_servers(tmp_path):
    fit(tmp_path / "straight", 18)
    for servers, steps in ((2, 5), (0, 9), (3, 14), (1, 18)):
        if servers:
            with serving(servers) as addresses:
                distributed.connect("remote", servers=addresses)
                fit(tmp_path / "moved", steps)
        else:
            fit(tmp_path / "moved", steps)
    last = "step-000000000018"
    assert_same_checkpoint(tmp_path / "moved" / last, tmp_path / "straight" / last)


def test_every_server_writes_its_own_files(tmp_path):
    with serving(3) as addresses:
        distributed.connect("remote", servers=addresses)
        fit(tmp_path, 4)
    entry = Checkpoint(tmp_path / "step-000000000004").manifest.tables["user"]
    assert len(entry.parts) >= 3
    assert len({part.name for part in entry.parts}) == len(entry.parts)
    assert Checkpoint(tmp_path / "step-000000000004").verify() == []


def test_deltas_have_what_changed_on_the_servers(tmp_path):
    def run(folder):
        checkpoints = kv.Checkpoints(folder, full_every=3)
        trainer = trainer_of(checkpoints, checkpoint_every=2)
        trainer.fit(batches(), max_steps=8)

    run(tmp_path / "memory")
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses)
        run(tmp_path / "remote")
    kinds = []
    for step in (2, 4, 6, 8):
        name = f"step-{step:012d}"
        if not (tmp_path / "memory" / name).exists():
            continue
        kinds.append(Checkpoint(tmp_path / "remote" / name).kind)
        assert kinds[-1] == Checkpoint(tmp_path / "memory" / name).kind
        assert_same_checkpoint(tmp_path / "remote" / name, tmp_path / "memory" / name)
    assert "delta" in kinds


def test_a_save_goes_on_beside_training(tmp_path):
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=4)
        trainer = trainer_of(tmp_path, checkpoint_every=1)
        result = trainer.fit(batches(), epochs=3)
        assert result.step == 36
    assert Checkpoint(result.checkpoint).verify() == []


def test_a_newer_generation_begins_with_empty_tables(monkeypatch):
    with closing(Registry()) as registry, serving(2, registry=registry.address) as addresses:
        distributed.connect("remote", servers=addresses)
        old = kv.EmbeddingEngine({"user": kv.Table(4)})
        old({"user": torch.arange(9)})
        assert old.table("user").rows == 9
        connection = (
            distributed.connection._current
        )  # its peers live on, like those of a process that was cut off
        distributed.connection._current = distributed.Connection()
        registry.begin_generation(1)
        monkeypatch.setenv("KARVAN_GENERATION", "1")
        distributed.connect("remote", servers=addresses)
        new = kv.EmbeddingEngine({"user": kv.Table(4)})
        assert new.table("user").rows == 0
        with pytest.raises(RefusedError, match="older"):
            old({"user": torch.arange(3)})
        connection.close()


def test_a_server_that_was_killed_is_named(monkeypatch):
    with Processes(2) as cluster:
        for name, value in cluster.environment().items():
            monkeypatch.setenv(name, value)
        distributed.connect("remote", timeout=120)
        engine = kv.EmbeddingEngine({"user": kv.Table(4)})
        sparse = kv.optim.SGD(engine, lr=0.1)
        engine({"user": torch.arange(50)})["user"].sum().backward()
        sparse.step()
        cluster.kill(1)
        cluster.wait()
        with pytest.raises(PeerLostError, match="parameter server 1 has restarted"):
            engine({"user": torch.arange(50)})


def reported(folder, **options):
    """What training reports about staleness, of every second step."""
    log = folder / "log.jsonl"
    trainer_of(folder / "run", loggers=[JSONLinesLogger(log)], log_every=2, **options).fit(batches())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{name: value for name, value in line.items() if "staleness" in name} for line in lines]


def test_the_staleness_that_was_observed_is_reported(tmp_path):
    for name in ("memory", "sync", "hybrid", "async"):
        (tmp_path / name).mkdir()
    assert reported(tmp_path / "memory") == [{}] * 6
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses)
        assert reported(tmp_path / "sync") == [{"staleness": 1, "staleness_max": 1}] * 6
        distributed.connect("remote", servers=addresses, staleness=3)
        for line in reported(tmp_path / "hybrid"):
            assert 1 <= line["staleness"] <= line["staleness_max"] <= 3
        distributed.connect("remote", servers=addresses, mode="async", staleness=2)
        for line in reported(tmp_path / "async"):
            assert line["dense_staleness"] == 0  # there is no other trainer
            assert 1 <= line["staleness"] <= 2
