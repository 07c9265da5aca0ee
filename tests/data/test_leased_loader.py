"""Loaders that lease their records: every record is acknowledged once, whoever comes, goes or dies."""

import itertools
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan.data.columns.declarations import Fixed
from karvan.data.errors import DataError
from karvan.data.leased_data import LeasedLoader, LeasedTasks
from karvan.data.loading.pipeline import Closed
from karvan.data.loading.rank_shares import permutation
from karvan.data.loading.settings import ReadSettings
from karvan.data.read import read
from karvan.data.source import Part
from karvan.data.task_records import (
    BatchError,
    RecordSearch,
    TakenRecords,
    blaming,
    places_of,
    records_done,
    report,
)
from karvan.data.work_client import WorkClient
from karvan.ragged import Batch
from karvan.wire import Server
from karvan.work.ledger import JobFailedError
from karvan.work.service import WorkService
from karvan.work.task import Task, TaskKind, TaskLease, WorkSpec

_holders = itertools.count()


class Numbers:
    """Parts of numbers: record i of part p is p * 1000 + i. Reading the `bad` number is an error.

    They are read in pieces; with `whole_pieces`, which are blocks of the file, all of a bad one is bad.
    """

    schema = pa.schema([("id", pa.int64())])

    def __init__(self, counts, bad=None, pieces=7, whole_pieces=False):
        self.counts = counts
        self.bad = bad
        self.pieces = pieces
        self.whole_pieces = whole_pieces

    def parts(self):
        return [Part(str(number), count) for number, count in enumerate(self.counts)]

    def read(self, split):
        first = int(split.path) * 1000 + split.first
        for begin in range(first, first + split.count, self.pieces):
            ids = np.arange(begin, min(begin + self.pieces, first + split.count))
            if self.bad in ids or (self.whole_pieces and self.bad // self.pieces in ids // self.pieces):
                raise DataError("A bad number.", path=split.path)
            yield pa.record_batch([pa.array(ids)], self.schema)

    def spec(self, size, **options):
        return WorkSpec(tuple((part.path, part.records) for part in self.parts()), size, **options)


def decode(records):
    return Batch({"id": torch.from_numpy(records.column(0).to_numpy().copy())})


decode.row_wise = True


class Holder:
    """A loader that leases records, and acknowledges those of its batches itself."""

    def __init__(self, client, settings, seed, tasks_ahead=2):
        self._client = client
        plan = LeasedTasks(client, settings.batch_size, seed, tasks_ahead=tasks_ahead)
        self._loader = LeasedLoader(settings, plan)
        self._unacknowledged = deque()
        self.stop, self.suspects = self._loader.stop, self._loader.suspects

    @property
    def idle(self):
        return self._loader.idle

    def __iter__(self):
        for batch in self._loader:
            self._unacknowledged.append(self._loader.hand_over())
            yield batch

    def acknowledge(self, batches=1):
        """The records of the oldest batches are done: the tokens of leases that had ended before."""
        done = {}
        for _ in range(batches):
            done |= records_done(self._unacknowledged.popleft())
        return self._client.acknowledge(done)

    def close(self):
        self.stop()
        self._client.close()


class Job:
    """A master, and loaders of its work."""

    def __init__(self, folder, source, size, loader_seed=None, **options):
        self.path = folder / "ledger.db"
        self.source = source
        self.spec = source.spec(size, **options)
        self.loader_seed = loader_seed
        self.work = WorkService(self.path)
        self.server = Server(self.work, "127.0.0.1")
        self.loaders = []

    def loader(self, batch_size=4, **options):
        client = WorkClient(lambda: self.server.address, f"holder {next(_holders)}")
        client.open(self.spec)
        made = Holder(client, ReadSettings(self.source, decode, batch_size), self.loader_seed, **options)
        self.loaders.append(made)
        return made

    def restart(self):
        self.server.close()
        self.work.close()
        self.work = WorkService(self.path)
        self.server = Server(self.work, "127.0.0.1")

    def close(self):
        for loader in self.loaders:
            loader.close()
        self.server.close()
        self.work.close()


@contextmanager
def job_of(folder, *arguments, **options):
    job = Job(folder, *arguments, **options)
    try:
        yield job
    finally:
        job.close()


@pytest.fixture
def make_job(tmp_path):
    with job_of(tmp_path, Numbers([10, 0, 5]), 4, epochs=2) as job:
        yield job


def ids_of(batch):
    return batch["id"].tolist()


def train(loader):
    """Take and acknowledge everything."""
    seen = []
    for batch in loader:
        seen.append(ids_of(batch))
        assert loader.acknowledge() == []
    return seen


def test_one_loader_gets_the_records_in_order_and_batches_end_with_the_epoch(make_job):
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 2000, 2001], [2002, 2003, 2004]]
    assert train(make_job.loader()) == epoch * 2
    assert make_job.work.ledger.position.records == 30
    assert list(make_job.loader()) == []


