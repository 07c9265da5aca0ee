"""Row-wise steps run on large pieces: the batches must be those of steps that run on every batch."""

import threading

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import TableSource, decode, no_threads_left, records_of
from rows import assert_same

from karvan import Batch, Feature, FeatureEngine, Ragged
from karvan.data.columns.declarations import Fixed, Raw, Varlen
from karvan.data.columns.decoder import Decoder
from karvan.data.errors import DataError
from karvan.data.loading.loader import Loader
from karvan.data.source import Part
from karvan.features import ElementOp

SCHEMA = pa.schema(
    [
        ("price", pa.float32()),
        ("id", pa.int64()),
        ("count", pa.int32()),
        ("one", pa.int64()),
        ("history", pa.list_(pa.int64())),
        ("nested", pa.list_(pa.list_(pa.int64()))),
        ("weighted", pa.map_(pa.int64(), pa.float32())),
        ("text", pa.string()),
        ("digits", pa.string()),
    ]
)
COLUMNS = [
    Fixed("price", default=0.5),
    Fixed("id"),
    Fixed("count"),
    Varlen("one"),
    Varlen("history"),
    Varlen("nested"),
    Varlen("weighted"),
    Raw("text"),
    Raw("digits"),
]
FEATURES = [
    Feature("price").clip(0, 3).log1p(),
    Feature("id").mod(5),
    Feature("history").truncate(2),
    Feature("nested").truncate(1),
    Feature("text").hash("farm"),
    Feature("crossed").cross("id", "history"),
    Feature("logged").select("count").log1p().fill_missing(0.5),
    Feature("filled").select("count").fill_missing(-1),
    Feature("pair").cross("id", "count"),
    Feature("digits").to_ids(),
    Feature("words").select("text", raw=True).lower().strip().split("a").hash("farm"),
    Feature("start").select("text", raw=True).truncate(2).substring(0, 1),
]

numbers = st.integers(-9, 9)
rows = st.fixed_dictionaries(
    {
        "price": st.none() | st.floats(-2, 9, width=32),
        "id": st.none() | numbers,
        "count": st.none() | numbers,
        "one": st.none() | numbers,
        "history": st.none() | st.lists(numbers, max_size=4),
        "nested": st.none() | st.lists(st.lists(numbers, max_size=3), max_size=3),
        "weighted": st.none() | st.lists(st.tuples(numbers, st.floats(0, 2, width=32)), max_size=3),
        "text": st.none() | st.text("ab", max_size=4),
        "digits": st.none() | st.text("12", max_size=4),
    }
)


class Rows:
    """A source of these rows, read in pieces of `piece`."""

    def __init__(self, table, piece):
        self.schema = SCHEMA
        self._table, self._piece = table, piece

    def parts(self):
        return [Part("rows", len(self._table))]

    def read(self, split):
        part = self._table.slice(split.first, split.count).combine_chunks()
        yield from part.to_batches(max_chunksize=self._piece)


def collect(loader, into):
    for batch in loader:
        into.append(batch)


def on_batches(step):
    """The same step without a word about rows."""
    return lambda argument: step(argument)


@settings(deadline=None)
@given(
    st.lists(rows, max_size=25),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 30),
    st.sampled_from([0, 4, 30]),
    st.booleans(),
)
def test_pieces_give_the_batches_that_single_batches_give(data, batch, piece, split, shuffle, drop):
    table = pa.Table.from_pylist(data, SCHEMA)
    decoder, engine = Decoder(COLUMNS), FeatureEngine(FEATURES)
    assert decoder.row_wise
    assert engine.row_wise

    def batches(decode, transform):
        source = Rows(table, piece)
        options = {"shuffle": shuffle, "split_records": split, "drop_remainder": drop}
        return list(Loader(source, decode, batch, transform=transform, **options))

    expected = batches(on_batches(decoder), on_batches(engine))
    for transform in (engine, on_batches(engine)):
        got = batches(decoder, transform)
        assert [b.samples for b in got] == [b.samples for b in expected]
        for ours, theirs in zip(got, expected, strict=True):
            assert isinstance(ours, Batch)
            assert_same(ours, theirs)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 40), st.sampled_from([0, 7]))
