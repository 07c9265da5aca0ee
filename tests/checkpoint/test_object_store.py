"""Checkpoints at URLs: the same guarantees as in folders, on a server of S3's protocol."""

import secrets
import sys

import pytest
import torch
from checkpoint_helpers import Model, same_rows, same_tree
from few_examples import few_examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from object_stores import KEYS
from pyarrow import fs

import karvan as kv
from karvan.checkpoint import CheckpointError, DamagedCheckpointError
from karvan.owner import OwnerRecord


@pytest.fixture
def other_machine(monkeypatch, tmp_path):
    """A function that makes this process forget what it has in its cache."""
    numbers = iter(range(100))

    def move():
        monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / f"cache-{next(numbers)}"))

    return move


class Clicks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"user": kv.Table(4)}, seed=0)
        self.net = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.net(self.embeddings(batch)["user"])


def save_steps(checkpoints, steps, model=None):
    model = model or Model()
    for step in steps:
        model.train_on(1, seed=step)
        checkpoints.save(step, {**model.state(), "step": step}, model, block=True)
    return model


def loaded(url):
    model = Model()
    found, state = kv.Checkpoints(url).resume(model)
    model.restore(state)
    return found, model


def test_a_checkpoint_at_a_url_has_the_bits_of_a_local_one(store, tmp_path, other_machine):
    url, model = store.url("equal"), Model().train_on(3)
    for place in (url, tmp_path / "local"):
        kv.Checkpoints(place, part_bytes=4000).save(3, model.state(), model, block=True)
    other_machine()
    at_url, from_url = loaded(url)
    local, from_local = loaded(tmp_path / "local")
    assert same_rows(from_url.rows(), model.rows())
    assert same_rows(from_url.rows(), from_local.rows())
    assert same_tree(at_url.state(), local.state())
    names = [file.name.partition("/")[2] for file in at_url.manifest.files]
    assert names == [file.name for file in local.manifest.files]
    assert [file.checksum for file in at_url.manifest.files] == [
        file.checksum for file in local.manifest.files
    ]
    assert kv.checkpoint.verify(url) == []
    assert not (tmp_path / "s3:").exists()


def test_a_checkpoint_that_is_copied_is_one(store, tmp_path):
    model = save_steps(kv.Checkpoints(store.url("copied")), [1])
    fs.copy_files("bucket/copied", str(tmp_path / "copy"), source_filesystem=store.system)
    assert same_rows(loaded(tmp_path / "copy")[1].rows(), model.rows())
    kv.Checkpoints(tmp_path / "here").save(2, model.state(), model, block=True)
    fs.copy_files(str(tmp_path / "here"), "bucket/sent", destination_filesystem=store.system)
    found, sent = loaded(store.url("sent"))
    assert found.step == 2
    assert same_rows(sent.rows(), model.rows())


def test_large_files_are_uploaded_in_parts(store):
    state = {"w": torch.randn(6_000_000, generator=torch.Generator().manual_seed(0))}
    url = store.url("large")
    kv.checkpoint.save(f"{store.url('large/one')}", state)
    assert same_tree(kv.checkpoint.find(store.url("large/one")).state(), state)
    with pytest.raises(CheckpointError, match=r"s3://bucket/large: expected a checkpoint, .*neither"):
        kv.checkpoint.find(url)
    with pytest.raises(CheckpointError, match="expected a checkpoint to replace, or nothing"):
        kv.checkpoint.save(url, state)


def test_any_file_system_of_fsspec_will_do(store):
    checkpoints = kv.Checkpoints("memory://bucket/run", keep_last=2, full_every=2)
    model = save_steps(checkpoints, range(1, 6))
    assert [one.kind for one in checkpoints.list()] == ["full", "delta", "full"]
    assert same_rows(loaded("memory://bucket/run")[1].rows(), model.rows())


def test_retention_and_deltas_are_seen_by_all_machines(store, other_machine):
    url = store.url("kept")
    checkpoints = kv.Checkpoints(url, keep_last=2, full_every=3, part_bytes=4000)
    model = save_steps(checkpoints, range(1, 6))
    other_machine()
    kinds = [(one.step, one.kind) for one in kv.Checkpoints(url).list()]
    assert kinds == [(4, "full"), (5, "delta")]
    assert {name.partition("/")[0] for name in store.names("kept")} == {
        "step-000000000004",
        "step-000000000005",
    }
    assert same_rows(loaded(url)[1].rows(), model.rows())
    assert kv.checkpoint.summary(url).builds_on == [4]
    assert kv.checkpoint.find(url).step == kv.checkpoint.find(f"{store.url('kept/step-000000000005')}").step


