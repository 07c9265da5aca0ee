"""Records that raise errors in elastic jobs: found, skipped and counted, or named by the error of the job."""

import os
import random
import signal

import pytest
import torch
from elastic_jobs import elastic_job

import karvan as kv
from karvan.data.leased_data import SharedData
from karvan.data.loading.settings import ReadSettings
from karvan.data.read import open_data
from karvan.data.task_records import BatchError, TakenRecords, places_of
from karvan.train.leased_work import BadRecords
from karvan.work.task import Task, TaskKind, TaskLease

EPOCHS, RECORDS = 2, 240
POISON = (31, 100)  # records 10 of 1.parquet and 33 of 1.parquet


def check_all_others(job, result):
    """Every record was trained once in every epoch, except for those that raise errors."""
    times = [0.0 if number in POISON else float(EPOCHS) for number in range(RECORDS)]
    assert result["times"] == times
    assert result.get("rows", times) == times
    assert result["samples"] == EPOCHS * (RECORDS - len(POISON))
    assert result["bad_records"] == EPOCHS * len(POISON)


@pytest.mark.parametrize(("poisoned", "servers"), [("model", 1), ("loss", 0), ("transform", 0)])
def test_bad_records_are_skipped_and_all_others_are_trained_once(tmp_path, poisoned, servers):
    settings = {"POISON": ",".join(map(str, POISON)), "POISONED": poisoned, "KARVAN_SKIP_BAD_RECORDS": 4}
    with elastic_job(tmp_path, records=RECORDS, epochs=EPOCHS, servers=servers, least=2, **settings) as job:
        trainers = job.start(), job.start()
        for result in job.results(2):
            check_all_others(job, result)
        assert [each.wait(60) for each in trainers] == [0, 0]
        path = job.data / "1.parquet"
        for number in (10, 33):
            line = f"Skipped record {number} of {path} (epoch 1), bad record"
            assert line in job.logs()
        assert "ValueError: 31 is poison (" in job.logs()
        assert "WARNING: 4 bad records skipped, because they raised errors." in job.logs()
        assert job.work.progress()["bad_records"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "servers"), [(0, 0), (1, 0), (2, 1)])
