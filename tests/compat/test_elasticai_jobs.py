"""Loops of elasticai_api with several workers: gradients are averaged, also while workers are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support_paths import support_path

from karvan.compat.elasticdl.commands import make_program_spec, parse, parse_job_command
from karvan.compat.elasticdl.contract import ContractError

PROGRAM = support_path("compat/elastic_loop_program.py")


class LoopJob:
    """The program as a job in a process of its own."""

    def __init__(self, folder, command, pause, *flags):
        self.notes, self.log = folder / "notes", folder / "log"
        self.notes.mkdir()
        line = [sys.executable, "-m", "karvan", "run", "--as", "elasticdl", "train"]
        line += ["--job_command", f"python {command}", "--num_workers", "2", *flags]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*line, "--envs", f"NOTES={self.notes},PAUSE={pause}"],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def workers(self):
        """Living workers that have made a step."""
        found = [int(path.name.removeprefix("step-")) for path in self.notes.glob("step-*")]
        return [pid for pid in found if Path(f"/proc/{pid}").exists()]

    def wait_for(self, condition):
        until = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def finish(self):
        """Wait for the end: what the workers have, one for each."""
        (self.notes / "hurry").touch()
        assert self.process.wait(180) == 0, self.log.read_text()
        return [json.loads(path.read_text()) for path in self.notes.glob("end-*")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.mark.slow
def test_workers_average_their_gradients_and_others_continue_when_one_is_killed(tmp_path):
    records, epochs, size = 240, 2, 4
    with LoopJob(tmp_path, f"{PROGRAM} {records} {epochs} {size}", pause=0.4) as job:
        job.wait_for(lambda: len(job.workers()) == 2)
        killed = max(job.workers())
        os.kill(killed, signal.SIGKILL)
        job.wait_for(lambda: killed not in job.workers() and len(job.workers()) == 2)  # another one trains
        ends = job.finish()
    newest = ends[0]
    batches = records * epochs // size
    # The last batch of the worker that was killed may be in a step, and is trained again.
    assert batches <= newest["batches"] <= batches + 1, job.log.read_text()
    extra = sum(newest["times"]) - records * epochs
    assert extra == size * (newest["batches"] - batches)
    assert min(newest["times"]) == epochs
    assert max(newest["times"]) <= epochs + 1
    # A mean of gradients of 1 in every step, from what the first worker of all began with.
    assert newest["drift"] - newest["steps"] in (0.0, 1e6)
    assert batches / 2 <= newest["steps"] < batches
    assert len(ends) == 2
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_an_example_of_images_trains_each_of_them_while_a_worker_is_killed(tmp_path):
    images, epochs, size = 192, 2, 8
    program = support_path("compat/elastic_images_program.py")
    command = f"{program} --batch_size {size} --num_epochs {epochs} --images {images}"
    flags = ("--custom_training_loop=true", "--distribution_strategy=AllreduceStrategy", "--image_name=mnist")
    with LoopJob(tmp_path, command, 0.4, *flags, "--num_minibatches_per_task=2") as job:
        job.wait_for(lambda: len(job.workers()) == 2)
        os.kill(max(job.workers()), signal.SIGKILL)
        ends = job.finish()
    batches = images * epochs // size
    trained = Counter(int(each) for path in job.notes.glob("step-*") for each in path.read_text().split())
    # Batches of the killed worker that were in the last step, and are not noted or not reported.
    assert set(trained) == set(range(images))
    assert images * epochs - size <= trained.total() <= images * epochs + size
    for each in ends:  # those of one or two workers: the killed one is replaced, maybe too late to train
        assert {**each, "right": 1.0} == {**ends[0], "right": 1.0}
        assert batches <= each["batches"] <= batches + 1
        assert (each["epoch"], each["workers"]) == (epochs, "2")
    assert max(each["right"] for each in ends) > 0.9
    changes = {path: path.read_text().split().count("1") for path in job.notes.glob("changes-*")}
    assert max(changes.values()) <= batches / 2 + 1  # steps have two batches, also of one worker


@pytest.mark.slow
def test_a_module_of_this_folder_is_run_as_a_job(tmp_path):
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "sizes.py").write_text("RECORDS = 12\n")
    (package / "loop.py").write_text(
        "import sys\n"
        "from zoo.sizes import RECORDS\n"
        "from elasticai_api.common.data_shard_service import build_data_shard_service\n"
        "service = build_data_shard_service(4, 1, RECORDS)\n"
        "while (shard := service.fetch_shard()) is not None:\n"
        "    print(sys.argv[1], len(shard.numbers()), flush=True)\n"
        "    service.report_batch_done(len(shard.numbers()))\n"
    )
    line = [sys.executable, "-m", "karvan", "run", "--as", "elasticdl", "train", "--num_workers", "1"]
    command = ["--job_command", "python -m zoo.loop trained"]
    done = subprocess.run([*line, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "trained 12" in done.stdout


def test_a_command_is_a_job_of_workers_that_come_and_go(tmp_path, monkeypatch):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "loop.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for text in ("python zoo/loop.py --a 'b c'", "python3 -m zoo.loop --a 'b c'", "zoo/loop.py --a 'b c'"):
        flags = parse_job_command(["--job_command", text, "--num_workers", "3", "--envs", "A=1"])
        kind = "module" if "-m" in text else "program"
        assert flags.program == [kind, str(tmp_path / "zoo" / "loop.py"), "--a", "b c"]
    spec = make_program_spec(flags)
    assert (spec.mode, spec.sharding, spec.roles.parameter_servers.replicas) == ("sync", "dynamic", 0)
    assert (spec.roles.trainers.min, spec.roles.trainers.max) == (1, 3)
    assert spec.roles.trainers.env.items() >= {"A": "1", "WORKER_NUM": "3"}.items()
    with pytest.raises(ContractError, match=r"expects python program\.py"):
        parse_job_command(["--job_command", "python other.py"])
    with pytest.raises(ContractError, match="unrecognized arguments: --model_zooo"):
        parse_job_command(["--job_command", "python zoo/loop.py", "--model_zooo", "zoo"])
    with pytest.raises(ContractError, match="has its own training loop"):
        parse_job_command(["--job_command", "python zoo/loop.py", "--need_elasticdl_job_service=true"])


def test_flags_of_published_commands_are_known_and_those_without_meaning_are_warnings(tmp_path):
    program = tmp_path / "loop.py"
    program.write_text("")
    silent = ["--num_minibatches_per_task=2", "--num_epochs=3", "--custom_training_loop=true"]
    silent += ["--need_elasticdl_job_service=false", "--task_fault_tolerance", "--need_pod_manager=True"]
    silent += ["--need_task_manager=true", "--relaunch_timeout_worker=true"]
    warned = {
        "need_tf_config": "without pods",
        "worker_image": "without pods",
        "ps_image": "without pods",
        "populate_env_names": "without pods",
        "relaunch_on_worker_failure": "is replaced",
        "training_data": "gets its own arguments",
    }
    words = [f"--job_command=python {program}", *silent, *(f"--{name}=false" for name in warned)]
    with pytest.warns(UserWarning, match="has no meaning here") as caught:
        spec = make_program_spec(parse_job_command(words))
    texts = [str(each.message) for each in caught]
    assert len(texts) == len(warned)
    for name, reason in warned.items():
        assert any(text.startswith(f"--{name} has no meaning") and reason in text for text in texts)
    expected = {"ELASTICDL_NUM_EPOCHS": "3", "ELASTICDL_NUM_MINIBATCHES_PER_TASK": "2", "WORKER_NUM": "2"}
    assert spec.roles.trainers.env == expected
    with pytest.warns(UserWarning, match="task_fault_tolerance has no meaning here: .* is replaced"):
        parse_job_command([f"--job_command=python {program}", "--task_fault_tolerance=false"])
    model = ["--model_zoo=zoo", "--model_def=a.b.C", "--training_data=x", "--distribution_strategy=Local"]
    with pytest.raises(ContractError, match="expected --job_command"):
        parse("train", [*model, "--need_elasticdl_job_service=false"])
    with pytest.raises(ContractError, match=r"max_step is not supported: .*MaxStepsStopping"):
        parse("train", [*model, "--max_step=3"])