def test_what_a_loader_did_not_acknowledge_goes_to_others(make_job):
    first = make_job.loader()
    batches = iter(first)
    assert [ids_of(next(batches)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    first.acknowledge()
    first.close()
    seen = Counter(itertools.chain.from_iterable(train(make_job.loader())))
    ids = [*range(10), *range(2000, 2005)]
    assert seen == Counter(ids) + Counter(set(ids) - {0, 1, 2, 3})


def test_a_batch_that_spans_tasks_acknowledges_each_exactly(make_job):
    loader = make_job.loader(batch_size=6)
    batches = iter(loader)
    assert ids_of(next(batches)) == [0, 1, 2, 3, 4, 5]
    loader.acknowledge()
    leases = make_job.work.ledger.leases
    done = {(lease.task.path, lease.task.first): lease.task.done for lease in leases}
    assert make_job.work.ledger.position.records == 6
    assert (("0", 0) in done, done["0", 4]) == (False, 2)
    loader.close()
    left = Counter()
    loader = make_job.loader(batch_size=2)
    for batch in loader:
        left.update(ids_of(batch))
        loader.acknowledge()
    everything = Counter([*range(10), *range(2000, 2005)] * 2)
    assert left == everything - Counter(range(6))


def test_a_loader_waits_for_the_end_of_an_epoch_that_others_work_on(tmp_path):
    with job_of(tmp_path, Numbers([8]), 4, epochs=2) as job:
        slow, fast = job.loader(tasks_ahead=1), None
        batches = iter(slow)
        held = [ids_of(next(batches)), ids_of(next(batches))]
        assert held == [[0, 1, 2, 3], [4, 5, 6, 7]]
        fast = job.loader()
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(train(fast)))
        thread.start()
        thread.join(0.5)
        assert (seen, thread.is_alive()) == ([], True)
        slow.acknowledge(2)
        slow.close()
        thread.join(60)
        assert sorted(seen) == held


def test_loaders_go_on_when_the_master_is_replaced(make_job):
    loader = make_job.loader(tasks_ahead=1)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(ids_of(batch))
        if number == 2:
            make_job.restart()
        assert loader.acknowledge() == []
    assert len(seen) == 8
    assert make_job.work.ledger.position.records == 30


def test_a_holder_that_was_taken_for_dead_is_told_which_leases_ended(make_job):
    loader = make_job.loader()
    batches = iter(loader)
    next(batches)
    (token, *_) = sorted(lease.token for lease in make_job.work.ledger.leases)
    make_job.work.release(make_job.work.ledger.leases[0].holder)
    assert loader.acknowledge() == [token]
    assert make_job.work.ledger.position.records == 0


def test_records_are_shuffled_inside_of_tasks_the_same_for_everybody(tmp_path):
    with job_of(tmp_path, Numbers([20]), 10, loader_seed=5, epochs=1) as job:
        first = job.loader(batch_size=5)
        begin = ids_of(next(iter(first)))
        first.acknowledge()
        first.close()
        rest = list(itertools.chain.from_iterable(train(job.loader(batch_size=5))))
        orders = [permutation(10, 5, 0, task) + 10 * task for task in range(2)]
        assert begin + rest == np.concatenate(orders).tolist()


def train_around_errors(job, batch_size=4, decode=decode, transform=None):
    """As trainers do: report what raises an error, and continue with what is left."""
    seen = []
    while True:
        client = WorkClient(lambda: job.server.address, f"holder {next(_holders)}")
        client.open(job.spec)
        settings = ReadSettings(job.source, decode, batch_size, transform=transform, retry_seconds=1.0)
        loader = Holder(client, settings, job.loader_seed)
        batches = iter(loader)
        try:
            while True:
                with blaming(loader.suspects):
                    batch = next(batches, None)
                if batch is None:
                    return seen
                seen += ids_of(batch)
                assert loader.acknowledge() == []
        except BatchError as failed:
            loader.stop()
            search = RecordSearch(settings, job.loader_seed)
            report(client, failed.__cause__, failed.records, search.find(failed.records).record)
        finally:
            loader.close()


@pytest.mark.parametrize("loader_seed", [None, 3])
@pytest.mark.parametrize("batch_size", [4, 6])
def test_a_record_that_cannot_be_read_fails_the_job_and_is_named(tmp_path, batch_size, loader_seed):
    with job_of(tmp_path, Numbers([8], bad=5, pieces=1), 4, loader_seed=loader_seed, most_tries=2) as job:
        with pytest.raises(JobFailedError) as caught:
            train_around_errors(job, batch_size)
        assert str(caught.value) == (
            "record 5 of 0 (epoch 0) failed 2 times. The last error: DataError: 0: A bad number."
        )
        with pytest.raises(JobFailedError, match="record 5 of 0"):
            train(job.loader())


def test_a_damaged_block_fails_the_job_without_a_record(tmp_path):
    source = Numbers([20], bad=9, pieces=10, whole_pieces=True)
    failure = r"^records 0 to 9 of 0 \(epoch 0\) failed 2 times"
    with job_of(tmp_path, source, 10, most_tries=2) as job, pytest.raises(JobFailedError, match=failure):
        train_around_errors(job)


def bad_decode(records):
    if 6 in records.column(0).to_pylist():
        raise ValueError("six")
    return decode(records)


def bad_transform(batch):
    if 6 in ids_of(batch):
        raise KeyError("six")
    return batch


@pytest.mark.parametrize("loader_seed", [None, 3])
@pytest.mark.parametrize("batch_size", [4, 6])
@pytest.mark.parametrize("options", [{"decode": bad_decode}, {"transform": bad_transform}, {}])
def test_bad_records_are_skipped_and_all_others_are_trained_once(tmp_path, options, batch_size, loader_seed):
    source = Numbers([20, 5], bad=None if options else 6, pieces=1)
    with job_of(tmp_path, source, 5, loader_seed=loader_seed, epochs=2, skip_bad_records=2) as job:
        seen = Counter(train_around_errors(job, batch_size, **options))
        ids = [*range(20), *range(1000, 1005)]
        ids.remove(6)
        assert seen == Counter(ids * 2)
        assert (job.work.ledger.position.bad_records, job.work.ledger.position.records) == (2, 50)


def test_an_error_of_every_record_blames_none(tmp_path):
    def no_column(batch):
        raise KeyError("price")

    with job_of(tmp_path, Numbers([8]), 4, most_tries=2, skip_bad_records=5) as job:
        with pytest.raises(JobFailedError, match=r"records 0 to 3 of 0 .*failed 2 times.*KeyError: 'price'"):
            train_around_errors(job, transform=no_column)
        assert job.work.ledger.position.bad_records == 0


def test_an_error_that_takes_two_records_blames_none(tmp_path):
    def not_together(batch):
        if {1, 2} <= set(ids_of(batch)):
            raise ValueError("1 and 2")
        return batch

    with job_of(tmp_path, Numbers([8]), 4, most_tries=2, skip_bad_records=5) as job:
        with pytest.raises(JobFailedError, match=r"records 0 to 3 of 0 .*failed 2 times"):
            train_around_errors(job, transform=not_together)
        assert job.work.ledger.position.bad_records == 0


def test_more_tasks_than_a_call_may_name_are_returned(tmp_path):
    with job_of(tmp_path, Numbers([1500]), 1) as job:
        client = WorkClient(job.server.address, "greedy")
        client.open(job.spec)
        leases = [*client.lease(most=1000), *client.lease(most=1000)]
        client.acknowledge({lease.token: 1 for lease in leases[:100]})
        client.close()
        assert (len(job.work.ledger.leases), len(job.work.ledger.waiting)) == (0, 1400)


def test_skipped_records_are_not_read_and_count_as_done():
    task = Task(TaskKind.TRAIN, 0, 0, "f", 0, 6, done=1, skipped=(0, 2, 5))
    assert places_of(task).tolist() == [1, 3, 4]


def test_records_that_are_skipped_reach_the_end_of_the_task(tmp_path):
    with job_of(tmp_path, Numbers([8]), 4, skip_bad_records=3) as job:
        client = WorkClient(job.server.address, "reporter")
        client.open(job.spec)
        for bad in (3, 1):
            (lease,) = client.lease()
            assert client.fail(lease.token, "bad", record=bad, number=bad).skipped
        client.close()
        assert train(job.loader()) == [[0, 2, 4, 5], [6, 7]]
        assert job.work.ledger.position.records == 8


class Taker:
    """A holder in a random history. It takes batches on a thread: one may have to wait for other holders."""

    def __init__(self, job, batch_size):
        self._loader = job.loader(batch_size, tasks_ahead=1)
        self._wanted = threading.Semaphore(0)
        self._ended = False
        self.asked = 0
        self.taken = []  # the ids of each batch that it got
        self.acknowledged = 0
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self):
        try:
            batches = iter(self._loader)
            while self._wanted.acquire() and (batch := next(batches, None)) is not None:
                self.taken.append(ids_of(batch))
        except Closed:
            pass
        finally:
            self._ended = True

    def take(self):
        """Ask for a batch, until it comes or there is none for now."""
        self.asked += 1
        self._wanted.release()
        until = time.monotonic() + 30
        while len(self.taken) < self.asked and not self._ended and not self._loader.idle:
            assert time.monotonic() < until
            time.sleep(0.001)

    def acknowledge(self):
        """All that it has taken is done: the ids."""
        batches = self.taken[self.acknowledged :]
        assert self._loader.acknowledge(len(batches)) == []
        self.acknowledged += len(batches)
        return itertools.chain.from_iterable(batches)

    def close(self):
        self._loader.close()
        self._wanted.release()
        self._thread.join(60)
        assert not self._thread.is_alive()


