"""Saving while training goes on; what is kept; what is taken over by another model; what one can see."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from checkpoint_helpers import Model, same_rows, same_tree
from safetensors.numpy import load_file

import karvan as kv
from karvan.checkpoint import CheckpointError
from karvan.checkpoint import safetensors_file as writing_module
from karvan.store import MemoryStore


class _Gate:
    """Holds all writing of files until it is opened."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.arrived = threading.Event()
        write = writing_module.write_arrays

        def wait_and_write(*arguments):
            self.arrived.set()
            assert self.open.wait(60)
            return write(*arguments)

        monkeypatch.setattr(writing_module, "write_arrays", wait_and_write)


@pytest.mark.parametrize("writers", [1, 5])
def test_as_many_files_as_there_are_writers_are_written_at_once(tmp_path, monkeypatch, writers):
    now, most = set(), []
    several, write = threading.Barrier(writers), writing_module.write_arrays

    def meet_and_write(folder, name, arrays, pace):
        now.add(name)
        most.append(len(now))
        if len(most) <= writers:
            several.wait(60)  # the first files are begun together
        made = write(folder, name, arrays, pace)
        now.discard(name)
        return made

    model = Model(4, "Adam").train_on(5)
    plain = kv.checkpoint.save(tmp_path / "plain", model.state(), model, part_bytes=500)
    monkeypatch.setattr(writing_module, "write_arrays", meet_and_write)
    made = kv.Checkpoints(tmp_path, part_bytes=500, writers=writers).save(5, model.state(), model).wait()
    assert max(most) == writers
    files = {file.name: file.checksum for file in plain.manifest.files}
    assert {file.name: file.checksum for file in made.manifest.files} == files


def test_writers_are_checked(tmp_path):
    for wrong in (0, 257):
        with pytest.raises(ValueError, match=f"expects writers from 1 to 256, got {wrong}"):
            kv.Checkpoints(tmp_path, writers=wrong)
        with pytest.raises(ValueError, match=f"A save expects writers from 1 to 256, got {wrong}"):
            kv.checkpoint.save(tmp_path, {}, writers=wrong)


def test_training_goes_on_during_a_save_and_the_snapshot_is_of_one_step(tmp_path, monkeypatch):
    gate = _Gate(monkeypatch)
    model = Model(4, "Adam", admit=kv.admission.MinCount(2, slots=64), evict=kv.eviction.LRU(100)).train_on(5)
    rows, state = model.rows(), model.state()
    expected = {key: {**value} if isinstance(value, dict) else value for key, value in state.items()}
    weights = model.net.weight.detach().clone()
    filter_counts = model.embeddings.store.table("user").extra()["filter_counts"]
    pending = kv.Checkpoints(tmp_path, part_bytes=500).save(5, state, model)
    assert gate.arrived.wait(60)
    model.train_on(20, seed=7)  # all rows change, some leave, others come
    model.embeddings.table("item").clear()
    assert not pending.done()
    assert pending.error is None
    with pytest.raises(TimeoutError, match="step 5 is not complete"):
        pending.wait(0)
    assert os.listdir(tmp_path)[0].startswith(".step-000000000005.tmp-")
    assert kv.Checkpoints(tmp_path).latest() is None
    gate.open.set()
    made = pending.wait()
    assert pending.done()
    other = Model(4, "Adam", admit=kv.admission.MinCount(2, slots=64), evict=kv.eviction.LRU(100))
    back = made.load(other)
    assert same_rows(other.rows(), rows)
    assert torch.equal(back["model"]["net.weight"], weights)
    assert back["model"]["embeddings._extra_state"]["step"] == 5
    assert back["dense_optimizer"]["param_groups"] == expected["dense_optimizer"]["param_groups"]
    assert np.array_equal(other.embeddings.store.table("user").extra()["filter_counts"], filter_counts)


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    gate = _Gate(monkeypatch)
    model = Model().train_on(1)
    checkpoints = kv.Checkpoints(tmp_path)
    first = checkpoints.save(1, {}, model)
    second = threading.Thread(target=lambda: checkpoints.save(2, {}, model))
    second.start()
    assert gate.arrived.wait(60)
    second.join(0.05)
    assert second.is_alive()
    assert not first.done()
    gate.open.set()
    second.join()
    assert first.done()
    checkpoints.wait()
    assert [c.step for c in checkpoints.list()] == [1, 2]


