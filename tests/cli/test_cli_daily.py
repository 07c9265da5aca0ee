"""karvan train day by day: the data of the config changes, the folder stays; and warm starts of a config."""

import signal
import subprocess
import sys
import time

import pyarrow.parquet
import pytest
import torch
import yaml
from forked_programs import ForkedProgram

import karvan as kv

CONFIG = """
data: {{train: {folder}/day=15, batch_size: 32, shuffle: 500}}
model: {{name: DLRM, numbers: [price], ids: [user, item], dim: 4, bottom: [8], top: [8]}}
optimizers:
  dense: {{name: Adam, lr: 1e-2}}
  sparse: {{name: Adagrad, lr: 0.1}}
  schedule: {{name: StepLR, step_size: 50, gamma: 0.5}}
checkpoints: {{folder: {folder}/run, every: 20, keep_last: null}}
"""
STEPS = 60


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """A folder for each day, whose files have equal names and sizes."""
    folder = tmp_path_factory.mktemp("days")
    log = kv.data.synthetic.ClickLog(seed=1, users=50, items=30)
    for day in (15, 16, 17):
        (folder / f"day={day}").mkdir()
        table = log.table(day * 10_000, 32 * STEPS)
        pyarrow.parquet.write_table(table, folder / f"day={day}" / "part-0.parquet")
    return folder


@pytest.fixture
def config(days, tmp_path):
    for day in days.iterdir():
        (tmp_path / day.name).symlink_to(day)
    path = tmp_path / "my.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def change_day(config, day):
    """What somebody does who edits the config."""
    given = yaml.safe_load(config.read_text())
    given["data"]["train"] = str(config.parent / f"day={day}")
    config.write_text(yaml.safe_dump(given))


def finish(run, config, folder):
    ran = run("train", config, "--folder", folder, "--quiet", "--json", "-")
    assert ran.code == 0, ran.err
    return ran.json


