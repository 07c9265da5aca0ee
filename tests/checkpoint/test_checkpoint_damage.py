"""Damaged, truncated, half-written and foreign folders are errors that say so, and nothing is loaded."""

import json
import re
import shutil
import zlib

import pytest
import torch
from checkpoint_helpers import Model, files_of, same_rows

import karvan as kv
from karvan.checkpoint import CheckpointError
from karvan.checkpoint import manifest as manifests
from karvan.checkpoint.safetensors_file import damage_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small full checkpoint and a delta on it, in a folder of their own."""
    folder = tmp_path_factory.mktemp("saved")
    model = Model(2, admit=kv.admission.MinCount(2, slots=64)).train_on(2, keys=4, size=8)
    checkpoints = kv.Checkpoints(folder, full_every=2)
    checkpoints.save(1, model.state(), model, metrics={"auc": 0.5}, block=True)
    model.train_on(1, keys=6, size=8)
    model.embeddings.table("item").evict_keys([1])
    checkpoints.save(2, model.state(), model, block=True)
    return folder


def _refuses(folder, untouched):
    """The newest checkpoint is not loaded, by an error that names a file, and the model stays as it was."""
    before = untouched.rows()
    with pytest.raises(CheckpointError, match=r"expected .* got") as raised:
        kv.checkpoint.find(folder).load(untouched)
    assert str(folder) in str(raised.value)
    assert same_rows(before, untouched.rows())


def _detector(folder, file):
    """A function that says whether the checkpoint in `folder` notices what happened to this file of it."""
    entries = [entry for entry in manifests.read(folder).files if folder / entry.name == file]

    def notices():
        if entries:
            return damage_of(folder, entries[0])
        try:
            manifests.read(folder)
        except CheckpointError as error:
            return error
        return None

    return notices


def test_every_flipped_byte_is_detected(saved, tmp_path):
    damaged = shutil.copytree(saved, tmp_path / "d")
    model = Model(2, admit=kv.admission.MinCount(2, slots=64)).train_on(1)
    for folder in sorted(damaged.iterdir()):
        for file in files_of(folder):
            notices = _detector(folder, file)
            with file.open("rb+", buffering=0) as opened:
                data = opened.read()
                for place, byte in enumerate(data):
                    opened.seek(place)
                    opened.write(bytes([byte ^ (1 << place % 8)]))
                    assert notices(), f"{file} byte {place}"
                    if place == len(data) // 2:
                        assert kv.checkpoint.verify(damaged)
                        _refuses(damaged, model)
                    opened.seek(place)
                    opened.write(bytes([byte]))
    assert kv.checkpoint.verify(damaged) == []
    kv.checkpoint.find(damaged).load(model)


def test_every_truncation_and_addition_is_detected(saved, tmp_path):
    damaged = shutil.copytree(saved, tmp_path / "d")
    model = Model(2, admit=kv.admission.MinCount(2, slots=64)).train_on(1)
    for file in files_of(damaged):
        data = file.read_bytes()
        for length in [0, 7, 8, len(data) // 2, len(data) - 1]:
            file.write_bytes(data[:length])
            assert kv.checkpoint.verify(damaged)
            _refuses(damaged, model)
        file.write_bytes(data + b"\0")
        assert kv.checkpoint.verify(damaged)
        file.unlink()
        assert kv.checkpoint.verify(saved) == []
        if file.name != "manifest.json":
            assert [d.path for d in kv.checkpoint.verify(damaged)] == [file]
        file.write_bytes(data)


def test_verify_lists_all_that_is_damaged(saved, tmp_path):
    damaged = shutil.copytree(saved, tmp_path / "d")
    files = [f for f in files_of(damaged) if f.name != "manifest.json"]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert sorted(d.path for d in kv.checkpoint.verify(damaged)) == files
    with pytest.raises(CheckpointError, match=f"{len(files) - 1} more files are damaged"):
        kv.checkpoint.find(damaged).load(Model(2, admit=kv.admission.MinCount(2, slots=64)))


def test_the_one_before_a_damaged_one_stays_usable(saved, tmp_path):
    damaged = shutil.copytree(saved, tmp_path / "d")
    checkpoints = kv.Checkpoints(damaged)
    (damaged / "step-000000000002" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step-000000000002"):
        checkpoints.latest()
    assert [c.step for c in checkpoints.list()] == [1]
    checkpoints.list()[0].load(Model(2, admit=kv.admission.MinCount(2, slots=64)))


def _resign(folder, change):
    """Change a manifest and give it a checksum that fits."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    rest = json.dumps(content)[1:].encode()
    path.write_bytes(f'{{"checksum": "crc32:{zlib.crc32(rest):08x}",\n'.encode() + rest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(version=2), "expected version 1, got 2"),
        (lambda m: m.update(format="other"), "expected format 'karvan-checkpoint', got 'other'"),
        (lambda m: m.pop("format"), "expected format 'karvan-checkpoint', got null"),
        (lambda m: m.update(mix=2), "expected mix 1, got 2"),
        (lambda m: m.pop("tables"), "expected the fields of a manifest, got .*tables"),
        (lambda m: m.update(tables=[]), "expected the fields of a manifest"),
        (lambda m: m.update(kind="delta"), "a delta has a base"),
        (lambda m: m["dense"].update(name="../../x"), "a file is outside"),
        (lambda m: m["tables"]["user"].update(rows=7), "its parts differ in rows"),
        (lambda m: m["tables"]["user"].update(surprise=7), "surprise"),
        (
            lambda m: m["tables"]["user"].update(dim=7),
            "expected table 'user' of dim 2, as the model has it, got dim 7",
        ),
        (
            lambda m: m["tables"]["user"].update(dtype="float16"),
            "expected table 'user' of float32, got float16",
        ),
    ],
)
def test_a_manifest_of_another_kind_says_what_was_expected(saved, tmp_path, change, says):
    folder = shutil.copytree(saved / "step-000000000001", tmp_path / "c")
    _resign(folder, change)
    with pytest.raises(CheckpointError, match=says):
        kv.checkpoint.find(folder).load(Model(2, admit=kv.admission.MinCount(2, slots=64)))