def _fail(monkeypatch):
    def write(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writing_module, "write_arrays", write)


def test_a_failed_save_is_raised_once_by_wait_or_by_the_next_save(tmp_path, monkeypatch):
    model = Model().train_on(1)
    checkpoints = kv.Checkpoints(tmp_path, full_every=3)
    checkpoints.save(1, {}, model, block=True)
    with monkeypatch.context() as broken:
        _fail(broken)
        pending = checkpoints.save(2, {}, model)
        with pytest.raises(CheckpointError, match=r"step-000000000002: .*Input/output error"):
            pending.wait()
        assert isinstance(pending.error, CheckpointError)
        checkpoints.save(3, {}, model)  # that error has been told
        with pytest.raises(CheckpointError, match="step-000000000003"):
            checkpoints.save(4, {}, model)
        with pytest.raises(CheckpointError, match="step-000000000005"):
            checkpoints.save(5, {}, model, block=True)
    checkpoints.save(6, {}, model, block=True)
    assert [(c.step, c.kind) for c in checkpoints.list()] == [(1, "full"), (6, "full")]
    assert sorted(os.listdir(tmp_path)) == ["step-000000000001", "step-000000000006"]


def test_a_program_that_ends_at_once_finishes_its_save(tmp_path):
    script = (
        "import sys, karvan as kv; from checkpoint_helpers import Model;"
        "m = Model().train_on(20, keys=5000);"
        "kv.Checkpoints(sys.argv[1], part_bytes=2000).save(7, m.state(), m)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    assert kv.Checkpoints(tmp_path).latest().step == 7
    assert kv.checkpoint.verify(tmp_path) == []


def test_the_last_and_the_best_are_kept(tmp_path):
    checkpoints = kv.Checkpoints(tmp_path, keep_last=2, keep_best=("auc", "max"))
    assert checkpoints.best() is None
    for step, auc in enumerate([0.5, 0.9, 0.7, float("nan"), 0.8, None]):
        checkpoints.save(step, {}, None, metrics=None if auc is None else {"auc": auc}, block=True)
    assert [c.step for c in checkpoints.list()] == [1, 4, 5]
    assert checkpoints.best().step == 1
    assert checkpoints.best().metrics == {"auc": 0.9}
    assert kv.Checkpoints(tmp_path, keep_best=("auc", "min")).best().step == 4
    with pytest.raises(ValueError, match="without keep_best"):
        kv.Checkpoints(tmp_path).best()


def test_the_best_delta_keeps_its_chain(tmp_path):
    model = Model()
    checkpoints = kv.Checkpoints(tmp_path, keep_last=1, keep_best=("loss", "min"), full_every=3)
    for step, loss in enumerate([3, 1, 2, 5, 5, 5, 5]):
        model.train_on(1, seed=step)
        checkpoints.save(step, {}, model, metrics={"loss": loss}, block=True)
    assert [c.step for c in checkpoints.list()] == [0, 1, 6]
    checkpoints.best().load(Model())


def test_all_are_kept_with_keep_last_none(tmp_path):
    checkpoints = kv.Checkpoints(tmp_path, keep_last=None)
    for step in range(5):
        checkpoints.save(step, {}, None)
    checkpoints.wait()
    assert [c.step for c in checkpoints.list()] == [0, 1, 2, 3, 4]


def test_pruning_leaves_what_is_not_ours_alone(tmp_path):
    (tmp_path / "step-000000000000").mkdir()
    (tmp_path / "step-000000000000" / "manifest.json").write_text("{}")
    (tmp_path / "events").write_text("x")
    checkpoints = kv.Checkpoints(tmp_path, keep_last=1)
    for step in (1, 2):
        checkpoints.save(step, {}, None, block=True)
    assert sorted(os.listdir(tmp_path)) == ["events", "step-000000000000", "step-000000000002"]


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"full_every": 0},
        {"part_bytes": 0},
        {"keep_best": ("auc", "up")},
        {"keep_best": "auc"},
    ],
)
def test_settings_that_cannot_be_are_errors(tmp_path, options):
    with pytest.raises(ValueError, match=r"Checkpoints expects .* got"):
        kv.Checkpoints(tmp_path, **options)