def test_positions_are_exact_between_batches_of_one_piece(count, batch, stop, shuffle):
    def loader():
        decoder = Decoder([Fixed("record")])
        return Loader(TableSource([count], piece=50), decoder, batch, shuffle=shuffle, split_records=5)

    whole = records_of(loader())
    first, second = loader(), loader()
    begun = [each for each, _ in zip(first, range(stop), strict=False)]
    # zip takes one batch more than it gives, unless there are no more.
    taken = min(count, (len(begun) + 1) * batch)
    second.load_state_dict(first.state_dict())
    assert records_of(second) == whole[taken:]


def test_a_row_wise_transform_gets_pieces_and_another_gets_batches():
    sizes = {True: [], False: []}

    def transform(row_wise):
        def count(batch):
            sizes[row_wise].append((batch.samples, threading.current_thread().name))
            return batch

        count.row_wise = row_wise
        return count

    for row_wise in sizes:
        source = TableSource([40], piece=40)
        decoder = Decoder([Fixed("record")])
        got = Loader(source, decoder, 8, transform=transform(row_wise), split_records=40)
        assert records_of(got) == list(range(40))
    assert sizes == {True: [(40, "karvan-data")], False: [(8, "karvan-data")] * 5}


def test_an_engine_with_an_op_that_looks_at_several_rows_gets_batches():
    class Centre(ElementOp):
        name = "centre"
        row_wise = False

        def compute(self, values, *parameters):
            return values - values.min()

    engine = FeatureEngine([Feature("record", ops=(Centre(),))])
    assert not engine.row_wise
    got = Loader(TableSource([20], piece=20), Decoder([Fixed("record")]), 8, transform=engine)
    assert records_of(got) == [*range(8), *range(8), *range(4)]


@pytest.mark.parametrize("step", ["decode", "transform"])
def test_a_fault_in_a_piece_is_an_error_of_the_batch_that_holds_it(step):
    def picky(rows):
        records = rows if isinstance(rows, Batch) else decode(rows)
        if 20 in records["record"].tolist():
            raise ZeroDivisionError
        return records

    picky.row_wise = True
    steps = (
        {"decode": picky} if step == "decode" else {"decode": Decoder([Fixed("record")]), "transform": picky}
    )
    loader = Loader(TableSource([60], piece=60), batch_size=8, workers=2, **steps)
    got = []
    with pytest.raises(ZeroDivisionError):
        collect(loader, got)
    assert records_of(got) == list(range(16))
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))
    assert no_threads_left()


def test_a_fault_names_the_record_and_the_column():
    lists = [[1, 2]] * 13 + [[1]] + [[1, 2]] * 20
    source = Rows(pa.table({"history": lists}), 40)
    loader = iter(Loader(source, Decoder([Fixed("history", length=2)]), 5))
    assert [next(loader).samples, next(loader).samples] == [5, 5]
    with pytest.raises(DataError, match=r"record 13, column 'history': Expected 2 values, but there are 1"):
        next(loader)


def test_a_row_wise_step_that_loses_rows_is_an_error():
    def halve(batch):
        return {"record": batch["record"][::2]}

    halve.row_wise = True
    with pytest.raises(ValueError, match="must give a row for each of 8 rows, but gave 4"):
        list(Loader(TableSource([20], piece=20), Decoder([Fixed("record")]), 8, transform=halve))


def test_batches_without_columns_keep_the_position():
    loader = Loader(TableSource([20]), Decoder([]), 8)
    assert len(list(loader)) == 3
    assert loader.state_dict()["places"] == [[0, 1, 0, 3]]


def test_threads_of_a_loader_leave_the_number_of_torch_threads_alone():
    inside = []

    def transform(batch):
        inside.append(torch.get_num_threads())
        return batch

    before = torch.get_num_threads()
    list(Loader(TableSource([20]), decode, 8, transform=transform))
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [1] * 3
    assert [torch.get_num_threads(), *later] == [before] * 2


def test_ragged_rows_of_a_batch_start_at_zero():
    source = Rows(pa.table({"history": [[1], [2, 3], [4], [5, 6, 7]]}), 4)
    first, second = Loader(source, Decoder([Varlen("history")]), 2)
    assert second["history"].equal(Ragged.from_lists([[4], [5, 6, 7]]))
    assert second["history"].offsets.tolist() == [0, 1, 4]
    assert first["history"].validate().rows == 2
