"""ElasticDL's strategies: workers of a contract as jobs, also while they are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from digits_recordio import write_digits
from support_paths import support_path

import karvan as kv
from karvan.cli.main import main
from karvan.compat.elasticdl.commands import make_spec, parse

ZOO = ("--model_zoo", str(support_path("compat/counting_model.py").parent))
MODEL = (*ZOO, "--model_def", "counting_model.CustomModel")
RECORDS = 300


class Job:
    """A command of ElasticDL in a process of its own, and the notes of its workers."""

    def __init__(self, folder, command, *words, pause=0.0):
        self.folder, self.log = folder, folder / f"{command}.log"
        self.notes = folder / "notes"
        self.notes.mkdir(exist_ok=True)
        if not (folder / "data").exists():
            (folder / "data").mkdir()
            with kv.data.RecordIOWriter(folder / "data" / "numbers") as writer:
                for number in range(RECORDS):
                    writer.write(str(number).encode())
        envs = f"NOTES={self.notes},PAUSE={pause}"
        line = [sys.executable, "-m", "karvan", "run", "--as", "elasticdl", command, *MODEL]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*line, "--envs", envs, *map(str, words)], stdout=output, stderr=subprocess.STDOUT
            )

    def steps(self):
        """The steps that living workers have noted last, by process."""
        found = {int(path.name.removeprefix("step-")): path for path in self.notes.glob("step-*")}
        living = {pid: path for pid, path in found.items() if Path(f"/proc/{pid}").exists()}
        return {pid: int(path.read_text() or 0) for pid, path in living.items()}

    def wait_for(self, condition):
        until = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def finish(self):
        """Wait for the end: the log."""
        (self.notes / "hurry").touch()
        code = self.process.wait(180)
        assert code == 0, self.log.read_text()
        return self.log.read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def train_words(folder, *words):
    sizes = ("--minibatch_size", 8, "--num_minibatches_per_task", 2, "--num_epochs", 2)
    return ("--training_data", folder / "data", "--output", folder / "model", *sizes, *words)


def times(folder):
    (counted,) = kv.checkpoint.find(folder / "model").state()["model"].values()
    return counted.tolist()


STRATEGIES = [
    ("ParameterServerStrategy", "--num_ps_pods", "2"),
    ("ParameterServerStrategy", "--use_async=true", "--lr_staleness_modulation=false"),
    ("AllreduceStrategy",),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["sync", "async", "allreduce"])
def test_workers_train_every_record_once_in_an_epoch_while_they_are_killed(tmp_path, strategy):
    words = train_words(tmp_path, "--distribution_strategy", *strategy, "--num_workers", 2)
    with Job(tmp_path, "train", *words, pause=0.5) as job:
        for _ in range(2):
            job.wait_for(lambda: len(job.steps()) == 2)
            os.kill(next(iter(job.steps())), signal.SIGKILL)
            job.wait_for(lambda: len(job.steps()) == 1)
        log = job.finish()
    assert log.count("was killed by SIGKILL; the others continue, and it is restarted.") == 2
    assert times(tmp_path) == [2.0] * RECORDS


@pytest.mark.slow
def test_a_trained_model_is_evaluated_and_predicted_by_workers(tmp_path):
    with Job(
        tmp_path, "train", *train_words(tmp_path, "--distribution_strategy", "AllreduceStrategy")
    ) as job:
        job.finish()
    load = ("--checkpoint_dir_for_init", tmp_path / "model", "--minibatch_size", 16)
    with Job(tmp_path, "evaluate", *load, "--validation_data", tmp_path / "data") as job:
        assert "loss: 3\n" in job.finish()
    with Job(tmp_path, "predict", *load, "--prediction_data", tmp_path / "data") as job:
        job.finish()
    predicted = [path.read_text().split() for path in (tmp_path / "notes").glob("predicted-*")]
    assert [value for each in predicted for value in each] == ["2"] * RECORDS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["sync", "async", "allreduce"])
def test_the_seeds_cnn_learns_digits_under_every_strategy(tmp_path, capfd, strategy):
    digits = write_digits(tmp_path / "digits", 0, 500, files=3)
    model = (*ZOO, "--model_def", "mnist_cnn.CustomModel", "--minibatch_size", "16")
    data = ("--training_data", digits, "--num_epochs", "3", "--output", str(tmp_path / "model"))
    words = ("--distribution_strategy", *strategy, "--num_minibatches_per_task", "2")
    assert main(["run", "--as", "elasticdl", "train", *model, *data, *words]) == 0
    capfd.readouterr()
    load = ("--validation_data", digits, "--checkpoint_dir_for_init", str(tmp_path / "model"))
    assert main(["run", "--as", "elasticdl", "evaluate", *model, *load]) == 0
    assert float(capfd.readouterr().out.split("accuracy: ")[1].split()[0]) > 0.9


@pytest.mark.slow
def test_an_error_of_the_contract_ends_the_job_with_its_text(tmp_path):
    with Job(tmp_path, "train", *train_words(tmp_path), "--feed", "prepare") as job:
        assert job.process.wait(120) == 2
    log = job.log.read_text()
    assert "must define a function feed(records, mode, metadata), but has no 'prepare'" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_step_of_so_many_gradients(tmp_path):
    words = train_words(tmp_path, "--grads_to_wait", 1, "--sync_version_tolerance", 4)
    with Job(tmp_path, "train", *words) as job:
        log = job.finish()
    assert "600 samples" in log
    assert times(tmp_path) == [2.0] * RECORDS


def spec_of(command, *words):
    given = [*MODEL, *words]
    data = {"train": "training", "evaluate": "validation", "predict": "prediction"}[command]
    given += [f"--{data}_data", "data"]
    given += [] if command == "train" else ["--checkpoint_dir_for_init", "model"]
    return make_spec(command, parse(command, given), given)


def test_strategies_are_jobs():
    spec = spec_of("train")
    assert (spec.mode, spec.sharding, spec.roles.parameter_servers.replicas) == ("sync", "dynamic", 1)
    assert (spec.roles.trainers.min, spec.roles.trainers.max) == (1, 2)
    assert spec.checkpoints is None
    spec = spec_of("train", "--use_async", "--lr_staleness_modulation", "--get_model_steps", "3")
    assert (spec.mode, spec.dense.lr_staleness, spec.dense.pull_every) == ("async", True, 3)
    spec = spec_of("train", "--num_workers", "3", "--grads_to_wait", "3", "--envs", "A=1")
    assert (spec.mode, spec.sharding, spec.roles.trainers.env) == ("sync", "dynamic", {"A": "1"})
    spec = spec_of("train", "--num_workers", "3", "--grads_to_wait", "2", "--checkpoint_dir", "run")
    assert (spec.mode, spec.sharding, spec.roles.trainers.varies) == ("async", "static", False)
    assert (spec.dense.grads_to_wait, spec.dense.tolerance, str(spec.checkpoints)) == (2, 0, "run")
    spec = spec_of("train", "--distribution_strategy", "AllreduceStrategy", "--job_name", "digits")
    assert (spec.mode, spec.roles.parameter_servers.replicas, spec.name) == ("sync", 0, "digits")
    assert spec_of("evaluate").sharding == "static"
    assert spec_of("predict").sharding == "dynamic"