def test_two_tables_of_one_name_in_different_stores_are_an_error(tmp_path):
    model = torch.nn.ModuleList([kv.EmbeddingEngine({"f": kv.Table(2)}) for _ in range(2)])
    with pytest.raises(ValueError, match="Two engines have a table 'f'"):
        kv.checkpoint.save(tmp_path / "c", {}, model)


def test_engines_that_share_a_store_are_saved_once_and_come_back(tmp_path):
    def build():
        store = MemoryStore()
        tables = [{"f": kv.Table(2)}, {"f": kv.Table(2), "g": kv.Table(3)}]
        return torch.nn.ModuleList([kv.EmbeddingEngine(t, store=store) for t in tables])

    model = build()
    model[0]({"f": torch.tensor([1, 2])})
    model[1]({"f": torch.tensor([2, 3]), "g": torch.tensor([4, 4])})
    made = kv.checkpoint.save(tmp_path / "c", {}, model)
    other = build()
    made.load(other)
    assert sorted(other[0].table("f").keys().tolist()) == [1, 2, 3]
    assert list(made.manifest.tables) == ["f", "g"]


# Warm start


class _Other(torch.nn.Module):
    """A newer model: item by another name, one more table, another net."""

    def __init__(self, optimizer=True):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(4), "product": kv.Table(3, dtype=torch.bfloat16), "query": kv.Table(4)}
        )
        self.net = torch.nn.Linear(7, 1)
        self.head = torch.nn.Linear(5, 1)
        if optimizer:
            self.optimizer = kv.optim.Adagrad(lr=0.1)
            self.optimizer.attach(self)


@pytest.fixture
def old(tmp_path):
    model = Model(admit=kv.admission.MinCount(1)).train_on(6)
    checkpoints = kv.Checkpoints(tmp_path / "old", full_every=2, part_bytes=1000)
    checkpoints.save(1, model.state(), model, block=True)
    model.train_on(2, seed=5)
    checkpoints.save(2, model.state(), model, block=True)
    return model


def test_warm_start_takes_rows_and_dense_tensors_with_renames(tmp_path, old):
    model = _Other()
    model.embeddings.step = 3
    report = kv.checkpoint.warm_start(model, tmp_path / "old", rename={"item": "product"})
    rows = old.rows()
    taken = model.embeddings.table("user").snapshot()
    assert np.array_equal(taken.vectors, rows["user"].vectors)
    assert np.array_equal(taken.state, rows["user"].state)
    assert np.array_equal(taken.counts, rows["user"].counts)
    assert set(taken.last_steps.tolist()) == {3}  # used now, as this model counts
    assert np.allclose(model.embeddings.table("product").snapshot().vectors, rows["item"].vectors, rtol=0.01)
    assert torch.equal(model.net.weight, old.net.weight)
    assert (report.step, report.tables) == (2, {"user": "user", "product": "item"})
    assert report.rows == {"user": len(rows["user"].keys), "product": len(rows["item"].keys)}
    assert sorted(report.dense) == ["net.bias", "net.weight"]
    assert (report.new_tables, report.new_dense) == (["query"], ["head.weight", "head.bias"])
    rows = report.rows
    assert str(report).splitlines() == [
        f"Warm start from {tmp_path}/old/step-000000000002, step 2",
        f"  table user            {rows['user']:,} rows",
        f"  table item → product  {rows['product']:,} rows",
        "  dense net.weight      loaded",
        "  dense net.bias        loaded",
        "  table query           not from the checkpoint: keeps its initial values",
        "  dense head.weight     not from the checkpoint: keeps its initial values",
        "  dense head.bias       not from the checkpoint: keeps its initial values",
    ]


