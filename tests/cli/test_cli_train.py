"""train, evaluate and predict: with a config and with a file, by options, and after a stop."""

import os
import re
import signal
import sys
from subprocess import PIPE

import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
import yaml
from forked_programs import ForkedProgram

import karvan as kv
from karvan.cli.target import Target

JOBS = ["config.yaml", "job.py"]


def _predictions(path):
    """What the Trainer itself predicts with the newest checkpoint."""
    job = Target(path, {}, {}).job(training=False)
    state = job.trainer.saver.latest().load(job.trainer.model)
    job.trainer.model.load_state_dict(state["model"])
    return torch.cat([output for output, _ in job.trainer.predict(job.eval_data)])


@pytest.mark.parametrize("job", JOBS)
def test_train_evaluate_and_predict_fit_together(run, place, job):
    path, out = place / job, place / "predictions.parquet"
    trained = run("train", path, "--json", "-", "--quiet")
    assert trained.code == 0
    result = trained.json
    assert (result["epoch"], result["step"], result["stopped"]) == (2, 48, None)

    evaluated = run("evaluate", path, "--checkpoint", result["checkpoint"], "--json", "-")
    assert evaluated.json["metrics"] == pytest.approx(result["evaluation"])
    assert evaluated.json["step"] == 48
    shown = run("evaluate", path)  # of the job's own folder
    assert f"{result['evaluation']['auc']:.4f}" in shown.out

    assert run("predict", path, "--checkpoint", place / "run", "--out", out).code == 0
    table = pyarrow.parquet.read_table(out)
    assert table.column_names == (
        ["user", "item", "prediction"] if job == "config.yaml" else ["user", "prediction"]
    )
    source = pyarrow.parquet.read_table(place / "eval.parquet")
    assert table["user"].to_pylist() == source["user"].to_pylist()
    assert torch.equal(torch.tensor(table["prediction"].to_numpy()), _predictions(path))


def test_predictions_as_csv_with_other_columns_and_probabilities(run, trained):
    ran = run("predict", trained / "config.yaml", "--out", "-", "--columns", "item", "--sigmoid")
    assert ran.code == 0
    table = pyarrow.csv.read_csv(pyarrow.BufferReader(ran.out.encode()))
    assert table.column_names == ["item", "prediction"]
    expected = _predictions(trained / "config.yaml").sigmoid()
    assert torch.allclose(torch.tensor(table["prediction"].to_numpy()).float(), expected, atol=1e-6)
    assert (
        run(
            "predict", trained / "config.yaml", "--out", trained / "p.csv", "--columns", "item", "--sigmoid"
        ).code
        == 0
    )
    assert (trained / "p.csv").read_text() == ran.out


def test_a_prediction_that_fails_leaves_the_file_as_it_was(run, trained):
    out = trained / "p.csv"
    out.write_text("before")
    assert run("predict", trained / "config.yaml", "--out", out, "--columns", "nonsense").code == 1
    ran = run("predict", trained / "config.yaml", "--out", out, "--columns", "history")
    assert ran.code == 2
    assert "history" in ran.err
    assert out.read_text() == "before"
    assert not list(trained.glob(".p.csv*"))


def test_other_data_is_evaluated(run, trained):
    half = trained / "half.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(trained / "eval.parquet").slice(0, 250), half)
    whole = run("evaluate", trained / "config.yaml", "--json", "-").json["metrics"]
    assert run("evaluate", trained / "config.yaml", "--data", half, "--json", "-").json["metrics"] != whole
    assert run("evaluate", trained / "config.yaml", "--data", trained / "none.parquet").code == 3
    (trained / "train.parquet").unlink()  # who evaluates need not have it
    assert run("evaluate", trained / "config.yaml", "--json", "-").json["metrics"] == whole


