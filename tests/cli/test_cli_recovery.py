"""Damaged checkpoints on the command line: the newest whole one is taken, or the exit code is 3."""

import os

import pytest


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def stopped(run, place):
    """A run with checkpoints of steps 10 and 20."""
    for steps in ("10", "20"):
        assert run("train", place / "config.yaml", "--quiet", "--max-steps", steps).code == 0
    assert sorted(os.listdir(place / "run"))[-2:] == ["step-000000000010", "step-000000000020"]
    return place


def test_train_takes_the_newest_whole_checkpoint_and_inspect_shows_the_damaged_one(run, stopped, caplog):
    _flip(stopped / "run" / "step-000000000020" / "dense.safetensors")
    (stopped / "run" / "step-000000000030").mkdir()
    ran = run("train", stopped / "config.yaml", "--quiet", "--max-steps", "12", "--json", "-")
    assert ran.code == 0
    assert (ran.json["step"], ran.json["trained"]) == (12, 2)
    assert "the 10 steps up to step-000000000020 are lost" in caplog.text
    assert "step-000000000030 is empty" in caplog.text
    shown = run("inspect", stopped / "run")
    assert shown.code == 0
    assert "step 12" in shown.out
    told = run("inspect", stopped / "run", "--json", "-").json["not_whole"]
    assert [(each["step"], each["condition"]) for each in told] == [(30, "incomplete"), (20, "damaged")]


def test_no_whole_checkpoint_exits_with_3(run, stopped):
    folder = stopped / "run"
    for each in folder.glob("step-*"):
        (each / "manifest.json").unlink()
    before = sorted(os.listdir(folder))
    ran = run("train", stopped / "config.yaml", "--quiet")
    assert ran.code == 3
    assert "expected an intact checkpoint, got 2 damaged: step-000000000020, step-000000000010" in ran.err
    assert sorted(os.listdir(folder)) == before
    shown = run("inspect", folder)
    assert shown.code == 3
    assert "step-000000000020 is incomplete" in shown.err


def test_a_checkpoint_can_be_chosen(run, stopped):
    def train(*options):
        return run("train", stopped / "config.yaml", "--quiet", "--json", "-", *options)

    missing = train("--resume-from", "step-000000000015")
    assert missing.code == 3
    assert "there are: step-000000000010, step-000000000020" in missing.err
    assert train("--resume-from", "15").code == 2
    assert train("--resume-from", "step-000000000010", "--no-resume").code == 2
    chosen = train("--resume-from", "step-000000000010", "--max-steps", "14")
    assert (chosen.json["step"], chosen.json["trained"]) == (14, 4)
    assert (stopped / "run" / "abandoned-step-000000000020").exists()
