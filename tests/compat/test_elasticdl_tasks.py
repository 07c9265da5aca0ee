"""Task dispatch and evaluation metrics as ElasticDL's public tests show them, under ElasticDL's names.

Numbers in the names of tests are those of the list of behaviours that ElasticDL's users rely on; tests/work
and tests/cluster have the same for Karvan's own interfaces.
"""

import threading
from collections import Counter

import pytest
import torch
from elasticdl_zoo import LOCAL, csv_of, elasticdl, own_modules, zoo_of

import karvan as kv
from karvan.compat.elasticdl.data_shards import build_data_shard_service
from karvan.wire import Server
from karvan.work.ledger import JobFailedError
from karvan.work.service import WorkService


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def now():
    return Clock()


@pytest.fixture
def master(tmp_path, monkeypatch, now):
    work = WorkService(tmp_path / "work.db", patience=300.0, now=now)
    server = Server(work)
    monkeypatch.setenv("MASTER_ADDR", server.address)
    yield work
    server.close(0.1)
    work.close()


@pytest.fixture(autouse=True)
def _modules():
    with own_modules("zoo_model"):
        yield


def worker(records=12, epochs=1, size=4):
    """A worker of shards of `size` records, in order."""
    return build_data_shard_service(size, epochs, records, num_minibatches_per_shard=1)


def train(service, shard):
    assert service.report_batch_done(len(shard.numbers()))


READER = """
class Files:
    def __init__(self, **_):
        pass

    def create_shards(self):
        return [("f1", 0, 10), ("f2", 0, 10)]

    def read_records(self, task):
        print("task", task.shard_name, task.start, task.end)
        return ([number / 10, number / 5] for number in range(task.start, task.end))

def custom_data_reader(**arguments):
    return Files(**arguments)
"""


def test_elasticdl_1_tasks_of_two_files_tile_them(tmp_path, capfd):
    sizes = ("--minibatch_size", 3, "--num_minibatches_per_task", 1, "--training_data", "files")
    assert elasticdl("train", *zoo_of(tmp_path, READER), *LOCAL, *sizes) == 0
    lines = [line.split()[1:] for line in capfd.readouterr().out.splitlines() if line.startswith("task")]
    expected = [(name, first, min(first + 3, 10)) for name in ("f1", "f2") for first in (0, 3, 6, 9)]
    assert sorted((name, int(first), int(last)) for name, first, last in lines) == expected


@pytest.mark.parametrize("epochs", [0, -1])
def test_elasticdl_3_without_a_number_of_epochs_training_does_not_end(tmp_path, capfd, epochs):
    stop = """
    from elasticdl.python.elasticdl.callbacks import MaxStepsStopping

    def callbacks():
        return [MaxStepsStopping(50)]
    """
    words = ("--training_data", csv_of(tmp_path, 16), "--minibatch_size", 8, "--num_epochs", epochs)
    assert elasticdl("train", *zoo_of(tmp_path, stop), *LOCAL, *words) == 0
    assert "400 samples" in capfd.readouterr().out  # 25 epochs


@pytest.mark.usefixtures("master")
def test_elasticdl_3_an_epoch_begins_when_all_records_of_the_last_one_are_reported():
    first, second = worker(8, 2), worker(8, 2)
    held, reported, found = first.fetch_shard(), threading.Event(), []
    train(second, second.fetch_shard())

    def wait():
        shard = second.fetch_shard()
        found.append((reported.is_set(), shard.start))

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.3)
    reported.set()
    train(first, held)
    waiting.join(30)
    assert found == [(True, 0)]


def test_elasticdl_4_the_shards_of_a_dead_worker_return_and_no_others(master):
    gone, other = worker(20), worker(20)
    lost = [gone.fetch_shard().start for _ in range(2)]
    held = other.fetch_shard()
    (holder,) = {lease.holder for lease in master.ledger.leases} - {other._client.holder}
    master.release(holder)
    assert [lease.holder for lease in master.ledger.leases] == [other._client.holder]
    train(other, held)
    starts = []
    while (shard := other.fetch_shard()) is not None:
        starts.append(shard.start)
        train(other, shard)
    assert (lost, held.start) == ([0, 4], 8)
    assert sorted(starts) == [0, 4, 12, 16]