@given(
    counts=st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(any),
    size=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    epochs=st.integers(1, 2),
    seed=st.none() | st.integers(0, 3),
    moves=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["take", "take", "acknowledge", "die", "restart"])),
        max_size=20,
    ),
)
def test_every_record_is_acknowledged_once_in_every_epoch(
    tmp_path_factory, counts, size, batch_size, epochs, seed, moves
):
    source = Numbers(counts)
    everything = [number * 1000 + i for number, count in enumerate(counts) for i in range(count)]
    done = Counter()
    folder = tmp_path_factory.mktemp("leased")
    with job_of(folder, source, size, loader_seed=seed, seed=seed, epochs=epochs) as job:
        takers = [Taker(job, batch_size) for _ in range(2)]
        try:
            for which, move in moves:
                if move == "take":
                    takers[which].take()
                elif move == "acknowledge":
                    done.update(takers[which].acknowledge())
                elif move == "die":
                    takers[which].close()
                    takers[which] = Taker(job, batch_size)
                else:
                    job.restart()
        finally:
            for taker in takers:
                taker.close()
        done.update(itertools.chain.from_iterable(train(job.loader(batch_size))))
    assert done == Counter(everything * epochs)


def test_a_missing_label_of_a_leased_record_is_an_error_that_names_it(tmp_path, monkeypatch):
    for name, value in {"ROLE": "loader", "SHARDING": "dynamic"}.items():
        monkeypatch.setenv(f"KARVAN_{name}", value)
    data = read(pa.table({"y": [1.0] * 6 + [None]}), 4, columns=[Fixed("y")])
    work = WorkService(tmp_path / "ledger.db")
    with Server(work) as server, data.require_values(["y"], []):
        client = WorkClient(server.address, "holder")
        client.open(data.spec())
        loader = data.lease(client, 0)
        with pytest.raises(DataError, match="record 6, column 'y': The label is missing"):
            [client.acknowledge(records_done(loader.hand_over())) for _ in loader]
        loader.stop()
        client.close()
    work.close()


