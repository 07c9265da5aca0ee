"""`karvan import-checkpoint`: what it shows, its errors, and what remains if it is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from foreign_files import sign_of, write_persia, write_recis

import karvan as kv


@pytest.fixture
def recis(tmp_path):
    slots = {"id": [1, 2, 3], "embedding": torch.ones(3, 2), "sparse_adagrad_state_sum": torch.ones(3, 2)}
    net = torch.nn.Linear(2, 1).state_dict()
    return write_recis(tmp_path / "recis", {"item": slots}, dense=net, extra={"global_step": 30})


@pytest.fixture
def persia(tmp_path):
    rows = [(sign_of(key, 0), torch.ones(2), torch.ones(4)) for key in range(5)]
    (tmp_path / "slots.yml").write_text(yaml.safe_dump({"slots_config": {"user": {"dim": 2}}}))
    return write_persia(tmp_path / "persia", rows)


def test_recis(run, recis, tmp_path):
    ran = run("import-checkpoint", "--from", "recis", str(recis), str(tmp_path / "out"))
    assert ran.code == 0, ran.err
    assert "imported from RecIS, step 30" in ran.out
    assert "Adagrad" in ran.out
    assert "dense: 2 tensors" in ran.out
    assert "note: extra.pt has no dense optimizer: its state is not imported." in ran.err
    seen = run("inspect", str(tmp_path / "out"), "--json", "-")
    content = json.loads(seen.out)
    assert [(table["name"], table["rows"]) for table in content["tables"]] == [("item", 3)]
    assert run("inspect", str(tmp_path / "out"), "--verify").code == 0
    assert "used 1 times, last in step 30" in run("inspect", str(tmp_path / "out"), "--key", "item", "2").out


def test_persia(run, persia, tmp_path):
    arguments = ["--from", "persia", str(persia), str(tmp_path / "out"), "--step", "7", "--json", "-"]
    ran = run("import-checkpoint", *arguments, "--embedding-config", str(tmp_path / "slots.yml"))
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["tables"] == [
        {"name": "user", "dim": 2, "dtype": "float32", "optimizer": "Adam", "state": 4, "rows": 5}
    ]
    assert made["step"] == 7
    assert any("PERSIA takes ids modulo" in note for note in made["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            ["--from", "tensorflow", "{recis}", "{new}"],
            2,
            "Expected --from recis | persia, got 'tensorflow'.",
        ),
        (["--from", "persia", "{persia}", "{new}"], 2, "--from persia expects --embedding-config FILE"),
        (
            ["--from", "recis", "{recis}", "{new}", "--optimizer", "adam"],
            2,
            "--optimizer is for --from persia, got --from recis.",
        ),
        (
            ["--from", "persia", "{persia}", "{new}", "--betas", "0.9", "0.9"],
            2,
            "--betas is for --from recis, got --from persia.",
        ),
        (
            ["--from", "recis", "{recis}", "{new}", "--betas", "1", "2"],
            2,
            "--betas expects two numbers between 0",
        ),
        (
            ["--from", "persia", "{persia}", "{new}", "--embedding-config", "{slots}", "--optimizer", "sgd"],
            2,
            "--optimizer expects adam, adagrad, adagrad_by_row, got 'sgd'.",
        ),
        (
            ["--from", "recis", "s3://bucket/run", "{new}"],
            2,
            "expected a folder of this machine, got the URL",
        ),
        (["--from", "recis", "{recis}", "{recis}"], 3, "expected a folder that does not exist yet"),
        (["--from", "recis", "{persia}", "{new}"], 3, "expected a RecIS checkpoint, with the file 'index'"),
        (
            ["--from", "persia", "{recis}", "{new}", "--embedding-config", "{slots}"],
            3,
            "expected a PERSIA checkpoint, with the file 'embedding_dump_done'",
        ),
        (
            ["--from", "persia", "{persia}", "{new}", "--embedding-config", "{new}"],
            2,
            "Expected PERSIA's embedding_config.yml at",
        ),
    ],
)
def test_wrong_input_is_an_error_without_a_traceback(run, recis, persia, tmp_path, arguments, code, text):
    places = {"recis": recis, "persia": persia, "new": tmp_path / "new", "slots": tmp_path / "slots.yml"}
    ran = run("import-checkpoint", *(each.format(**places) for each in arguments))
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("error: ")
    assert text in ran.err
    assert "Traceback" not in ran.err
    assert "karvan/" not in ran.err.replace(str(tmp_path), "")
    assert not (tmp_path / "new").exists()


def test_an_import_that_is_killed_leaves_nothing_that_looks_whole(tmp_path):
    """Killed while rows are divided; the next import removes what it has left."""
    count = 300_000
    slots = {"id": list(range(count)), "embedding": torch.rand(count, 16)}
    source = write_recis(tmp_path / "ckpt", {"item": slots})
    target = tmp_path / "runs" / "out"
    command = [
        sys.executable,
        "-m",
        "karvan",
        "import-checkpoint",
        "--from",
        "recis",
        str(source),
        str(target),
    ]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(target.parent.glob(".out.tmp-*/rows/*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the import was complete before it could be killed"
    assert not target.exists()
    assert list(target.parent.glob(".out.tmp-*"))
    kv.checkpoint.import_recis(source, target)
    assert not list(target.parent.glob(".out.tmp-*"))
    assert kv.checkpoint.verify(target) == []
    assert kv.checkpoint.summary(target).tables[0].rows == count
