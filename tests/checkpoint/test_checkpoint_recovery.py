"""A run with damaged checkpoints resumes from the newest whole one, and keeps the damaged ones aside."""

import errno
import json
import logging
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import pytest
from checkpoint_helpers import Model, contents, files_of, same_rows, same_tree
from few_examples import few_examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import karvan as kv
from karvan.checkpoint import CheckpointError, DamagedCheckpointError, survey

STEPS = range(1, 7)
NAMES = [f"step-{step:012d}" for step in STEPS]


def _model():
    return Model(2, admit=kv.admission.MinCount(2, slots=64))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Full checkpoints and deltas of a run: 1 full, 2 and 3 on it, 4 full, 5 and 6 on it."""
    folder = tmp_path_factory.mktemp("run")
    model = _model()
    checkpoints = kv.Checkpoints(folder, keep_last=None, full_every=3, part_bytes=2000)
    for step in STEPS:
        model.train_on(1, seed=step, keys=30, size=16)
        checkpoints.save(step, {**model.state(), "step": step}, model, block=True)
    assert [one.kind for one in checkpoints.list()] == ["full", "delta", "delta"] * 2
    return folder


@pytest.fixture(scope="module")
def expected(run):
    """The rows and the state of each checkpoint."""
    found = {}
    for one in kv.Checkpoints(run).list():
        model = _model()
        state = one.load(model)
        found[one.step] = (model.rows(), state)
    return found


def _is_whole(folder):
    """The slow reference, without the package: all files of the manifest and of the chain match."""
    try:
        data = (folder / "manifest.json").read_bytes()
        head, rest = data.split(b"\n", 1)
        if json.loads(head + b'"x": 0}')["checksum"] != f"crc32:{zlib.crc32(rest):08x}":
            return False
        manifest = json.loads(data)
        files = [manifest["dense"]]
        for table in manifest["tables"].values():
            files += [*table["parts"], *filter(None, table["extras"])]
        for file in files:
            content = (folder / file["name"]).read_bytes()
            if len(content) != file["bytes"] or f"crc32:{zlib.crc32(content):08x}" != file["checksum"]:
                return False
        base = manifest["base"]
        if base is None:
            return True
        below = folder.parent / base["folder"]
        return _is_whole(below) and json.loads((below / "manifest.json").read_bytes())["id"] == base["id"]
    except (OSError, ValueError, KeyError):
        return False


def _flip(file, place):
    data = bytearray(file.read_bytes())
    data[place % len(data)] ^= 1 << place % 8
    file.write_bytes(data)


def _to_folder(file, _):
    file.unlink()
    file.mkdir()


DAMAGES = {
    "flip": _flip,
    "cut": lambda file, place: os.truncate(file, place % file.stat().st_size),
    "grow": lambda file, _: file.write_bytes(file.read_bytes() + b"\0"),
    "remove": lambda file, _: file.unlink(),
    "empty": lambda file, _: file.write_bytes(b""),
    "folder": _to_folder,
}
damages = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.integers(0, 50),  # which file
        st.sampled_from([*DAMAGES, "remove all", "empty all"]),
        st.integers(0, 10**6),
    ),
    max_size=6,
)


def _damage(folder, name, file, how, place):
    if how == "remove all":
        shutil.rmtree(folder / name, ignore_errors=True)
    elif how == "empty all":
        for each in files_of(folder / name):
            each.unlink()
    else:
        files = [each for each in files_of(folder / name) if each.stat().st_size]
        if files:
            DAMAGES[how](files[file % len(files)], place)


@few_examples(10, thorough=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=damages)
def test_a_resume_takes_the_newest_whole_checkpoint_whatever_is_damaged(run, expected, tmp_path, damages):
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    for each in damages:
        _damage(folder, *each)
    whole = [step for step, name in zip(STEPS, NAMES, strict=True) if _is_whole(folder / name)]
    left = [name for name in NAMES if files_of(folder / name)]
    before = contents(folder)
    model = _model().train_on(1, seed=99)
    if not whole and left:
        rows = model.rows()
        with pytest.raises(DamagedCheckpointError, match="expected an intact checkpoint"):
            kv.Checkpoints(folder).resume(model)
        assert contents(folder) == before
        assert same_rows(model.rows(), rows)
        return
    resumed = kv.Checkpoints(folder).resume(model)
    if not whole:
        assert resumed is None
        return
    found, state = resumed
    assert found.step == whole[-1]
    rows, saved = expected[found.step]
    assert same_rows(model.rows(), rows)
    assert same_tree(state, saved)
    # Every byte is still there; what is damaged and newer has another name.
    newer = [name for name in left if name > found.path.name]
    renamed = {
        (f"damaged-{path}" if path.split("/")[0] in newer else path): data for path, data in before.items()
    }
    assert contents(folder) == renamed
    assert kv.Checkpoints(folder).resume(_model())[0].step == found.step
    assert contents(folder) == renamed


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def _break(folder, step, pattern="dense.safetensors"):
    file = sorted((folder / f"step-{step:012d}").rglob(pattern))[0]
    _flip(file, 1000)
    return file


def test_the_warning_names_the_damaged_file_the_checkpoint_taken_and_the_lost_steps(copy, caplog):
    file = _break(copy, 6)
    with caplog.at_level(logging.WARNING):
        kv.Checkpoints(copy).resume(_model())
    damage, taken = [record.getMessage() for record in caplog.records]
    assert NAMES[5] in damage
    assert f"{file}: expected crc32:" in damage
    assert str(copy / NAMES[4]) in taken
    assert "1 steps" in taken
    assert f"damaged-{NAMES[5]}" in taken


def test_deltas_on_a_damaged_checkpoint_are_damaged_and_go_aside_with_it(copy, caplog):
    _break(copy, 4, "part-*")
    found, _ = kv.Checkpoints(copy).resume(_model())
    assert found.step == 3
    assert sorted(name for name in os.listdir(copy) if name.startswith("damaged-")) == [
        f"damaged-{name}" for name in NAMES[3:]
    ]
    assert "3 steps" in caplog.text


def test_a_second_damaged_checkpoint_of_a_step_gets_another_name(run, copy):
    for aside in ("", "-2"):
        _break(copy, 6)
        assert kv.Checkpoints(copy).resume(_model())[0].step == 5
        assert (copy / f"damaged-{NAMES[5]}{aside}" / "manifest.json").exists()
        shutil.copytree(run / NAMES[5], copy / NAMES[5])
    asides = [one for one in survey(copy) if one.condition == "damaged"]
    assert [one.path.name for one in asides] == [f"damaged-{NAMES[5]}", f"damaged-{NAMES[5]}-2"]


def test_pruning_leaves_what_was_set_aside(copy):
    _break(copy, 6)
    checkpoints = kv.Checkpoints(copy, keep_last=1)
    model = _model()
    checkpoints.resume(model)
    before = contents(copy / f"damaged-{NAMES[5]}")
    for step in (6, 7, 8):
        checkpoints.save(step, model.state(), model, block=True)
    assert sorted(os.listdir(copy)) == [f"damaged-{NAMES[5]}", "step-000000000008"]
    assert contents(copy / f"damaged-{NAMES[5]}") == before


def test_a_chosen_checkpoint_is_taken_and_later_ones_are_abandoned(copy, expected, caplog):
    checkpoints = kv.Checkpoints(copy, keep_last=3)
    model = _model()
    found, state = checkpoints.resume(model, NAMES[2])
    assert found.step == 3
    assert same_rows(model.rows(), expected[3][0])
    assert same_tree(state, expected[3][1])
    assert sorted(os.listdir(copy)) == [f"abandoned-{name}" for name in NAMES[3:]] + NAMES[:3]
    assert f"renamed to abandoned-{NAMES[5]}" in caplog.text
    checkpoints.save(4, model.state(), model, block=True)  # a step that was there before
    assert checkpoints.latest().step == 4
    assert kv.Checkpoints(copy).resume(_model())[0].step == 4
    assert (copy / f"abandoned-{NAMES[3]}").exists()


@pytest.mark.parametrize("damage", [True, False])
def test_a_chosen_checkpoint_that_is_damaged_or_not_there_is_an_error_with_those_that_are(copy, damage):
    if damage:
        _break(copy, 5)
    else:
        shutil.rmtree(copy / NAMES[4])
    before = contents(copy)
    with pytest.raises(CheckpointError) as raised:
        kv.Checkpoints(copy).resume(_model(), NAMES[4])
    for name in NAMES:
        assert name in str(raised.value)
    assert isinstance(raised.value, DamagedCheckpointError) == damage
    assert contents(copy) == before


def test_another_model_or_a_newer_format_is_an_error_and_no_damage(copy):
    before = contents(copy)
    with pytest.raises(CheckpointError, match="expected table 'user' of dim 5") as raised:
        kv.Checkpoints(copy).resume(Model(5))
    assert "got dim " in str(raised.value)
    assert "The folder belongs to a run with another model" in str(raised.value)
    assert "train this one in another folder" in str(raised.value)
    assert not isinstance(raised.value, DamagedCheckpointError)
    path = copy / NAMES[5] / "manifest.json"
    rest = path.read_bytes().split(b"\n", 1)[1].replace(b'"version": 1', b'"version": 2')
    path.write_bytes(f'{{"checksum": "crc32:{zlib.crc32(rest):08x}",\n'.encode() + rest)
    before = contents(copy)
    with pytest.raises(CheckpointError, match="expected version 1, got 2") as raised:
        kv.Checkpoints(copy).resume(_model())
    assert not isinstance(raised.value, DamagedCheckpointError)
    assert contents(copy) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as another user")
def test_a_file_that_may_not_be_read_is_an_error_and_no_damage(run):
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        copy = shutil.copytree(run, Path(place) / "run")
        for each in (copy, *copy.rglob("*")):
            os.chown(each, 65534, 65534)
        (copy / NAMES[5] / "dense.safetensors").chmod(0)
        model = _model()
        os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=os.strerror(errno.EACCES)) as raised:
                kv.Checkpoints(copy).resume(model)
        finally:
            os.seteuid(0)
        assert not isinstance(raised.value, DamagedCheckpointError)
        assert (copy / NAMES[5]).exists()


def test_an_incomplete_folder_is_reported_and_does_not_stop_a_save_of_its_step(copy, caplog):
    (copy / NAMES[5] / "manifest.json").unlink()
    model = _model()
    model.restore(kv.Checkpoints(copy).latest().load(model))
    assert [one.condition for one in survey(copy)] == ["whole"] * 5 + ["incomplete"]
    before = contents(copy / NAMES[5])
    kv.Checkpoints(copy).save(6, model.state(), model, block=True)  # without a resume
    assert f"renamed to damaged-{NAMES[5]}" in caplog.text
    assert contents(copy / f"damaged-{NAMES[5]}") == before
    assert kv.Checkpoints(copy).latest().verify() == []
    (copy / NAMES[5] / "manifest.json").unlink()
    caplog.clear()
    assert kv.Checkpoints(copy).resume(_model())[0].step != 6
    assert "expected a checkpoint, with a manifest.json, got none" in caplog.text
    assert (copy / f"damaged-{NAMES[5]}-2").exists()


def test_an_empty_folder_is_reported_once_and_a_new_run_begins(tmp_path, caplog):
    (tmp_path / NAMES[4]).mkdir()
    checkpoints = kv.Checkpoints(tmp_path)
    for _ in range(2):
        assert checkpoints.resume(_model()) is None
        assert checkpoints.newest_step() is None
    assert caplog.text.count(f"{NAMES[4]} is empty") == 1
    checkpoints.save(5, {}, None, block=True)
    assert checkpoints.latest().step == 5
    assert (tmp_path / f"damaged-{NAMES[4]}").is_dir()


def test_what_is_just_saved_is_not_pruned_although_later_ones_exist(tmp_path, caplog):
    kv.Checkpoints(tmp_path).save(10, {}, None, block=True)
    checkpoints = kv.Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(5, {}, None, block=True)
    assert [one.step for one in checkpoints.list()] == [5, 10]
    assert "checkpoints of later steps" in caplog.text


def test_damage_that_appears_while_loading_leads_to_a_complete_load_of_an_older_one(copy, expected):
    """The files are whole when they are checked, and damaged when they are read."""
    model = _model()
    file = sorted((copy / NAMES[5]).rglob("user/part-*"))[-1]

    def load(checkpoint):
        check = checkpoint.require_intact

        def check_then_break():
            check()
            if checkpoint.step == 6:
                _flip(Path(file), 400)

        checkpoint.require_intact = check_then_break
        return checkpoint.load(model)

    found, state = kv.Checkpoints(copy).resume_with(load)
    assert found.step == 5
    assert same_rows(model.rows(), expected[5][0])
    assert same_tree(state, expected[5][1])
