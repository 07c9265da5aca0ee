import gc
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
import torch
from forked_programs import ForkedProgram
from loader_helpers import TableSource, decode, no_threads_left, records_of

from karvan import Batch
from karvan.data.errors import DataError
from karvan.data.loading.loader import Loader
from karvan.data.source import Part


def test_batches_have_the_asked_size_across_splits_and_files_and_keep_the_order():
    batches = list(Loader(TableSource([10, 0, 25, 3]), decode, 8, split_records=3))
    assert [batch.samples for batch in batches] == [8, 8, 8, 8, 6]
    assert records_of(batches) == list(range(38))


def test_drop_remainder_leaves_the_short_batch_of_every_epoch_out():
    loader = Loader(TableSource([20]), decode, 8, epochs=2, drop_remainder=True)
    assert records_of(loader) == [*range(16), *range(16)]


def test_dropped_records_count_as_handed_out():
    loader = Loader(TableSource([20]), decode, 8, drop_remainder=True)
    list(loader)
    other = Loader(TableSource([20]), decode, 8)
    other.load_state_dict(loader.state_dict())
    assert records_of(other) == []


def test_batches_do_not_span_epochs():
    loader = Loader(TableSource([10]), decode, 4, epochs=3)
    seen = [(loader.epoch, batch.samples) for batch in loader]
    assert seen == [(epoch, rows) for epoch in range(3) for rows in (4, 4, 2)]


def test_a_shuffle_has_every_record_once_differs_by_epoch_and_seed_and_repeats_with_the_seed():
    def epochs_of(seed):
        records = records_of(Loader(TableSource([300]), decode, 16, shuffle=100, epochs=2, seed=seed))
        return records[:300], records[300:]

    first, second = epochs_of(1)
    assert sorted(first) == sorted(second) == list(range(300))
    assert first != second
    assert (first, second) == epochs_of(1)
    assert first != epochs_of(2)[0]
    assert first != sorted(first)


def test_a_shuffle_as_large_as_the_data_mixes_records_from_everywhere():
    records = records_of(Loader(TableSource([500, 500]), decode, 50, shuffle=1000))
    firsts = torch.tensor(records[:500], dtype=torch.float64)
    assert 400 < firsts.mean() < 600
    assert firsts.std() > 200


def test_after_a_finished_iteration_the_next_one_gives_the_following_epochs():
    loader = Loader(TableSource([50]), decode, 8, shuffle=50)
    first, second = records_of(loader), records_of(loader)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert [*first, *second] == records_of(Loader(TableSource([50]), decode, 8, shuffle=50, epochs=2))


def test_leaving_an_iteration_keeps_the_position_whatever_was_read_ahead():
    loader = Loader(TableSource([50]), decode, 8, prefetch=9)
    got = []
    for batch in loader:
        got.append(batch)
        if len(got) == 2:
            break
    assert records_of(got) + records_of(loader) == list(range(50))


def test_steps_per_epoch_go_on_in_the_data_and_start_again_at_its_end():
    loader = Loader(TableSource([20]), decode, 4, epochs=3, steps_per_epoch=3)
    seen = [(loader.epoch, batch["record"][0].item()) for batch in loader]
    assert seen == [(0, 0), (0, 4), (0, 8), (1, 12), (1, 16), (1, 0), (2, 4), (2, 8), (2, 12)]


def test_all_ranks_have_the_same_number_of_steps_per_epoch_also_after_resuming():
    def loader(rank):
        return Loader(
            TableSource([23]),
            decode,
            4,
            epochs=2,
            steps_per_epoch=4,
            rank=rank,
            world_size=3,
            split_records=5,
        )

    for rank in range(3):
        first, second = loader(rank), loader(rank)
        iterator = iter(first)
        began = [next(iterator) for _ in range(3)]
        second.load_state_dict(first.state_dict())
        assert len(list(loader(rank))) == len(began) + len(list(second)) == 8


def test_no_data_gives_no_batches_and_endlessly_no_data_is_an_error():
    assert list(Loader(TableSource([0]), decode, 4)) == []
    for endless in ({"epochs": None}, {"steps_per_epoch": 2}):
        with pytest.raises(
            ValueError, match=r"Rank 0 of 1 must get at least one batch of 4 .* gets 0 records"
        ):
            next(iter(Loader(TableSource([0]), decode, 4, **endless)))
    with pytest.raises(ValueError, match="gets 3 records"):
        next(iter(Loader(TableSource([3]), decode, 4, epochs=None, drop_remainder=True)))