def test_warm_start_takes_only_what_is_asked_for_and_says_so(tmp_path, old):
    model = _Other()
    weight = model.net.weight.detach().clone()
    report = kv.checkpoint.warm_start(
        model, tmp_path / "old", tables=["us*", "it*"], dense="net.*", exclude="*.weight"
    )
    assert torch.equal(model.net.weight, weight)
    assert torch.equal(model.net.bias, old.net.bias)
    assert report.left_tables == {"item": "the model has no 'item'"}
    assert report.left_dense == {"net.weight": "excluded"}
    report = kv.checkpoint.warm_start(_Other(), tmp_path / "old", tables="item", dense=())
    assert report.left_tables == {"user": "not requested", "item": "the model has no 'item'"}
    assert set(report.left_dense) == {"net.weight", "net.bias"}


def test_warm_start_without_optimizer_state_begins_it_anew(tmp_path, old):
    model = _Other()
    kv.checkpoint.warm_start(model, tmp_path / "old", optimizer_state=False)
    assert not model.embeddings.table("user").snapshot().state.any()
    kv.checkpoint.warm_start(_Other(optimizer=False), tmp_path / "old")
    with pytest.raises(CheckpointError, match="'user' with 8 floats of Adam state, got 4 floats of Adagrad"):
        kv.checkpoint.warm_start(Model(optimizer="Adam"), tmp_path / "old")


def test_warm_start_continues_to_count_the_steps_of_the_optimizer(tmp_path):
    class Clicks(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.embeddings = kv.EmbeddingEngine({name: kv.Table(2)})

        def forward(self, batch):
            return next(iter(self.embeddings(batch).values())).sum(1)

    batches = [kv.Batch({"item": torch.arange(3), "label": torch.ones(3)})] * 4
    options = {"dense_optimizer": None, "checkpoints": tmp_path / "run"}
    trainer = kv.Trainer(
        Clicks("item"), kv.losses.MeanSquaredError(), sparse_optimizer=kv.optim.Adam(lr=0.1), **options
    )
    trainer.fit(batches)
    for given in (True, False):
        model = Clicks("product")
        optimizer = kv.optim.Adam(model, lr=0.1)
        kv.checkpoint.warm_start(
            model,
            tmp_path / "run",
            rename={"item": "product"},
            sparse_optimizer=optimizer if given else None,
        )
        assert optimizer.table_steps() == {"product": 4 if given else 0}
        kv.checkpoint.warm_start(
            model,
            tmp_path / "run",
            rename={"item": "product"},
            optimizer_state=False,
            sparse_optimizer=optimizer,
        )
        assert optimizer.table_steps() == {"product": 4 if given else 0}


def test_warm_start_adds_to_what_is_there(tmp_path, old):
    model = Model()
    model.step([10_000_001])
    kv.checkpoint.warm_start(model, tmp_path / "old", dense=())
    assert 10_000_001 in model.embeddings.table("user").keys().tolist()
    assert model.embeddings.table("user").rows == len(old.rows()["user"].keys) + 1


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"rename": {"item": "user"}}, ValueError, "one source for 'user'"),
        (
            {"rename": {"user": "product"}, "exclude": "item"},
            CheckpointError,
            "table 'user' of dim 3, as the model has it, got dim 4",
        ),
        ({"rename": {"net.bias": "head.weight"}}, CheckpointError, r"'net.bias' of shape \(1, 5\)"),
        ({"rename": {"usr": "user"}}, CheckpointError, "a table or tensor 'usr' to rename"),
        ({"tables": ["item", "usr*"]}, CheckpointError, r"a table like 'usr\*', got"),
        ({"dense": "nets.*"}, CheckpointError, r"a tensor like 'nets.\*', got net.weight"),
    ],
)
def test_what_does_not_fit_is_an_error_and_changes_nothing(tmp_path, old, options, error, says):
    model = _Other()
    before = model.state_dict()["net.weight"].clone()
    with pytest.raises(error, match=says):
        kv.checkpoint.warm_start(model, tmp_path / "old", **options)
    assert [handle.rows for handle in model.embeddings.tables()] == [0, 0, 0]
    assert torch.equal(model.net.weight, before)