@pytest.mark.parametrize("job", JOBS)
def test_options_say_how_long_and_where_to(run, place, job):
    more = ["--quiet", "--json", "-", "--folder", place / "other"]
    assert run("train", place / job, "--max-steps", 5, *more).json["step"] == 5
    assert run("train", place / job, "--max-steps", 8, "--eval-every", 4, *more).json["trained"] == 3
    assert run("train", place / job, "--epochs", 1, *more).json["step"] == 24
    folders = {path.name for path in place.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {"other"}
    refused = run("train", place / job, "--no-resume", *more)
    assert refused.code == 2
    assert "up to step 24" in refused.err


def test_settings_reach_the_keys_of_a_config(run, place):
    more = ["--set", "train.max_steps=2", "--set", "model.dim=6", "--set", "optimizers.sparse.lr=1e-2"]
    assert run("train", place / "config.yaml", "--quiet", *more).code == 0
    seen = kv.checkpoint.summary(place / "run")
    assert (seen.step, {table.dim for table in seen.tables}) == (2, {6})


def test_settings_reach_the_parameters_of_a_job(run, place):
    more = ["--set", "widths=[4, 4]", "--set", "lr=0.5", "--max-steps", "2"]
    assert run("train", place / "job.py", "--quiet", *more).code == 0
    state = kv.checkpoint.find(place / "run").state()
    assert state["model"]["top.0.weight"].shape[0] == 4
    assert state["sparse_optimizer"]["param_groups"][0]["lr"] == 0.5


def _process(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "karvan", *map(str, arguments)]
    return ForkedProgram(command, stdout=PIPE, stderr=PIPE, env=environment)


def _goes_on(run, place, saved):
    until = ["--max-steps", saved + 3, "--epochs", 100_000]
    went_on = run("train", place / "job.py", *until, "--quiet", "--json", "-")
    assert (went_on.code, went_on.json["trained"]) == (0, 3)


def test_ctrl_c_saves_and_the_same_command_goes_on(run, place):
    process = _process("train", place / "job.py", "--epochs", 100_000, "--drop-unfinished")
    next(line for line in process.stderr if line.startswith("step "))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "checkpoint at" in err
    assert f"\nTo resume: karvan train {place / 'job.py'} --epochs 100000\n" in err
    assert "Traceback" not in err
    saved = kv.checkpoint.find(place / "run").step
    assert saved > 0
    _goes_on(run, place, saved)


def test_a_quiet_command_that_is_stopped_says_how_to_resume(run, place):
    ran = run("train", place / "job.py", "--set", "stop=13", "--quiet")
    assert ran.code == 143
    assert ran.err.splitlines()[1] == "Stopping after this step. Ctrl-C aborts at once."
    assert ran.err.splitlines()[2].startswith("To resume: karvan")


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (3, "error: Interrupted before a checkpoint was saved.\n"),
        (33, r"error: Interrupted. The newest checkpoint is of step \d+.\nTo resume: karvan"),
    ],
)
def test_a_second_ctrl_c_says_what_is_saved_and_how_to_resume(run, place, stop, says):
    job = place / "job.py"
    job.write_text(job.read_text().replace("os.kill(os.getpid(), 15)", "raise KeyboardInterrupt"))
    ran = run("train", job, "--set", f"stop={stop}", "--quiet")
    assert ran.code == 130
    assert re.match(says, ran.err)


def test_sigterm_saves_and_the_same_command_goes_on(run, place):
    ran = run("train", place / "job.py", "--set", "stop=13")
    assert ran.code == 143
    assert "Stopped by SIGTERM after step 13; checkpoint at" in ran.err
    _goes_on(run, place, 13)


def test_sigterm_in_a_fit_of_the_file_itself_ends_the_command(run, place):
    text = (place / "job.py").read_text().replace("def job(", "def made(")
    (place / "two.py").write_text(
        text + "\n\ndef job():\n    made(folder=None, stop=3).fit()\n    return made(folder=None)\n"
    )
    ran = run("train", place / "two.py", "--quiet")
    assert ran.code == 143
    assert "SIGTERM has ended the training of this program" in ran.err


@pytest.mark.slow
def test_after_kill_9_the_same_command_goes_on_from_the_last_checkpoint(run, place):
    process = _process("train", place / "job.py", "--epochs", 100_000)
    while not kv.Checkpoints(place / "run").list() and process.poll() is None:
        process.stderr.readline()
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    _goes_on(run, place, kv.checkpoint.find(place / "run").step)