def test_transform_runs_on_every_batch_on_a_thread():
    names = set()

    def transform(batch):
        names.add(threading.current_thread().name)
        return Batch({"record": batch["record"] * 2})

    batches = list(Loader(TableSource([20]), decode, 8, transform=transform))
    assert records_of(batches) == list(range(0, 40, 2))
    assert names == {"karvan-data"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, but is 0"),
        ({"prefetch": 0}, "prefetch must be at least 1, but is 0"),
        ({"epochs": 0}, "epochs must be at least 1, but is 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, but is 0"),
        ({"shuffle": -1}, "shuffle is how many records are shuffled at a time, 0 for none, but is -1"),
        ({"split_records": 0}, "split_records must be at least 1, but is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2 and world_size is 2"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Loader(TableSource([4]), decode, 2, **setting)
    with pytest.raises(ValueError, match="batch_size must be at least 1, but is 0"):
        Loader(TableSource([4]), decode, 0)


@pytest.mark.parametrize(
    "name",
    [
        "batch_size",
        "seed",
        "epochs",
        "steps_per_epoch",
        "workers",
        "prefetch",
        "split_records",
        "rank",
        "world_size",
    ],
)
@pytest.mark.parametrize("value", [True, 2.0, "2"])
def test_a_bool_or_anything_else_that_is_no_integer_is_refused_where_a_number_is_expected(name, value):
    text = rf"{name} must be an integer, but is {value!r}|expects an integer as {name}, got {value!r}"
    with pytest.raises(TypeError, match=text):
        Loader(TableSource([4]), decode, **{"batch_size": 2, name: value})


def test_numbers_of_numpy_are_numbers():
    two = np.int64(2)
    loader = Loader(
        TableSource([8]),
        decode,
        two,
        shuffle=two,
        seed=two,
        split_records=two,
        epochs=two,
        world_size=two,
        rank=0,
    )
    assert len(list(loader)) == len(loader) == 4
    json.dumps(loader.state_dict())


def collect(loader, into):
    for batch in loader:
        into.append(batch)


class BrokenSource(TableSource):
    """Fails with its own error type at record `bad`."""

    def __init__(self, size, bad):
        super().__init__([size], piece=2)
        self.bad = bad

    def read(self, split):
        for batch in super().read(split):
            if self.bad in batch.column("record").to_pylist():
                raise BrokenPipeError("record is broken")
            yield batch


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("split_records", [2, 10, 100])
def test_an_error_of_the_source_arrives_in_its_place_and_keeps_the_position(workers, split_records):
    source = BrokenSource(60, bad=41)
    loader = Loader(source, decode, 8, workers=workers, split_records=split_records, retry_seconds=0)
    got = []
    with pytest.raises(BrokenPipeError, match="record is broken"):
        collect(loader, got)
    assert records_of(got) == list(range(40))
    source.bad = None
    assert records_of(loader) == list(range(40, 60))
    assert no_threads_left()


def test_an_error_of_decode_arrives_in_its_place_and_repeats_when_asked_again():
    class UnreadableError(Exception):
        pass

    def picky(records):
        if 20 in records.column("record").to_pylist():
            raise UnreadableError
        return decode(records)

    loader = Loader(TableSource([100]), picky, 8, workers=3)
    got = []
    with pytest.raises(UnreadableError):
        collect(loader, got)
    assert records_of(got) == list(range(16))
    with pytest.raises(UnreadableError):
        next(iter(loader))
    assert no_threads_left()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_source_that_gives_other_than_it_counted_is_an_error_and_not_a_loss(change):
    class Miscounted(TableSource):
        def parts(self):
            return [Part("part-0", 20)]

        def read(self, split):
            table = pa.table({"record": range(20 + change)}).combine_chunks()
            yield from table.slice(split.first, split.count + change).to_batches()

    with pytest.raises(DataError, match="part-0, from record 0 on: expected 20 records"):
        list(Loader(Miscounted([20]), decode, 4, split_records=20))


def test_threads_end_when_the_iteration_is_finished_dropped_or_never_begun():
    loader = Loader(TableSource([1000]), decode, 4, workers=3)
    iter(loader)
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    assert no_threads_left()
    list(loader)
    assert no_threads_left()


def test_a_second_iteration_ends_the_first_one():
    loader = Loader(TableSource([100]), decode, 4)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second)["record"].tolist() == [4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="closed, moved or iterated again"):
        next(first)
    loader.close()
    with pytest.raises(RuntimeError, match="closed, moved or iterated again"):
        next(second)
    assert no_threads_left()


@pytest.mark.parametrize("shuffle", [0, 25, 50, 100])
def test_no_more_is_read_ahead_than_prefetched_batches_and_a_block_for_each_worker(shuffle):
    workers, prefetch, batch_size, block = 2, 3, 10, 50
    source = TableSource([2000, 2000], piece=5)
    loader = Loader(
        source,
        decode,
        batch_size,
        shuffle=shuffle,
        split_records=block,
        workers=workers,
        prefetch=prefetch,
    )
    # Each reader has a block that waits and one, or a piece, in its hands; the caller has a batch.
    bound = workers * 2 * (max(block, shuffle) + 5) + (prefetch + 1) * batch_size
    received = 0
    for batch in loader:
        received += batch.samples
        with source.lock:
            ahead = source.read_records - received
        assert ahead <= bound
    assert received == 4000


def test_neighbouring_splits_are_read_in_one_go_when_the_order_allows_it():
    source = TableSource([1000, 500])
    list(Loader(source, decode, 16, split_records=10))
    assert sorted((split.path, split.first, split.count) for split in source.reads) == [
        ("part-0", 0, 1000),
        ("part-1", 0, 500),
    ]


def test_splits_larger_than_the_shuffle_are_read_in_one_go_too():
    source = TableSource([1000])
    records = records_of(Loader(source, decode, 16, split_records=200, shuffle=30))
    assert sorted(records) == list(range(1000))
    assert sorted(split.first for split in source.reads) == [0, 200, 400, 600, 800]
    # Splits are in random order, and records do not leave their 30 neighbours.
    places = [first // 200 for first in records[::200]]
    assert places != sorted(places)
    for start in range(0, 1000, 200):
        split = records[start : start + 200]
        assert max(abs(record % 200 - place) for place, record in enumerate(split)) < 30


@pytest.mark.parametrize("shuffle", [1, 16, 1000])
def test_a_small_shuffle_reads_and_copies_no_smaller_pieces_than_a_large_one(shuffle):
    source = TableSource([100_000], piece=100_000)
    pieces = []

    def sizes(records):
        pieces.append(len(records))
        return Batch({"rows": torch.zeros(len(records))})

    sizes.row_wise = True
    assert sum(batch.samples for batch in Loader(source, sizes, 64, shuffle=shuffle)) == 100_000
    assert len(source.reads) <= 64
    assert len(pieces) <= 64


def test_a_source_with_groups_is_shuffled_by_whole_groups():
    source = TableSource([1000, 500])
    source.group_records = 250
    list(Loader(source, decode, 16, shuffle=100))
    assert sorted((split.path, split.first, split.count) for split in source.reads) == [
        ("part-0", 0, 250),
        ("part-0", 250, 250),
        ("part-0", 500, 250),
        ("part-0", 750, 250),
        ("part-1", 0, 250),
        ("part-1", 250, 250),
    ]


def test_ranks_read_the_groups_of_a_source_whole_except_for_the_last_ones():
    sources = [TableSource([1000, 500]) for _ in range(2)]
    for rank, source in enumerate(sources):
        source.group_records = 250
        list(Loader(source, decode, 16, rank=rank, world_size=2))
    reads = [sorted((split.path, split.first, split.count) for split in source.reads) for source in sources]
    assert reads == [
        [("part-0", 0, 250), ("part-0", 500, 250), ("part-1", 0, 250)],
        [("part-0", 250, 250), ("part-0", 750, 250), ("part-1", 250, 250)],
    ]


def test_arrow_memory_stays_bounded_on_data_ten_times_larger_than_the_buffers():
    row_bytes, block, total = 8 * 256, 500, 20_000

    class Wide(TableSource):
        def read(self, split):
            for first in range(split.first, split.first + split.count, 100):
                width = min(100, split.first + split.count - first)
                values = pa.nulls(width * 256, pa.int64())
                yield pa.record_batch({"row": pa.FixedSizeListArray.from_arrays(values, 256)})

    def rows(records):
        return Batch({"rows": torch.zeros(len(records))})

    before = pa.total_allocated_bytes()
    samples = []
    for number, _ in enumerate(Loader(Wide([total]), rows, 50, shuffle=block, workers=2, prefetch=4)):
        samples.append(pa.total_allocated_bytes() - before)
        while number == 5 and len(set(samples[-20:])) > 1:  # until the readers wait for the loop
            time.sleep(0.02)
            samples.append(pa.total_allocated_bytes() - before)
    assert total * row_bytes > 10 * (2 * block + 5 * 50) * row_bytes
    # Batches are cut from one block. A reader has one that waits and one that it reads and then shuffles, for
    # which Arrow needs the block, up to twice as much for the indices of its numbers, and the result.
    assert max(samples) < (1 + 2 * (1 + 5) + 1) * block * row_bytes


def test_an_interrupt_ends_a_program_that_waits_for_a_batch():
    program = textwrap.dedent(
        """
        import threading
        from loader_helpers import TableSource, decode
        from karvan.data.loading.loader import Loader

        class Stuck(TableSource):
            def read(self, split):
                print("reading", flush=True)
                threading.Event().wait(60)
                return iter(())

        try:
            next(iter(Loader(Stuck([10]), decode, 4, workers=1)))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    process = ForkedProgram([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out == "interrupted\n"
    assert process.returncode == 0


def test_a_program_may_end_in_the_middle_of_an_iteration():
    program = (
        "from loader_helpers import TableSource, decode\n"
        "from karvan.data.loading.loader import Loader\n"
        "iterator = iter(Loader(TableSource([10000]), decode, 4))\n"
        "next(iterator)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