def test_a_header_that_lies_is_an_error_even_with_a_fitting_checksum(saved, tmp_path):
    folder = shutil.copytree(saved / "step-000000000001", tmp_path / "c")
    made = kv.checkpoint.Checkpoint(folder)
    part = made.manifest.tables["item"].parts[0]
    data = (folder / part.name).read_bytes()
    model = Model(2, admit=kv.admission.MinCount(2, slots=64)).train_on(1)
    before = model.rows()
    for old, new, says in [
        (b'"dtype":"U32"', b'"dtype":"I32"', "'counts' of U32"),
        (b'"keys"', b'"kees"', "an array 'keys'"),
        (b'"shape":[%d]' % part.rows, b'"shape":[%d]' % (part.rows - 1), "array 'keys' of"),
        (b'"data_offsets":[0,', b'"data_offsets":[9,', "array 'keys' of"),
        (b'{"keys"', b'["keys"', "header of JSON"),
        (data[:8], b"\xff" * 8, "a header within"),
    ]:
        assert old in data
        changed = data.replace(old, new, 1)
        (folder / part.name).write_bytes(changed)
        crc = f"crc32:{zlib.crc32(changed):08x}"
        _resign(folder, lambda m, crc=crc: m["tables"]["item"]["parts"][0].update(checksum=crc))
        opened = kv.checkpoint.Checkpoint(folder)
        assert [damage.path for damage in opened.verify()] == [folder / part.name]
        for use in (lambda c: list(c.parts("item")), lambda c: c.load(model)):
            with pytest.raises(CheckpointError, match=re.escape(says)) as raised:
                use(opened)
            assert part.name in str(raised.value)
        assert same_rows(before, model.rows())


def test_foreign_and_absent_folders_say_what_was_expected(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"expected a checkpoint, with a manifest\.json, got no such folder"
    ):
        kv.checkpoint.find(tmp_path / "none")
    with pytest.raises(CheckpointError, match="or a run's folder with step-… inside, got neither"):
        kv.checkpoint.find(tmp_path)
    (tmp_path / "step-000000000007").mkdir()  # no manifest: none of ours
    assert kv.Checkpoints(tmp_path).latest() is None
    with pytest.raises(CheckpointError, match=r"with a manifest\.json"):
        kv.checkpoint.Checkpoint(tmp_path / "step-000000000007")
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(CheckpointError, match="a first line with a checksum"):
        kv.checkpoint.find(tmp_path)


def test_saving_over_something_that_is_no_checkpoint_is_an_error(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "photo").write_text("x")
    with pytest.raises(CheckpointError, match="expected a checkpoint to replace, or nothing"):
        kv.checkpoint.save(tmp_path / "precious", {})
    (tmp_path / "precious").rename(tmp_path / "step-000000000003")
    kv.Checkpoints(tmp_path).save(3, {}, None, block=True)  # a run's folders are its own
    assert (tmp_path / "damaged-step-000000000003" / "photo").exists()


def test_missing_and_unexpected_tables_are_errors_that_name_them(saved):
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = kv.EmbeddingEngine({"user": kv.Table(2), "query": kv.Table(2)})

    with pytest.raises(
        CheckpointError, match="expected the model's tables 'query', 'user', got 'item', 'user'"
    ):
        kv.checkpoint.find(saved).load(Other())