def test_a_job_with_several_outputs_has_a_column_for_each(run, place):
    config = yaml.safe_load((place / "config.yaml").read_text())
    config["model"] = {
        "name": "MMoE",
        "numbers": ["price"],
        "ids": ["user", "item"],
        "tasks": ["a", "b"],
        "dim": 4,
    }
    config["loss"] = {
        "a": {"name": "BinaryCrossEntropy", "output": "a"},
        "b": {"name": "MeanSquaredError", "output": "b", "times": 0.5},
    }
    config["metrics"] = {
        "auc": {"name": "AUC", "output": "a"},
        "gauc": {"name": "GAUC", "group": "user", "output": "a"},
    }
    config["train"] = {"max_steps": 3}
    (place / "many.yaml").write_text(yaml.safe_dump(config))
    result = run("train", place / "many.yaml", "--quiet", "--json", "-").json
    assert set(result["evaluation"]) == {"loss", "loss/a", "loss/b", "auc", "gauc"}
    assert run("predict", place / "many.yaml", "--out", place / "p.parquet").code == 0
    assert pyarrow.parquet.read_schema(place / "p.parquet").names == ["user", "item", "a", "b"]


def test_the_demo_reloads_what_it_trained(run, tmp_path):
    ran = run("demo", "--rows", 10_000, "--folder", tmp_path, "--json", "-")
    assert ran.code == 0
    result = ran.json
    assert result["auc"] == result["reloaded_auc"]
    assert (result["samples"], result["folder"]) == (10_000, str(tmp_path))
    assert set(result["tables"]["user"]) == {"rejected", "inserted", "evicted", "rows", "bytes"}
    assert run("inspect", result["checkpoint"]).code == 0
    again = run("demo", "--rows", 10_000, "--folder", tmp_path)
    assert again.code == 2
    assert "without a run" in again.err


@pytest.mark.slow
def test_the_demo_has_millions_of_keys_and_comes_near_the_best_auc(run, tmp_path):
    result = run("demo", "--folder", tmp_path, "--json", "-").json
    assert result["auc"] > result["best_auc"] - 0.008
    cross = result["tables"]["user_x_item_x_hour"]
    assert cross["rejected"] > 3_000_000
    assert cross["inserted"] > 1_000_000
    assert cross["evicted"] > 500_000
    assert cross["rows"] <= 500_000


def test_a_run_says_how_to_look_at_it_and_that_works(place, run):
    ran = run("train", place / "config.yaml")
    assert ran.code == 0
    line = ran.err.splitlines()[-1]
    assert line == f"To look at the run: karvan plot {place / 'run'}"
    assert run(*line.split()[-2:]).code == 0
    assert (place / "run" / "plot.html").exists()


def test_a_config_freezes_tables_and_a_slip_in_their_names_is_an_error(run, place):
    ran = run("train", place / "config.yaml", "-q", "--json", "-", "--set", "train.frozen=[user, bottom]")
    assert ran.code == 0
    model = Target(place / "config.yaml", {}, {}).job(training=False).trainer.model
    state = kv.checkpoint.find(ran.json["checkpoint"]).load(model)["model"]
    fresh = Target(place / "config.yaml", {}, {}).job(training=False).trainer.model.state_dict()
    same = {
        name for name, value in fresh.items() if torch.is_tensor(value) and torch.equal(state[name], value)
    }
    assert same == {name for name in fresh if name.startswith("bottom.")}
    engines = run("train", place / "config.yaml", "-q", "--json", "-", "--set", "train.frozen=[embeddings]")
    assert "frozen names all tables of the model" in engines.err
    ran = run("train", place / "config.yaml", "--set", "train.frozen=usr")
    assert ran.code == 2
    assert "frozen names 'usr', but the model has no such table, parameter or module. Its tables" in ran.err


def test_a_config_without_an_optimizer_for_a_half_says_which_half_is_frozen(run, place):
    ran = run("train", place / "config.yaml", "--quiet", "--set", "optimizers.sparse=null")
    assert ran.code == 1
    assert "no sparse_optimizer: user, item, category" in ran.err
    tables = "train.frozen=[user, item, category]"
    without = ("--set", "optimizers.sparse=null", "--set", tables)
    assert run("train", place / "config.yaml", "--quiet", *without).code == 0
