"""A run's folder belongs to one process that trains: others are refused, readers are not."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from forked_programs import run_forked
from support_paths import support_path
from test_kill import start, wait_for_step
from train_helpers import Small, batches, trainer

import karvan as kv
from karvan.owner import LeaseLostError, OwnerError

FILE = ".karvan-owner.json"
OWNER = support_path("owner/owner_program.py")


class Do(kv.callbacks.Callback):
    """Does something at a step."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step_end(self, trainer, logs):
        if logs.step == self.step:
            self.do()


@contextmanager
def owned_by_another(folder):
    """A process that owns the folder."""
    with subprocess.Popen(
        [sys.executable, OWNER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def own_in_a_process(folder):
    """What another process gets that wants to train there."""
    done = subprocess.run(
        [sys.executable, OWNER, folder], input="", capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def test_a_second_fit_on_a_folder_is_refused_with_the_first_ones_name_and_a_killed_one_is_replaced(tmp_path):
    # Forks do not have the command line that the error names.
    with start(tmp_path, 2000, partial(subprocess.Popen, text=True)) as first:
        wait_for_step(first, 3)
        made = trainer(Small(), checkpoints=tmp_path)
        with pytest.raises(OwnerError, match=rf"process {first.pid} .*fit_process\.py"):
            made.fit(batches(4))
        assert made.step == 0
        first.kill()
        first.communicate()
        assert made.fit(batches(4), drop_unfinished=True).step >= 4
    assert not (tmp_path / FILE).exists()


def test_a_folder_is_owned_while_a_fit_lasts_and_no_longer(tmp_path):
    seen = []
    made = trainer(
        Small(), checkpoints=tmp_path, callbacks=[Do(2, lambda: seen.append(own_in_a_process(tmp_path)))]
    )
    made.fit(batches(4))
    assert seen[0].startswith("refused: ")
    assert f"process {os.getpid()} " in seen[0]
    assert own_in_a_process(tmp_path) == "owned\n"


def test_a_fit_that_fails_gives_its_folder_free(tmp_path):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(Small(), checkpoints=tmp_path, callbacks=[Do(2, fail)]).fit(batches(4))
    assert own_in_a_process(tmp_path) == "owned\n"


def test_trainers_of_one_process_may_share_a_folder(tmp_path):
    inner = trainer(Small(), checkpoints=tmp_path)
    outer = trainer(Small(), checkpoints=tmp_path, callbacks=[Do(2, lambda: inner.fit(batches(2)))])
    outer.fit(batches(4), max_steps=4)
    assert own_in_a_process(tmp_path) == "owned\n"


def test_reading_needs_no_lease(tmp_path):
    trainer(Small(), checkpoints=tmp_path).fit(batches(4))
    with owned_by_another(tmp_path):
        made = trainer(Small(), checkpoints=tmp_path)
        made.load()
        assert made.evaluate(batches(2))
        assert list(made.predict(batches(2)))
        assert repr(kv.Checkpoints(tmp_path).latest())
        with pytest.raises(OwnerError):
            made.fit(batches(4))


def test_a_fit_whose_folder_was_taken_over_saves_nothing_more(tmp_path):
    before = []

    def take_over():
        made.saver._checkpoints.wait()
        before.extend(saved())
        record = (tmp_path / FILE).read_text()
        (tmp_path / FILE).unlink()
        (tmp_path / FILE).write_text(record.replace(json.loads(record)["id"], "0" * 32))

    def saved():
        return sorted(name for name in os.listdir(tmp_path) if name.startswith("step-"))

    made = trainer(Small(), checkpoints=tmp_path, checkpoint_every=3, callbacks=[Do(5, take_over)])
    with pytest.raises(LeaseLostError, match="taken over by process"):
        made.fit(batches(40))
    assert saved() == before != []
    assert json.loads((tmp_path / FILE).read_text())["id"] == "0" * 32


def test_a_context_owns_the_folder_it_saves_to(tmp_path):
    def context():
        dense = partial(torch.optim.SGD, lr=0.1)
        return kv.TrainContext(Small(), sparse_optimizer=kv.optim.SGD(lr=0.1), dense_optimizer=dense)

    with owned_by_another(tmp_path), context() as one, pytest.raises(OwnerError, match="owner_program"):
        one.save(tmp_path)
    with context() as one:
        one.save(tmp_path)
        assert own_in_a_process(tmp_path).startswith("refused")
    assert own_in_a_process(tmp_path) == "owned\n"


def test_karvan_train_says_it_in_one_line_with_code_2(tmp_path):
    folder, job = tmp_path / "run", tmp_path / "job.py"
    job.write_text(
        "from train_helpers import Small, batches, trainer\n"
        "import karvan as kv\n"
        "def job(folder: str):\n"
        "    return kv.TrainingJob(trainer(Small(), checkpoints=folder), batches(4))\n"
    )
    with owned_by_another(folder) as first:
        command = [sys.executable, "-m", "karvan", "train", str(job), "--folder", str(folder)]
        done = run_forked(command, timeout=120)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "error:" in line]
    assert f"belongs to a run that is training: process {first.pid} " in line
    assert "Traceback" not in done.stderr