@pytest.mark.usefixtures("master")
def test_elasticdl_5_a_shard_that_fails_once_in_two_epochs_is_issued_three_times():
    service, issued = worker(epochs=2), Counter()
    while (shard := service.fetch_shard()) is not None:
        issued[shard.start] += 1
        service.report_batch_done(4, err_msg="mine" if issued.total() == 1 else "")
    assert issued == {0: 3, 4: 2, 8: 2}


def test_elasticdl_6_a_shard_outlives_any_number_of_workers_but_not_of_errors(master):
    for _ in range(10):
        assert worker(4).fetch_shard().start == 0
        (lease,) = master.ledger.leases
        master.release(lease.holder)
    failing = worker(4)
    for _ in range(3):
        assert failing.fetch_shard().start == 0
        failing.report_batch_done(err_msg="ValueError: mine")
    with pytest.raises(JobFailedError, match="ValueError: mine"):
        failing.fetch_shard()


def test_elasticdl_7_a_late_report_changes_nothing(master, caplog):
    late, other = worker(4), worker(4)
    late.fetch_shard()
    (lease,) = master.ledger.leases
    master.release(lease.holder)
    shard = other.fetch_shard()
    late.report_batch_done()
    assert "were given to another worker" in caplog.text
    assert [each.task.done for each in master.ledger.leases] == [0]
    assert not master.ledger.complete
    train(other, shard)
    other.report_batch_done()  # a second report has nothing to report
    assert master.ledger.complete


def test_elasticdl_8_a_silent_shard_returns(master, now):
    silent, busy = worker(8), worker(8)
    held = silent.fetch_shard()
    now.seconds = 299.0
    train(busy, busy.fetch_shard())
    assert master.overdue() == []
    now.seconds = 301.0
    (late,) = master.overdue()
    assert late.holder == silent._client.holder
    assert busy.fetch_shard() == held


METRICS = """
import karvan as kv

def custom_model():
    return torch.nn.Identity()

def loss(labels, predictions):
    return (predictions.reshape(-1) - labels).square()

def eval_metrics_fn():
    return {
        "each": lambda labels, predictions: (predictions.reshape(-1) > 0.5) == (labels > 0.5),
        "batch": lambda labels, predictions: predictions.mean(),
        "auc": kv.metrics.AUC(),
    }
"""


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_metrics_of_an_evaluation_are_those_of_all_records_however_they_are_divided(tmp_path, capfd, size):
    scores = [(7 * number % 23) / 23 for number in range(23)]
    labels = [float(number % 3 == 0) for number in range(23)]
    lines = [f"{score},{label}" for score, label in zip(scores, labels, strict=True)]
    (tmp_path / "data.csv").write_text("\n".join(["x,y", *lines]) + "\n")
    trained = tmp_path / "model"
    kv.checkpoint.save(trained, {"model": {}}, torch.nn.Identity(), step=0)
    words = ("--validation_data", tmp_path / "data.csv", "--checkpoint_dir_for_init", trained)
    sizes = ("--minibatch_size", size, "--num_minibatches_per_task", 2)
    assert elasticdl("evaluate", *zoo_of(tmp_path, METRICS), *LOCAL, *sizes, *words) == 0
    found = dict(line.split(": ") for line in capfd.readouterr().out.splitlines())
    pairs = [
        (s, t)
        for s, a in zip(scores, labels, strict=True)
        for t, b in zip(scores, labels, strict=True)
        if a > b
    ]
    expected = {
        "loss": sum((s - y) ** 2 for s, y in zip(scores, labels, strict=True)) / 23,
        "each": sum((s > 0.5) == (y > 0.5) for s, y in zip(scores, labels, strict=True)) / 23,
        "batch": sum(scores) / 23,
        "auc": sum((s > t) + (s == t) / 2 for s, t in pairs) / len(pairs),
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, abs=2e-4)