def test_the_same_step_again_replaces_the_first(store):
    url = store.url("again")
    checkpoints = kv.Checkpoints(url)
    save_steps(checkpoints, [1])
    model = save_steps(checkpoints, [1], Model(seed=1))
    assert same_rows(loaded(url)[1].rows(), model.rows())
    assert len({name.split("/")[1] for name in store.names("again")}) == 2  # a manifest and one save


@pytest.mark.parametrize("match", ["dense", "tables", "manifest"])
def test_a_failed_upload_keeps_the_checkpoints_before(store, match, other_machine):
    url = store.url(f"failed-{match}")
    checkpoints = kv.Checkpoints(url)
    model = save_steps(checkpoints, [1, 2])
    before, names = model.rows(), store.names(f"failed-{match}")
    model.train_on(1, seed=9)
    store.fail(status=503, method="PUT", match=match, count=1000)
    for step in (2, 3):  # a step that is there, and a new one
        with pytest.raises(CheckpointError, match="expected to write a checkpoint") as raised:
            checkpoints.save(step, model.state(), model, block=True)
        assert raised.value.temporary
    store.heal()
    other_machine()
    found, found_model = loaded(url)
    assert found.step == 2
    assert same_rows(found_model.rows(), before)
    checkpoints.save(3, model.state(), model, block=True)
    assert same_rows(loaded(url)[1].rows(), model.rows())
    left = [name for name in store.names(f"failed-{match}") if "step-000000000003" not in name]
    assert {*names} <= {*left}


Fault = st.fixed_dictionaries(
    {
        "skip": st.integers(0, 12),
        "count": st.integers(0, 3),
        "status": st.sampled_from([403, 500, 503]),
        "method": st.sampled_from(["PUT", "PUT", "DELETE", "POST", "GET", "HEAD"]),
    },
    optional={"done": st.just(1)},
)


