"""The same rows in every file format, written and compared the slow and obvious way."""

import pyarrow as pa
import torch
from pyarrow import csv, ipc, orc
from pyarrow import parquet as pq

from karvan.data.formats.recordio import RecordIOWriter
from karvan.data.formats.tfrecord import TFRecordWriter
from karvan.data.source import Split
from karvan.ragged import NestedRagged, Ragged

RECORDS = ("tfrecord", "recordio")
FORMATS = ("parquet", "orc", "csv", "tsv", "arrow", "arrows", *RECORDS)

SCHEMA = pa.schema(
    [
        ("user", pa.int64()),
        ("price", pa.float32()),
        ("clicked", pa.bool_()),
        ("query", pa.string()),
        ("history", pa.list_(pa.int64())),
        ("tags", pa.list_(pa.string())),
        ("sessions", pa.list_(pa.list_(pa.int64()))),
        ("interests", pa.map_(pa.int64(), pa.float32())),
    ]
)


def schema_of(kind):
    """What of the schema a format can hold: records of tf.Example have no lists of lists and no pairs."""
    return pa.schema(list(SCHEMA)[:6]) if kind in RECORDS else SCHEMA


def table(rows):
    return pa.Table.from_pylist(
        [
            {
                "user": i * 0x9E3779B97F4A7C15 % (1 << 64) - (1 << 63),
                "price": None if i % 7 == 3 else i / 8,
                "clicked": i % 3 == 0,
                "query": None if i % 5 == 4 else f'wörds "{i}", and\tmore',
                "history": None if i % 6 == 5 else list(range(i, i + i % 4)),
                "tags": [f"t{j}" for j in range(i % 3)],
                "sessions": [list(range(1 + j)) for j in range(i % 3)],
                "interests": [(j, j / 4) for j in range(i % 5)],
            }
            for i in range(rows)
        ],
        schema=SCHEMA,
    )


def write(data, path, group=100):
    """A file of the format its name says, with groups of about `group` rows where the format has groups."""
    kind = path.suffix[1:]
    if kind == "parquet":
        pq.write_table(data, path, row_group_size=group, write_page_checksum=True)
    elif kind == "orc":
        # Stripes are cut by size, looked at every so many rows.
        orc.write_table(data, path, stripe_size=1024, batch_size=group)
    elif kind in ("arrow", "arrows"):
        with (ipc.new_file if kind == "arrow" else ipc.new_stream)(path, data.schema) as writer:
            writer.write_table(data, max_chunksize=group)
    elif kind in RECORDS:
        held = [name for name in data.schema.names if name not in ("sessions", "interests")]
        with (TFRecordWriter if kind == "tfrecord" else RecordIOWriter)(path) as writer:
            for start in range(0, data.num_rows, group):
                writer.write_rows(data.slice(start, group).select(held))
    else:
        in_cells = [
            _cells(column, field.type) for column, field in zip(data.columns, data.schema, strict=True)
        ]
        options = csv.WriteOptions(delimiter="\t" if kind == "tsv" else ",")
        csv.write_csv(pa.table(in_cells, names=data.schema.names), path, options)
    return path


def _cells(column, type_):
    if pa.types.is_map(type_):
        text = [None if row is None else "|".join(f"{k}:{v!r}" for k, v in row) for row in column.to_pylist()]
    elif pa.types.is_list(type_):
        inner = pa.types.is_list(type_.value_type)
        text = [
            None if row is None else "|".join(";".join(map(str, x)) if inner else str(x) for x in row)
            for row in column.to_pylist()
        ]
    else:
        return column
    return pa.array(text, pa.string())


def options(path):
    """What a source must be told: CSV files and tf.Example do not know the types of their columns."""
    kind = path.suffix[1:]
    return {"schema": schema_of(kind)} if kind in ("csv", "tsv", *RECORDS) else {}


def read_all(source, step=None):
    """Every record of every part in order, in splits of `step`."""
    batches = []
    for part in source.parts():
        size = step or max(part.records, 1)
        for first in range(0, part.records, size):
            batches += source.read(Split(part.path, first, min(size, part.records - first)))
    return pa.Table.from_batches(batches, source.schema)


def assert_same(ours, theirs):
    """Two batches with the same names, types, values, offsets and weights."""
    assert list(ours) == list(theirs)
    for name in ours:
        for mine, other in zip(_tensors(ours[name]), _tensors(theirs[name]), strict=True):
            if mine is None or other is None:
                assert mine is other
            else:
                assert mine.dtype == other.dtype
                if mine.is_floating_point():  # NaN is a missing value, and equals nothing
                    assert torch.equal(mine.isnan(), other.isnan()), name
                    mine, other = mine.nan_to_num(0.0), other.nan_to_num(0.0)
                assert torch.equal(mine, other), name


def _tensors(entry):
    if isinstance(entry, Ragged):
        return [entry.values, entry.offsets, entry.weights]
    if isinstance(entry, NestedRagged):
        return [entry.values, entry.inner, entry.outer]
    return [entry]