def end_of(folder):
    """All numbers of the newest checkpoint."""
    checkpoint = kv.checkpoint.find(folder)
    state = checkpoint.state()
    tensors = {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
    numbers = {name: value.tolist() for name, value in tensors.items()}
    for table in checkpoint.manifest.tables:
        numbers[table] = [[part.tobytes() for part in rows] for rows in checkpoint.parts(table)]
    return numbers, state["scheduler"], state["trainer"], state["dense_optimizer"]["param_groups"]


def test_three_days_with_a_kill_in_the_second_end_like_three_days_without(run, config):
    killed, straight = config.parent / "killed", config.parent / "straight"
    for day in (15, 16, 17):
        change_day(config, day)
        result = finish(run, config, straight)
        assert (result["step"], result["epoch"], result["trained"]) == (STEPS * (day - 14), 1, STEPS)

    change_day(config, 15)
    finish(run, config, killed)
    change_day(config, 16)
    command = [sys.executable, "-m", "karvan", "train", str(config), "--folder", str(killed), "--quiet"]
    process = ForkedProgram(command, stderr=subprocess.PIPE)
    while not any(each.step > STEPS for each in kv.Checkpoints(killed).list()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)  # for the file system, which tells nobody
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    saved = kv.checkpoint.find(killed).step
    assert STEPS < saved < 2 * STEPS

    change_day(config, 17)  # too early: the second day is not finished
    refused = run("train", config, "--folder", killed, "--quiet")
    assert refused.code == 2
    assert f"0 epochs and {saved - STEPS} batches of the next one, of 1 epoch" in refused.err
    assert "--drop-unfinished" in refused.err

    for day in (16, 17):
        change_day(config, day)
        result = finish(run, config, killed)
    assert result["step"] == 3 * STEPS
    assert end_of(killed) == end_of(straight)


def test_the_rest_of_a_day_can_be_dropped(run, config):
    assert run("train", config, "--max-steps", 30, "--quiet").code == 0
    given = ["--set", "train.max_steps=40", "--quiet", "--json", "-"]
    job = config.with_name("job.py")
    job.write_text(
        "import karvan as kv\nfrom pathlib import Path\nfrom karvan.cli.target import Target\n"
        "class Stop(kv.callbacks.Callback):\n"
        "    def on_step_end(self, trainer, logs):\n"
        "        trainer.stop('enough')\n"
        "def job():\n"
        f"    made = Target(Path({str(config)!r}), {{}}, {{}}).job()\n"
        "    made.trainer.callbacks = kv.callbacks.Callbacks([Stop()])\n"
        "    return made\n"
    )
    change_day(config, 16)
    assert run("train", job, "--quiet", "--json", "-").json["step"] == 31
    change_day(config, 17)
    assert run("train", config, *given).code == 2
    dropped = run("train", config, *given, "--drop-unfinished")
    assert (dropped.json["step"], dropped.json["trained"]) == (71, 40)
    assert run("train", config, *given, "--drop-unfinished").json["trained"] == 0


def test_a_warm_start_of_a_config_is_shown_and_not_repeated(run, config):
    assert run("train", config, "--max-steps", 5, "--quiet").code == 0
    new = yaml.safe_load(config.read_text())
    new["model"]["ids"] = ["user", "item", "category"]
    new["model"]["top"] = [6]
    new["checkpoints"]["folder"] = str(config.parent / "new")
    new["train"] = {
        "max_steps": 3,
        "warm_start": {"path": str(config.parent / "run"), "tables": "*", "dense": "bottom.*"},
    }
    config.write_text(yaml.safe_dump(new))
    first = run("train", config)
    assert first.code == 0
    assert f"Warm start from {config.parent}/run/step-000000000005, step 5" in first.err
    assert "table category" in first.err
    assert "not from the checkpoint: keeps its initial values" in first.err
    state = kv.checkpoint.find(config.parent / "new").state()
    assert state["trainer"]["step"] == 3
    again = run("train", config, "--max-steps", 6)
    assert again.code == 0
    assert "Warm start" not in again.err


def test_the_rows_of_a_warm_start_are_the_checkpoints(run, config):
    assert run("train", config, "--quiet", "--max-steps", 50).code == 0
    old = kv.checkpoint.find(config.parent / "run")
    more = ["--set", f"train.warm_start={{path: {config.parent}/run}}", "--folder", config.parent / "new"]
    assert run("train", config, "--quiet", "--max-steps", 1, *more).code == 0
    new = kv.checkpoint.find(config.parent / "new")
    changed = sum(
        new.row("user", int(key)).vectors.tobytes() != old.row("user", int(key)).vectors.tobytes()
        for rows in old.parts("user")
        for key in rows.keys
    )
    assert changed <= 32  # what one batch trains


def test_a_wrong_warm_start_is_an_error_before_training(run, config):
    old, new = config.parent / "run", config.parent / "new"
    assert run("train", config, "--quiet", "--max-steps", 2).code == 0
    for value, code, said in (
        ("{path: nowhere}", 3, "nowhere"),
        (f"{{path: {old}, tables: usr*}}", 3, "a table like 'usr*'"),
        (f"{{path: {old}, rows: 3}}", 2, "rows"),
        (str(old), 2, "warm_start"),
    ):
        ran = run("train", config, "--folder", new, "--set", f"train.warm_start={value}")
        assert (ran.code, said in ran.err) == (code, True), ran.err
    assert kv.Checkpoints(new).list() == []


def test_a_day_whose_ids_became_text_is_an_error_in_every_command(run, tmp_path):
    def write(name, zips):
        rows = "".join(f"{number % 2},1.5,{zip_}\n" for number, zip_ in enumerate(zips))
        (tmp_path / name).write_text("label,price,zip\n" + rows)

    write("numbers.csv", ["10115", "20095"])
    write("text.csv", ["10115", "V3N4P"])
    config = tmp_path / "my.yaml"
    config.write_text(f"""
data: {{train: {tmp_path}/numbers.csv, eval: {tmp_path}/numbers.csv, batch_size: 2}}
features: {{zip: [{{hash: farm}}]}}
model: {{name: DLRM, numbers: [price], ids: [zip], dim: 4, bottom: [8], top: [8]}}
optimizers: {{dense: {{name: Adam}}, sparse: {{name: Adagrad, lr: 0.1}}}}
checkpoints: {{folder: {tmp_path}/run}}
""")
    assert run("train", config, "--quiet").code == 0
    warm_start = ["--folder", tmp_path / "new", "--set", f"train.warm_start={{path: {tmp_path}/run}}"]
    text = ["--set", f"data.train={tmp_path}/text.csv", "--set", f"data.eval={tmp_path}/text.csv"]
    commands = [
        ["train", config, "--quiet", *text],
        ["train", config, "--quiet", *text, *warm_start],
        ["evaluate", config, "--data", tmp_path / "text.csv"],
        ["predict", config, "--data", tmp_path / "text.csv", "--out", tmp_path / "out.csv"],
    ]
    for command in commands:
        ran = run(*command)
        assert ran.code == 3, (command, ran.err)
        assert "column 'zip': Expected numbers" in " ".join(ran.err.split())
        assert "numbers.csv" in ran.err
