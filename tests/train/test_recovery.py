"""Fits and contexts with damaged checkpoints continue from the newest whole one, bit for bit."""

import os
import shutil

import pytest
import torch
from test_context import context, train
from train_helpers import StopAt, assert_same, batches, loader, model, newest, trainer

import karvan as kv
from karvan.checkpoint import CheckpointError, DamagedCheckpointError


def name(step):
    return f"step-{step:012d}"


def fit(folder, stop_at=None, resume=True, data=loader, keep_last=10, **options):
    """A fit with checkpoints every three steps, deltas among them."""
    net = model()
    torch.manual_seed(12345)  # another process has other random numbers
    made = trainer(
        net,
        metrics={"auc": kv.metrics.AUC()},
        callbacks=[StopAt(stop_at)],
        checkpoints=kv.Checkpoints(folder, keep_last=keep_last, full_every=3),
        checkpoint_every=3,
        **options,
    )
    result = made.fit(data(), epochs=2, resume=resume)
    return net, result


def damage(folder, step, pattern="dense.safetensors"):
    file = sorted((folder / name(step)).rglob(pattern))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped at step 14: 3 is full, 6 and 9 are deltas on it, 12 is full, 14 is a delta."""
    folder = tmp_path_factory.mktemp("stopped")
    fit(folder, stop_at=14)
    kinds = [(one.step, one.kind) for one in kv.Checkpoints(folder).list()]
    assert kinds == [(3, "full"), (6, "delta"), (9, "delta"), (12, "full"), (14, "delta")]
    return folder


@pytest.mark.parametrize(
    ("steps", "pattern", "taken"),
    [
        ([14], "dense.safetensors", 12),
        ([14], "manifest.json", 12),
        ([12], "part-*", 9),  # and with it 14, which builds on it
        ([14, 12, 9], "part-*", 6),
    ],
)
def test_a_fit_with_damaged_checkpoints_ends_like_one_that_resumed_from_the_whole_one(
    stopped, tmp_path, steps, pattern, taken, caplog
):
    damaged = shutil.copytree(stopped, tmp_path / "damaged")
    direct = shutil.copytree(stopped, tmp_path / "direct")
    for step in steps:
        damage(damaged, step, pattern)
    for one in kv.Checkpoints(direct).list():
        if one.step > taken:
            shutil.rmtree(one.path)
    net, result = fit(damaged)
    expected, other = fit(direct)
    assert result.trained == other.trained == 24 - taken
    assert_same(net, expected)
    assert newest(damaged) == newest(direct)
    for step in (each for each in (9, 12, 14) if each > taken):
        assert (damaged / f"damaged-{name(step)}").exists()
    assert f"the {14 - taken} steps up to {name(14)} are lost" in caplog.text


def test_a_chosen_checkpoint_begins_another_course_and_later_ones_are_abandoned(stopped, tmp_path):
    chosen = shutil.copytree(stopped, tmp_path / "chosen")
    direct = shutil.copytree(stopped, tmp_path / "direct")
    for step in (9, 12, 14):
        shutil.rmtree(direct / name(step))
    net, result = fit(chosen, resume=name(6), stop_at=13)
    expected, _ = fit(direct, stop_at=13)
    assert (result.step, result.trained) == (13, 7)
    assert_same(net, expected)
    asides = sorted(each for each in os.listdir(chosen) if each.startswith("abandoned-"))
    assert asides == [f"abandoned-{name(step)}" for step in (9, 12, 14)]
    net, _ = fit(chosen)  # from the new course
    expected, _ = fit(direct)
    assert_same(net, expected)
    assert newest(chosen) == newest(direct)


def test_a_restarted_process_continues_from_the_newest_and_not_from_the_chosen_one(
    stopped, tmp_path, monkeypatch
):
    folder = shutil.copytree(stopped, tmp_path / "run")
    for variable, stop_at in (("KARVAN_GENERATION", 15), ("TORCHELASTIC_RESTART_COUNT", 16)):
        monkeypatch.setenv(variable, "1")
        _, result = fit(folder, resume=name(6), stop_at=stop_at)
        assert (result.step, result.trained) == (stop_at, 1)
        assert (folder / name(14)).exists()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("resume", ["step-5", "12", 12, None, "abandoned-step-000000000012"])
def test_a_wrong_spelling_of_resume_says_what_is_expected(stopped, resume):
    with pytest.raises(ValueError, match="such as 'step-000000001000', got"):
        fit(stopped, resume=resume)


def test_a_chosen_checkpoint_that_cannot_be_taken_is_an_error(stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    damage(folder, 9)
    with pytest.raises(CheckpointError, match=f"{name(10)}, got none of that name; there are: {name(3)}, "):
        fit(folder, resume=name(10))
    with pytest.raises(DamagedCheckpointError, match=f"others are: {name(3)}, {name(6)}, {name(12)}"):
        fit(folder, resume=name(9))
    assert sorted(each for each in os.listdir(folder) if each.startswith(("damaged", "abandoned"))) == []
    with pytest.raises(ValueError, match="a Trainer without"):
        trainer(model()).fit(batches(), resume=name(9))


def test_no_whole_checkpoint_is_an_error_and_nothing_changes(stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    for step in (3, 12):
        damage(folder, step)
    before = sorted(os.listdir(folder))
    with pytest.raises(DamagedCheckpointError, match="expected an intact checkpoint, got 5 damaged"):
        fit(folder)
    assert sorted(os.listdir(folder)) == before
    with pytest.raises(ValueError, match="has checkpoints up to step 14"):
        fit(folder, resume=False)


def test_a_context_goes_back_to_the_newest_whole_checkpoint_of_a_run(tmp_path, caplog):
    folder = tmp_path / "run"

    def save(ctx):
        if ctx.step % 4 == 0:
            ctx.save(kv.Checkpoints(folder, keep_last=None), extra={"at": ctx.step})

    train(context(), loader(), until=12, after=save)
    damage(folder, 12)
    damage(folder, 8, "part-*")
    direct, ctx = context(), context()
    direct.load(folder / name(4))
    train(direct, loader(), epochs=2)
    with pytest.raises(DamagedCheckpointError):
        context().load(folder / name(8))
    assert ctx.load(folder) == {"at": 4}
    assert ctx.step == 4
    train(ctx, loader(), epochs=2)
    assert_same(ctx.model, direct.model)
    assert f"the 8 steps up to {name(12)} are lost" in caplog.text
    assert (folder / f"damaged-{name(12)}").exists()


def test_windows_are_not_skipped_after_a_fallback(tmp_path):
    """What is left to train follows from the checkpoint that a fit would resume from."""
    for day in range(3):
        folder = tmp_path / "data" / f"day={day}"
        folder.mkdir(parents=True)
        lines = [f"{user},{user % 7},0.5,{user % 2}" for user in range(day * 64, day * 64 + 64)]
        (folder / "a.csv").write_text("user,item,price,label\n" + "\n".join(lines) + "\n")
        (folder / "_SUCCESS").touch()
    (tmp_path / "data" / "_END").touch()

    def train_all():
        made = trainer(model(), checkpoints=kv.Checkpoints(tmp_path / "run", keep_last=None))
        windows = kv.data.Windows(tmp_path / "data", read=lambda path: kv.data.read(f"{path}/a.csv", 16))
        trained = []
        for window in made.remaining(windows):
            made.fit(window.loader)
            trained.append(window.name)
        return made, trained

    straight, trained = train_all()
    assert trained == ["day=0", "day=1", "day=2"]
    damage(tmp_path / "run", 12)
    again, trained = train_all()
    assert trained == ["day=2"]
    assert_same(again.model, straight.model)