# Looking into one


def test_a_summary_tells_rows_bytes_norms_and_the_hottest_keys(tmp_path, old):
    for _ in range(30):
        old.step([5, 5, -7])
    run = kv.Checkpoints(tmp_path / "old", part_bytes=1000)
    run.save(3, old.state(), old, metrics={"auc": 0.5}, block=True)
    seen = kv.checkpoint.summary(tmp_path / "old", hottest=2)
    user, item = seen.tables
    rows = old.rows()["user"]
    norms = np.linalg.norm(rows.vectors.astype(np.float64), axis=1)
    assert (seen.step, seen.kind, seen.metrics, seen.builds_on) == (3, "full", {"auc": 0.5}, [])
    assert (user.name, user.rows, user.dim, user.dtype) == ("user", len(norms), 4, "float32")
    assert (user.optimizer, user.state, user.bytes) == ("Adagrad", 4, len(norms) * (8 + 16 + 16 + 8))
    assert user.mean_norm == pytest.approx(norms.mean())
    assert user.max_norm == pytest.approx(norms.max())
    assert [hot.key for hot in user.hottest] == [5, -7]
    assert user.hottest[0].count == rows.counts.max()
    assert (item.name, item.dim) == ("item", 3)
    files = [p for p in seen.path.rglob("*") if p.is_file()]
    assert seen.bytes == sum(p.stat().st_size for p in files)
    assert seen.dense_tensors == len(load_file(seen.path / "dense.safetensors"))


def test_a_delta_is_summed_up_with_all_it_builds_on(tmp_path, old):
    seen = kv.checkpoint.summary(tmp_path / "old")
    assert (seen.kind, seen.builds_on) == ("delta", [1])
    assert [t.rows for t in seen.tables] == [len(rows.keys) for rows in old.rows().values()]


def test_one_keys_row_is_found_signed_or_unsigned(tmp_path, old):
    rows = old.rows()["user"]
    for place, key in enumerate(rows.keys.tolist()):
        row = kv.checkpoint.row(tmp_path / "old", "user", key)
        assert np.array_equal(row.vector, rows.vectors[place])
        assert np.array_equal(row.state, rows.state[place])
        assert (row.count, row.last_step) == (rows.counts[place], rows.last_steps[place])
    negative = int(rows.keys.min())
    assert kv.checkpoint.row(tmp_path / "old", "user", negative + 2**64).key == negative
    assert kv.checkpoint.row(tmp_path / "old", "user", 123_456) is None
    with pytest.raises(CheckpointError, match="expected a table out of: user, item, got 'usr'"):
        kv.checkpoint.row(tmp_path / "old", "usr", 1)
    with pytest.raises(ValueError, match="64 bits"):
        kv.checkpoint.row(tmp_path / "old", "user", 2**64)


def test_a_run_or_one_checkpoint_may_be_named(tmp_path, old):
    assert kv.checkpoint.find(tmp_path / "old").step == 2
    assert kv.checkpoint.find(tmp_path / "old" / "step-000000000001").step == 1
    assert same_tree(kv.checkpoint.find(tmp_path / "old").state(), old.state())