def test_bad_records_are_skipped_while_trainers_die(tmp_path, seed, servers):
    order = random.Random(seed)
    bad = order.sample(range(900), 12)
    settings = {"POISON": ",".join(map(str, bad)), "KARVAN_SKIP_BAD_RECORDS": 24, "PAUSE": 0.1}
    with elastic_job(tmp_path, records=900, epochs=EPOCHS, servers=servers, **settings) as job:
        alive = [job.start(), job.start(), job.start()]
        for _ in range(6):
            job.wait(lambda: all(job.step(each)[1] for each in alive) or list(job.notes.glob("result-*")))
            if list(job.notes.glob("result-*[0-9]")):
                break
            victim = order.choice(alive)
            os.kill(victim.pid, order.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            victim.wait(60)
            alive.remove(victim)
            alive.append(job.start())
        job.hurry()
        times = [0.0 if number in bad else float(EPOCHS) for number in range(900)]
        for result in job.results(1):
            assert result["times"] == times
            assert result.get("rows", times) == times
            assert result["bad_records"] == EPOCHS * len(bad)


def last_line(job):
    """The last line of a trainer: the master may notice afterwards that it has left."""
    return [line for line in job.logs().splitlines() if not line.startswith("master:")][-1]


def test_a_bad_record_fails_the_job_after_its_tries(tmp_path):
    settings = {"POISON": 31, "KARVAN_MAX_TASK_TRIES": 2}
    with elastic_job(tmp_path, records=RECORDS, least=2, **settings) as job:
        trainers = job.start(), job.start()
        assert [each.wait(60) for each in trainers] == [1, 1]  # by the interpreter, not by a launcher
        failure = (
            f"record 10 of {job.data / '1.parquet'} (epoch 0) failed 2 times. The last error: "
            "ValueError: 31 is poison"
        )
        assert failure in job.work.progress()["failure"]
        for trainer in trainers:
            assert f"JobFailedError: {failure}" in trainer.log.read_text()
        assert "set skip_bad_records in job.yaml" in job.logs()


def test_a_program_that_is_wrong_for_every_record_ends_with_its_own_error(tmp_path):
    with elastic_job(tmp_path, records=RECORDS, POISON="all", KARVAN_SKIP_BAD_RECORDS=100) as job:
        assert job.start().wait(60) == 1
        assert "is poison" in last_line(job)
        assert "JobFailedError" not in job.logs()
        assert job.work.progress()["bad_records"] == 0


def test_the_count_of_bad_records_returns_with_a_checkpoint(tmp_path):
    settings = {"POISON": 31, "KARVAN_SKIP_BAD_RECORDS": 2, "PAUSE": 0.05, "SAVE_EVERY": 2}
    with elastic_job(tmp_path, records=RECORDS, **settings) as job:
        trainer = job.start()
        job.wait(lambda: (job.work.progress() or {"bad_records": 0})["bad_records"] == 1)
        step = job.step(trainer)[0]
        job.wait(lambda: job.step(trainer)[0] > step + 4)  # it was saved since
        trainer.kill()
        trainer.wait()
        job.hurry()
        job.start()
        (result,) = job.results(1)
        assert result["bad_records"] == 2  # one in each epoch
        assert result["samples"] == 2 * RECORDS - 2


def test_fixed_batches_end_with_an_error_that_names_the_record(tmp_path):
    with elastic_job(tmp_path, records=RECORDS, POISON=31, KARVAN_GLOBAL_BATCHES=2) as job:
        assert job.start().wait(60) == 1
        path = job.data / "1.parquet"
        expected = f"record 10 of {path} (epoch 0): ValueError: 31 is poison"
        assert expected in last_line(job)
        assert f"its batch is of records 8 to 15 of {path} (epoch 0)" in job.logs()


class Counted(torch.nn.Module):
    """A model with everything that a forward changes; record 5 is bad."""

    def __init__(self):
        super().__init__()
        self.rows = kv.EmbeddingEngine({"record": kv.Table(4)})
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch):
        self.calls = self.calls + 1
        if 5 in batch["record"]:
            raise ValueError("five")
        return self.net(self.rows(batch)["record"]).squeeze(1)


def failed_batch(path, records):
    task = Task(TaskKind.TRAIN, 0, 0, path, 0, records)
    taken = TakenRecords(TaskLease(1, "a", task), places_of(task), records)
    try:
        raise BatchError([taken]) from ValueError("five")
    except BatchError as failed:
        return failed


def test_the_search_finds_the_record_and_changes_nothing():
    """The model normalizes batches, so a single sample raises in training: it is tried in evaluation, too."""
    none = dict.fromkeys(["columns", "format", "filesystem", "options"])
    source, decode = open_data({"record": torch.arange(32).numpy()}, labels=(), retry_seconds=1.0, **none)
    data = SharedData(ReadSettings(source, decode, 32, workers=1, prefetch=1, retry_seconds=1.0))
    trainer = kv.Trainer(
        Counted(),
        lambda output, batch: output.mean(),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sparse_optimizer=kv.optim.SGD(lr=0.1),
    )
    trainer.model.train()
    buffers = {name: (buffer, buffer.clone()) for name, buffer in trainer.model.named_buffers()}
    random = torch.get_rng_state()
    bad = BadRecords(trainer, data)
    bad.computed = True
    found = bad.find(failed_batch(source.parts()[0].path, 32))
    assert (found.record.number, found.record.place, found.every) == (5, 5, False)
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert trainer.model.rows.sizes() == {"record": 0}
    assert trainer.model.rows.step == 0
    for name, buffer in trainer.model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