class AwayOnce(Numbers):
    """Its first read fails, with an error that only the source itself takes for an outage."""

    def __init__(self, counts):
        super().__init__(counts)
        self.outages = self
        self.failures = 0

    def is_outage(self, error, path):
        return isinstance(error, LookupError)

    def read(self, split):
        if not self.failures:
            self.failures += 1
            raise LookupError("away")
        yield from super().read(split)


def test_a_source_whose_records_are_checked_says_what_its_outages_are(tmp_path, monkeypatch):
    for name, value in {"ROLE": "loader", "SHARDING": "dynamic"}.items():
        monkeypatch.setenv(f"KARVAN_{name}", value)
    source = AwayOnce([10])
    data = read(source, 4, columns=[Fixed("id")])
    work = WorkService(tmp_path / "ledger.db")
    with Server(work) as server, data.require_values(["id"], []):
        client = WorkClient(server.address, "holder")
        client.open(data.spec())
        loader, seen = data.lease(client, 0), []
        for batch in loader:
            seen += batch["id"].tolist()
            client.acknowledge(records_done(loader.hand_over()))
        assert (seen, source.failures) == (list(range(10)), 1)
        source.failures = 0
        taken = TakenRecords(TaskLease(1, "", Task(TaskKind.TRAIN, 0, 0, "0", 0, 10)), np.arange(10), 10)
        assert data.search().find([taken]).record is None
        assert source.failures == 1
        loader.stop()
        client.close()
    work.close()