@few_examples(8, thorough=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(saves=st.lists(st.tuples(st.integers(0, 1), Fault), min_size=1, max_size=5))
def test_whatever_request_fails_all_checkpoints_are_complete(store, saves):
    run = f"random-{secrets.token_hex(4)}"
    checkpoints = kv.Checkpoints(store.url(run), keep_last=2)
    step, tried, saved = 0, {}, 0
    for number, (more, fault) in enumerate(saves):
        step += more
        tried.setdefault(step, []).append(number)
        store.fail(**fault)
        try:
            checkpoints.save(step, {"number": number}, None, block=True)
        except CheckpointError:
            store.heal()
        else:
            store.heal()
            tried[step], saved = [number], step  # a save that was reported as complete is not lost
        found = {one.step: one for one in kv.Checkpoints(store.url(run)).list()}
        assert all(one.verify() == [] for one in found.values())
        assert all(one.state()["number"] in tried[at] for at, one in found.items())
        assert saved == 0 or max(found) >= saved
        newest = kv.Checkpoints(store.url(run)).resume(None)
        assert (newest is None and not found) or newest[0].step == max(found)


def test_a_lost_answer_about_the_manifest_is_no_failure(store):
    url = store.url("answered")
    store.fail(status=503, method="PUT", match="manifest", count=1, done=1)
    model = save_steps(kv.Checkpoints(url), [1])
    assert same_rows(loaded(url)[1].rows(), model.rows())


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_loaded(store, damage, caplog, other_machine):
    run = f"damaged-{damage}"
    url, checkpoints = store.url(run), kv.Checkpoints(store.url(run))
    model = save_steps(checkpoints, [1])
    rows = model.rows()
    save_steps(checkpoints, [2], model)
    which = "manifest.json" if damage == "manifest" else "dense.safetensors"
    name = next(name for name in store.names(run) if name.startswith("step-000000000002") and which in name)
    content = bytearray(store.read(f"{run}/{name}"))
    content[len(content) // 2] ^= 1
    if damage == "missing":
        store.delete(f"{run}/{name}")
    else:
        store.write(f"{run}/{name}", bytes(content))
    other_machine()
    if damage != "manifest":
        assert [each.path.name for each in kv.checkpoint.verify(url)] == [which]
    found, found_model = loaded(url)
    assert found.step == 1
    assert same_rows(found_model.rows(), rows)
    assert f"s3://bucket/{run}/step-000000000002" in caplog.text
    assert "step-000000000002/damaged-manifest.json" in caplog.text
    assert [(each.step, each.condition) for each in kv.checkpoint.survey(url)] == [
        (1, "whole"),
        (2, "damaged"),
    ]
    assert kv.Checkpoints(url).latest().step == 1
    again = save_steps(kv.Checkpoints(url), [2], found_model)
    assert same_rows(loaded(url)[1].rows(), again.rows())


def test_if_all_are_damaged_nothing_changes(store):
    url = store.url("all")
    save_steps(kv.Checkpoints(url), [1])
    store.write("all/step-000000000001/manifest.json", b"{}")
    names = store.names("all")
    with pytest.raises(DamagedCheckpointError, match="s3://bucket/all: expected an intact checkpoint"):
        kv.Checkpoints(url).resume(Model())
    assert store.names("all") == names


def test_a_chosen_checkpoint_abandons_the_later_ones(store):
    url = store.url("chosen")
    save_steps(kv.Checkpoints(url), [1, 2, 3])
    assert kv.Checkpoints(url).resume(Model(), "step-000000000002")[0].step == 2
    assert kv.Checkpoints(url).latest().step == 2
    assert [each.condition for each in kv.checkpoint.survey(url)] == ["whole", "whole", "abandoned"]


def test_an_outage_while_reading_is_no_damage(store):
    url = store.url("outage")
    save_steps(kv.Checkpoints(url), [1, 2])
    store.fail(status=503, method="GET", match="dense", count=1000)
    with pytest.raises(CheckpointError) as raised:
        kv.Checkpoints(url).resume(Model())
    assert not isinstance(raised.value, DamagedCheckpointError)
    assert raised.value.temporary
    store.heal()
    assert kv.Checkpoints(url).resume(Model())[0].step == 2


def test_errors_of_stores_are_clear_before_training_begins(store):
    wrong = store.url("x").replace("bucket", "nobucket")
    with pytest.raises(
        CheckpointError, match=r"s3://nobucket/x: checkpoints cannot be written here.*credentials"
    ):
        kv.Checkpoints(wrong).require_writable()
    store.fail(status=403, method="PUT", match="refused", count=1000)
    with pytest.raises(CheckpointError, match=r"s3://bucket/refused: .*credentials") as raised:
        kv.Checkpoints(store.url("refused")).require_writable()
    assert not raised.value.temporary
    with pytest.raises(CheckpointError, match="nowhere://bucket/run"):
        kv.Checkpoints("nowhere://bucket/run").require_writable()


def test_what_killed_saves_have_left_is_removed_after_a_day(store):
    checkpoints = kv.Checkpoints(store.url("left"), keep_last=3)
    store.write("left/step-000000000007/save-0011/dense.safetensors", b"1")
    store.write("left/step-000000000001/save-0022/dense.safetensors", b"1")
    save_steps(checkpoints, [1])
    names = store.names("left")
    assert "step-000000000007/save-0011/dense.safetensors" in names  # it may be written now
    assert not any("save-0022" in name for name in names)
    assert [one.step for one in checkpoints.list()] == [1]
    store.fail(hours=30)
    save_steps(checkpoints, [2])
    assert not any("step-000000000007" in name for name in store.names("left"))
    store.fail(hours=0)


def test_credentials_and_options_are_not_shown(store, monkeypatch):
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    url = store.url("private").replace("s3://", "s3://somebody:secret@")
    checkpoints = kv.Checkpoints(url)
    save_steps(checkpoints, [1])
    assert kv.checkpoint.find(url).step == 1
    assert "'s3://bucket/private'" in repr(checkpoints)
    monkeypatch.setattr(sys, "orig_argv", ["karvan", "train", "--folder", url])
    assert "--folder 's3://bucket/private?region" in OwnerRecord.of_this_process(1.0).command
    with pytest.raises(CheckpointError) as raised:
        checkpoints.resume(Model(), "step-000000000009")
    assert "secret" not in str(raised.value)


def test_a_fit_resumes_on_another_machine(store, other_machine, tmp_path):
    def trainer(place):
        torch.manual_seed(0)
        return kv.Trainer(
            Clicks(),
            lambda output, batch: output.square().mean(),
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            sparse_optimizer=kv.optim.Adagrad(lr=0.1),
            checkpoints=place,
            log_every=1,
            progress="none",
        )

    data = [{"user": torch.arange(8) + i} for i in range(4)]
    first = trainer(store.url("fit")).fit(data, max_steps=2)
    assert first.checkpoint == "s3://bucket/fit/step-000000000002"
    other_machine()
    second = trainer(store.url("fit"))
    second.fit(data, max_steps=4)
    alone = trainer(tmp_path / "alone")
    alone.fit(data, max_steps=4)
    assert same_tree(dict(second.model.named_parameters()), dict(alone.model.named_parameters()))
    assert list(second.history["step"]) == list(alone.history["step"])
    assert "history.jsonl" in store.names("fit")
    assert ".karvan-owner.json" not in store.names("fit")
