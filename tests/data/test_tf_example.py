"""tf.Example: what others write is read as columns, what we write others read."""

from contextlib import suppress
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from record_reference import field, write_example
from rows import read_all

import karvan as kv
from karvan.data.errors import DataError
from karvan.data.formats import tf_example as examples
from karvan.data.formats.open_files import open_files, read_records
from karvan.data.formats.tf_example import Payloads

INTEGERS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=4)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4)
BYTES = st.lists(st.binary(max_size=6), min_size=1, max_size=4)
COLUMNS = {"i": pa.list_(pa.int64()), "f": pa.list_(pa.float32()), "b": pa.list_(pa.binary())}
INTACT = ({"i": [1, 300], "b": [b"abc"]}, {"i": [-300], "f": [1.5], "b": [b"abc"]}, {"i": [3]}, {"f": [2.5]})
FEATURES = st.fixed_dictionaries(
    {},
    optional={
        "i": st.none() | st.just(("integers", [])) | INTEGERS,
        "f": st.none() | st.just(("floats", [])) | FLOATS,
        "b": st.none() | st.just(("bytes", [])) | BYTES,
    },
)


def example_class():
    """TensorFlow's message, declared as its example.proto and feature.proto are, for Google's library."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def add(name, *fields, within=None):
        message = (file.message_type if within is None else within.nested_type).add(name=name)
        for number, (field_name, label, type_, type_name) in enumerate(fields, 1):
            message.field.add(name=field_name, number=number, label=label, type=type_, type_name=type_name)
        return message

    one, many, inner = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
    add("BytesList", ("value", many, kinds.TYPE_BYTES, None))
    add("FloatList", ("value", many, kinds.TYPE_FLOAT, None))
    add("Int64List", ("value", many, kinds.TYPE_INT64, None))
    lists = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
    feature = add("Feature", *((name, one, inner, f".tensorflow.{type_}") for name, type_ in lists))
    feature.oneof_decl.add(name="kind")
    for each in feature.field:
        each.oneof_index = 0
    features = add("Features", ("feature", many, inner, ".tensorflow.Features.FeatureEntry"))
    entry = add(
        "FeatureEntry",
        ("key", one, kinds.TYPE_STRING, None),
        ("value", one, inner, ".tensorflow.Feature"),
        within=features,
    )
    entry.options.map_entry = True
    add("Example", ("features", one, inner, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


Example = example_class()


def payloads(records, first=0):
    ends = np.cumsum([0, *map(len, records)]).astype(np.int64)
    data = np.frombuffer(b"".join(records), np.uint8)
    return Payloads(data, ends[:-1], np.diff(ends), first)


def by_google(record):
    made = {}
    for name, feature in Example.FromString(record).features.feature.items():
        kind = feature.WhichOneof("kind")
        made[name] = None if kind is None else list(getattr(feature, kind).value)
    return made


def is_readable(record):
    """Whether Google reads it."""
    with suppress(DecodeError):
        return by_google(record) is not None
    return False


def plain(features):
    """What the columns of a record must hold."""
    values = {name: features.get(name) for name in COLUMNS}
    return {name: [] if isinstance(value, tuple) else value for name, value in values.items()}


@given(st.lists(FEATURES, max_size=6), st.booleans())
def test_examples_are_read_as_google_reads_them(rows, packed):
    records = [write_example(row, packed) for row in rows]
    got = examples.decode(payloads(records), COLUMNS, True).to_pylist()
    assert got == [plain(row) for row in rows]
    for record, row in zip(records, rows, strict=True):
        assert plain(by_google(record)) == plain(row)


@given(st.lists(FEATURES, max_size=6))
def test_what_is_encoded_google_reads_and_we_read(rows):
    table = pa.RecordBatch.from_pylist([plain(row) for row in rows], pa.schema(list(COLUMNS.items())))
    data, bounds = examples.encode(table)
    records = [bytes(data[a:b]) for a, b in pairwise(bounds)]
    assert [plain(by_google(record)) for record in records] == table.to_pylist()
    assert examples.decode(payloads(records), COLUMNS, True).to_pylist() == table.to_pylist()


@given(st.lists(st.binary(max_size=30), max_size=4), st.data(), st.booleans())
def test_bytes_that_are_no_example_are_an_error_and_never_a_crash(records, data, all_named):
    good = write_example(data.draw(st.sampled_from(INTACT)))
    at = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    for record in [*records, damaged]:
        made = place = None
        try:
            made = examples.decode(payloads([record], 7), COLUMNS, all_named).to_pylist()
        except DataError as error:
            place = error.place
        if made is None:
            assert place == "record 7"
        elif all_named or is_readable(record):  # a feature that no column names is an error, or not read
            assert made == [plain(by_google(record))]


def test_features_that_come_twice_are_merged_as_protocol_buffers_are():
    first, second = write_example({"i": [1], "f": [0.5]}), write_example({"i": [2, 3]})
    both_lists = field(1, field(1, field(1, b"i") + field(2, field(2, b"") + field(3, field(1, b"\x05")))))
    two_values = field(
        1, field(1, field(1, b"i") + field(2, field(3, b"\x08\x01")) + field(2, field(3, b"\x08\x02")))
    )
    value_first = field(1, field(1, field(2, field(3, b"\x08\x09")) + field(1, b"i")))
    for record in (first + second, second + first, both_lists, two_values, value_first):
        got = examples.decode(payloads([record]), COLUMNS, True).to_pylist()[0]
        assert got == plain(by_google(record))
    assert got["i"] == [9]


def test_a_sequence_example_is_an_error(tmp_path):
    path = tmp_path / "x.tfrecord"
    with kv.data.TFRecordWriter(path) as writer:
        writer.write(write_example({"i": [1]}) + field(2, field(1, b"")))
    with pytest.raises(DataError, match=r"x\.tfrecord, record 0: The record is not a tf.Example.*'bytes'"):
        _ = open_files(path).schema


def test_types_are_those_of_the_first_records_unless_given(tmp_path):
    path = tmp_path / "x.tfrecord"
    rows = [{"id": [1], "tags": [b"a", b"b"], "p": [0.5]}, {"id": [2], "q": [1]}, {"tags": [b"c"]}]
    with kv.data.TFRecordWriter(path) as writer:
        for row in rows:
            writer.write(write_example(row))
    found = open_files(path)
    assert found.schema == pa.schema(
        [("id", pa.int64()), ("p", pa.float32()), ("q", pa.int64()), ("tags", pa.list_(pa.binary()))]
    )
    assert read_all(found).to_pylist() == [
        {"id": 1, "p": 0.5, "q": None, "tags": [b"a", b"b"]},
        {"id": 2, "p": None, "q": 1, "tags": None},
        {"id": None, "p": None, "q": None, "tags": [b"c"]},
    ]
    given_types = {"tags": "list<string>", "q": "bool", "id": "list<int32>", "late": "float32"}
    asked = open_files(path, schema=given_types)
    assert asked.schema.names == ["tags", "q", "id", "late", "p"]
    assert read_all(asked).to_pylist()[1] == {"tags": None, "q": True, "id": [2], "late": None, "p": None}
    with pytest.raises(ValueError, match=r"Column 'id' of tf\.Example records can be integers"):
        open_files(path, schema={"id": "map<int64, float32>"})


def test_a_list_after_single_values_is_an_error_that_says_what_to_do_and_a_varlen_says_it(tmp_path):
    path = tmp_path / "x.tfrecord"
    with kv.data.TFRecordWriter(path) as writer:
        for number in range(1500):
            writer.write(write_example({"ids": [number] if number < 1400 else [1, 2]}))
    with pytest.raises(
        DataError, match=r"x\.tfrecord, record 1400, column 'ids': Expected one value.*schema="
    ):
        list(kv.data.read(path, 100))
    batches = list(kv.data.read(path, 100, columns=[kv.data.Varlen("ids")]))
    assert sum(len(batch["ids"].values) for batch in batches) == 1600


def test_a_feature_that_only_later_records_have_is_an_error_and_not_lost(tmp_path):
    path = tmp_path / "x.tfrecord"
    with kv.data.TFRecordWriter(path) as writer:
        for number in range(1500):
            writer.write(write_example({"a": [1]} if number < 1400 else {"a": [1], "late": [2]}))
    with pytest.raises(DataError, match=r"record 1400, column 'late': The first records do not have"):
        read_all(open_files(path))
    assert read_all(open_files(path, columns=["a"])).num_rows == 1500
    late = read_all(open_files(path, schema={"late": "int64"}))["late"].to_pylist()
    assert late == [None] * 1400 + [2] * 100


def test_another_list_than_the_type_says_names_record_and_column(tmp_path):
    path = tmp_path / "x.recordio"
    with kv.data.RecordIOWriter(path) as writer:
        for number in range(1100):
            writer.write(write_example({"a": [1] if number < 1050 else [1.5]}))
    with pytest.raises(DataError, match=r"record 1050, column 'a': Expected the list int64_list.*float_list"):
        read_all(open_files(path))
    with pytest.raises(DataError, match=r"record 0, column 'a': Expected the list float_list"):
        read_all(open_files(path, schema={"a": "float32"}))


def test_files_of_one_data_set_have_the_features_of_all(tmp_path):
    for name, row in (("a", {"x": [1]}), ("b", {"x": [1, 2], "y": [b"t"]})):
        with kv.data.TFRecordWriter(tmp_path / f"{name}.tfrecord") as writer:
            writer.write(write_example(row))
    source = open_files(tmp_path)
    assert read_all(source).to_pylist() == [{"x": [1], "y": None}, {"x": [1, 2], "y": b"t"}]
    with kv.data.TFRecordWriter(tmp_path / "c.tfrecord") as writer:
        writer.write(write_example({"x": [0.5]}))
    with pytest.raises(DataError, match=r"c\.tfrecord, column 'x': Expected the type list<.*int64"):
        _ = open_files(tmp_path).schema


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([[1, None]]), "cannot hold null"),
        (pa.array([[[1]]]), "the column's type is list<"),
        (pa.array([0.1]), "would round"),
    ],
)
def test_rows_that_an_example_cannot_hold_are_an_error_and_leave_no_file(tmp_path, values, message):
    with (
        pytest.raises(DataError, match=f"column 'x': .*{message}"),
        kv.data.TFRecordWriter(tmp_path / "x.tfrecord") as writer,
    ):
        writer.write_rows(pa.table({"x": values}))
    assert list(tmp_path.iterdir()) == []


def test_rows_of_every_plain_type_come_back(tmp_path):
    columns = {
        "small": pa.array([1, None, 3], pa.int8()),
        "unsigned": pa.array([1 << 63, 2, None], pa.uint64()),
        "flag": pa.array([True, False, None]),
        "half": pa.array([0.5, None, 2.0], pa.float16()),
        "double": pa.array([0.5, None, 2.0], pa.float64()),
        "text": pa.array(["ü", "", None]),
        "large": pa.array(["a", "b", None], pa.large_string()),
        "word": pa.array(["a", "b", "a"]).dictionary_encode(),
        "lists": pa.array([[1, 2], [], None], pa.list_(pa.int32())),
        "wide": pa.array([["a"], None, []], pa.large_list(pa.string())),
        "pairs": pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2)),
    }
    table = pa.table(columns).slice(1, 2)  # whose arrays begin in the middle of their memory
    path = tmp_path / "x.tfrecord"
    with kv.data.TFRecordWriter(path) as writer:
        writer.write_rows(table)
        writer.write_rows(pa.table(columns).to_batches()[0].slice(0, 1))
    types = {name: array.type for name, array in columns.items()}
    types |= {"word": pa.string(), "wide": pa.list_(pa.string()), "pairs": pa.list_(pa.float32())}
    expected = [*table.to_pylist(), *pa.table(columns).slice(0, 1).to_pylist()]
    assert read_all(open_files(path, schema=types)).to_pylist() == expected
    assert len(list(read_records(path))) == 3
