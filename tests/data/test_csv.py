"""CSV and TSV: types, cells with lists, line ends of all kinds, and Criteo's logs."""

import bz2
import gzip
import random
import re

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import read_all

import karvan as kv
from karvan.data.columns.decoder import Decoder
from karvan.data.columns.kinds import type_of
from karvan.data.errors import DataError
from karvan.data.formats import criteo
from karvan.data.formats import csv as csv_module
from karvan.data.formats import csv_cells as cells
from karvan.data.formats.open_files import open_files
from karvan.data.read import read
from karvan.data.source import Split


def put(folder, text, name="x.csv"):
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_types_are_inferred_from_the_first_file_and_hold_for_all(tmp_path):
    put(tmp_path, "a,b,c\n1,0.5,x\n2,,y\n", "1.csv")
    put(tmp_path, "c,a,b\nz,3,1\n", "2.csv")
    source = open_files(tmp_path)
    assert source.schema == pa.schema([("a", pa.int64()), ("b", pa.float64()), ("c", pa.string())])
    assert read_all(source).to_pylist() == [
        {"a": 1, "b": 0.5, "c": "x"},
        {"a": 2, "b": None, "c": "y"},
        {"a": 3, "b": 1.0, "c": "z"},
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_empty_lines_and_a_last_line_without_end(tmp_path, end):
    text = end.join(["a,b", "1,2", "", "", "3,4", "", '"5",6'])
    assert read_all(open_files(put(tmp_path, text)), 1)["a"].to_pylist() == [1, 3, 5]


def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path):
    assert open_files(put(tmp_path, "\ufeffa\n1\n")).schema.names == ["a"]


@given(
    st.lists(st.sampled_from(["1,x", "22,yy", "", "333,zzz zzz", "4,"]), max_size=30),
    st.integers(4, 40),
    st.booleans(),
)
def test_runs_of_lines_of_any_size_give_the_same_records(tmp_path_factory, lines, span, ended):
    path = put(tmp_path_factory.mktemp("runs"), "\n".join(["a,b", *lines]) + "\n" * ended)
    before, csv_module._SPAN = csv_module._SPAN, span
    try:
        source = open_files(path, schema={"a": pa.int64(), "b": pa.string()})
        expected = [int(line.split(",")[0]) for line in lines if line]
        assert source.parts()[0].records == len(expected)
        assert read_all(source, 3)["a"].to_pylist() == expected
    finally:
        csv_module._SPAN = before


@pytest.mark.parametrize("quoted", [False, True])
def test_line_ends_in_quotes_need_to_be_announced(tmp_path, quoted):
    path = put(tmp_path, 'a,b\n1,"x\ny"\n2,z\n')
    if quoted:
        source = open_files(path, quoted_newlines=True)
        assert [part.records for part in source.parts()] == [2]
        assert read_all(source, 1)["b"].to_pylist() == ["x\ny", "z"]
    else:
        with pytest.raises(DataError, match=r"x\.csv"):
            read_all(open_files(path))


def test_compressed_files_are_read_in_splits_too(tmp_path):
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"a\n" + b"".join(b"%d\n" % i for i in range(1000))))
    source = open_files(path)
    assert read_all(source, 70)["a"].to_pylist() == list(range(1000))
    assert next(source.read(Split(str(path), 500, 2)))["a"].to_pylist() == [500, 501]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"x\.csv\.gz"):
        read_all(open_files(path))


def test_a_few_bytes_that_decompress_to_one_long_line_are_refused(tmp_path):
    path = tmp_path / "x.csv.bz2"
    path.write_bytes(bz2.compress(b"a,b\n" + b"1" * (65 << 20)))
    with pytest.raises(DataError, match=r"x\.csv\.bz2.* A line is longer than 64 MiB"):
        open_files(path).parts()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", r"x\.csv, among records 0 to [01]: .*2 columns.*got 1"),
        ("a,b\n1,2\n3,4,5\n", r"x\.csv, among records 0 to [01]: .*2 columns.*got 3"),
        ("a,b\n1,2\n3,x\n", r"x\.csv, record 1, line 3, column 'b': Expected integers, got 'x'"),
        ("\n\na,b\n1,2\n", "Expected a header"),
        ("a,a\n1,2\n", "column 'a': The header names the column twice"),
        ("a,b\n1,2\r3,4\n", r"x\.csv, among records 0 to [01]: Expected 1 records, but there are more"),
        ("a,c\n1,2\n", "column 'b': The schema has a column that the file does not have"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path, text, message):
    path = put(tmp_path, text)
    with pytest.raises(DataError, match=message):
        read_all(open_files(path, schema={"a": pa.int64(), "b": pa.int64()}))


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"a,b\n1,\xff\xfe\n")
    with pytest.raises(DataError, match=r"column 'b'.*UTF8"):
        read_all(open_files(path, schema={"b": pa.string()}))
    assert read_all(open_files(path, schema={"b": pa.binary()}))["b"].to_pylist() == [b"\xff\xfe"]


def test_long_lines_are_read(tmp_path):
    wide = "x" * (3 << 20)
    path = put(tmp_path, f"a,b\n1,{wide}\n2,y\n")
    assert [len(x) for x in read_all(open_files(path))["b"].to_pylist()] == [len(wide), 1]


@pytest.mark.parametrize(
    ("type_", "cell", "value"),
    [
        (pa.list_(pa.int64()), "1|2|3", [1, 2, 3]),
        (pa.list_(pa.int64()), "", None),
        (pa.list_(pa.float32()), "0.5", [0.5]),
        (pa.list_(pa.string()), "a b|c", ["a b", "c"]),
        (pa.list_(pa.list_(pa.int64())), "1;2|3", [[1, 2], [3]]),
        (pa.list_(pa.list_(pa.int64())), "1||3", [[1], [], [3]]),
        (pa.map_(pa.string(), pa.float64()), "a:0.5|b:1", [("a", 0.5), ("b", 1.0)]),
        (pa.list_(pa.struct([("k", pa.int64()), ("v", pa.float64())])), "7:2", [{"k": 7, "v": 2.0}]),
    ],
)
def test_cells_hold_lists_and_weights(tmp_path, type_, cell, value):
    path = put(tmp_path, f"n,x\n0,{cell}\n1,\n2,{cell}\n")
    got = read_all(open_files(path, schema={"x": type_}))
    assert got.schema.field("x").type == type_
    assert got["x"].to_pylist() == [value, None, value]


@pytest.mark.parametrize(
    ("type_", "cell"), [(pa.list_(pa.int64()), "1|x"), (pa.map_(pa.int64(), pa.float32()), "1|2")]
)
def test_a_cell_that_is_no_list_is_an_error_that_names_the_column(tmp_path, type_, cell):
    path = put(tmp_path, f"n,x\n0,{cell}\n")
    with pytest.raises(DataError, match=r"column 'x'"):
        read_all(open_files(path, schema={"x": type_}))


@given(st.lists(st.none() | st.integers(0, (1 << 64) - 1), max_size=20), st.booleans(), st.integers(0, 3))
def test_hexadecimal_ids_are_parsed(values, eight, skip):
    values = [x if x is None or not eight else x >> 32 for x in values]
    texts = [None if x is None else f"{x:08x}" if eight else f"{x:X}" for x in values]
    got = cells.from_hex(pa.array(texts, pa.string())[skip:], "x").to_pylist()
    assert [None if x is None else x % (1 << 64) for x in got] == values[skip:]


@pytest.mark.parametrize("texts", [["0000000g", "00000001"], ["xyz"], ["123456789012345678"]])
def test_ids_that_are_not_hexadecimal_are_an_error(texts):
    with pytest.raises(DataError, match="column 'C1': Expected ids in base 16"):
        cells.from_hex(pa.array(texts), "C1")


def criteo_line(draw):
    numbers = [draw.choice(["", "-3", "0", "12345"]) for _ in range(13)]
    ids = [draw.choice(["", f"{draw.getrandbits(32):08x}"]) for _ in range(26)]
    return [draw.choice("01"), *numbers, *ids]


def test_criteo_logs_are_decoded_as_written(tmp_path):
    draw = random.Random(0)
    lines = [criteo_line(draw) for _ in range(200)]
    path = put(tmp_path, "".join("\t".join(line) + "\n" for line in lines), "train.txt")
    source = criteo.open_logs(path)
    assert source.schema == criteo.schema()
    records = read_all(source).combine_chunks().to_batches()[0]
    batch = Decoder(criteo.columns())(records)
    assert list(batch) == ["label", *criteo.INTEGERS, *criteo.IDS]
    for place, (name, tensor) in enumerate(batch.items()):
        column = [line[place] for line in lines]
        if name in criteo.IDS:
            assert tensor.dtype == torch.int64
            assert tensor.tolist() == [int(cell, 16) if cell else -1 for cell in column]
        else:
            assert tensor.dtype == torch.float32
            assert tensor.tolist() == [float(cell or 0) for cell in column]


def test_criteo_test_logs_have_no_label(tmp_path):
    line = criteo_line(random.Random(1))[1:]
    source = criteo.open_logs(put(tmp_path, "\t".join(line), "test.txt"), labelled=False)
    assert source.schema.names == [*criteo.INTEGERS, *criteo.IDS]
    assert read_all(source).num_rows == 1


def test_options_are_checked(tmp_path):
    path = put(tmp_path, "1,2\n")
    with pytest.raises(ValueError, match="needs a schema"):
        open_files(path, header=False)
    with pytest.raises(ValueError, match="must differ"):
        open_files(path, separators=("|", "|", ":"))
    assert read_all(open_files(path, header=False, schema={"a": pa.int64(), "b": pa.int8()})).to_pylist() == [
        {"a": 1, "b": 2}
    ]


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("last", ["", "\r"])
def test_lines_may_end_in_carriage_returns(tmp_path, header, quoted, last):
    path = tmp_path / "x.csv"
    path.write_bytes(("a,b\r" * header + f"1,x\r2,\r\r3,z{last}").encode())
    schema = {"a": pa.int64(), "b": pa.string()}
    source = open_files(path, header=header, schema=schema, quoted_newlines=quoted)
    assert read_all(source).to_pylist() == [{"a": 1, "b": "x"}, {"a": 2, "b": None}, {"a": 3, "b": "z"}]


def test_a_header_that_cannot_be_read_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"a\rb,c\n1,2\n")
    with pytest.raises(DataError, match=r"x\.csv: The header cannot be read"):
        read_all(open_files(path))


BIG = st.integers(0, (1 << 64) - 1)


@given(st.lists(st.none() | BIG, min_size=1, max_size=9), st.booleans(), st.booleans())
def test_ids_of_64_bits_stay_exact(tmp_path_factory, values, small_first, quoted):
    """Also where the lines that the type was inferred from have small ids only."""
    folder = tmp_path_factory.mktemp("ids")
    if small_first:
        (folder / "0.csv").write_text("n,x\n0,5\n")
    lines = "".join(f"0,{'' if x is None else x}\n" for x in values)
    (folder / "1.csv").write_text(f"n,x\n{lines}")
    got = read_all(open_files(folder, quoted_newlines=quoted))["x"].to_pylist()
    expected = [5] * small_first + values
    if all(x is None for x in expected):
        assert got == expected
    else:
        assert [None if x is None else x % (1 << 64) for x in got] == expected


@pytest.mark.parametrize("first", ["7", "9223372036854775808", "18446744073709551616"])
@pytest.mark.parametrize("quoted", [True, False])
def test_an_id_beyond_64_bits_is_an_error_that_names_the_column(tmp_path, first, quoted):
    path = put(tmp_path, f"n,x\n0,{first}\n0,18446744073709551616\n")
    with pytest.raises(DataError, match=r"x\.csv.*column 'x': Expected 64-bit integers.*2\^64.*float64"):
        read_all(open_files(path, quoted_newlines=quoted))
    assert read_all(open_files(path, schema={"x": "float64"}))["x"].to_pylist()[1] == 2.0**64


def test_an_id_beyond_64_bits_behind_the_lines_of_inference_is_an_error(tmp_path):
    put(tmp_path, "n,x\n0,1\n", "a.csv")
    put(tmp_path, "n,x\n0,18446744073709551616\n", "b.csv")
    with pytest.raises(
        DataError, match=r"b\.csv.*column 'x': Expected 64-bit integers, as in the first lines"
    ):
        read_all(open_files(tmp_path))


def test_whole_numbers_among_fractions_are_floats(tmp_path):
    path = put(tmp_path, "n,x\n0,9223372036854775808\n0,0.5\n")
    assert read_all(open_files(path))["x"].to_pylist() == [2.0**63, 0.5]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("quoted", [True, False])
@given(
    values=st.lists(st.none() | st.integers(0, 99), max_size=9),
    last_end=st.booleans(),
    text=st.booleans(),
    span=st.integers(1, 20),
)
def test_an_empty_line_of_a_file_of_one_column_is_a_null_record(
    tmp_path_factory, end, quoted, values, last_end, text, span
):
    cells = ["x", *("" if value is None else f"{'a' * text}{value}" for value in values)]
    # Without its end, an empty last line does not exist.
    last = end if last_end or not cells[-1] else ""
    path = put(tmp_path_factory.mktemp("one"), end.join(cells) + last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_module, "_SPAN", span if not quoted else 1 << 16)
        got = read_all(open_files(path, schema={"x": "string"}, quoted_newlines=quoted))["x"].to_pylist()
        assert got == [cell or None for cell in cells[1:]]
        inferred = read_all(open_files(path, quoted_newlines=quoted))["x"].to_pylist()
        assert inferred == (got if text else values)


def test_quotes_alone_in_a_line_are_null_among_numbers_and_empty_among_strings(tmp_path):
    assert read_all(open_files(put(tmp_path, 'x\n1\n""\n3\n')))["x"].to_pylist() == [1, None, 3]
    assert read_all(open_files(put(tmp_path, 'x\na\n""\n\nb\n')))["x"].to_pylist() == ["a", "", None, "b"]


def test_a_last_line_without_an_end_tells_types_too(tmp_path):
    assert read_all(open_files(put(tmp_path, "x,y\n,\n1,2.5"))).to_pylist()[1] == {"x": 1, "y": 2.5}


def test_a_header_alone_is_no_rows(tmp_path):
    path = put(tmp_path, "a,b\n")
    assert list(read(path, 4)) == []
    assert list(read(path, 4, columns=["a"], shuffle=10)) == []


@pytest.mark.parametrize("first", ["a,b\n", "a,b\n,\n,\n"])
def test_types_come_from_the_first_file_that_tells_them(tmp_path, first):
    put(tmp_path, first, "1.csv")
    put(tmp_path, "b,a\n0.5,3\n", "2.csv")
    put(tmp_path, "a,b\n4,1.5\n", "3.csv")
    source = open_files(tmp_path)
    assert source.schema == pa.schema([("a", pa.int64()), ("b", pa.float64())])
    assert read_all(source)["a"].to_pylist()[-2:] == [3, 4]


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("int64", pa.int64()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("timestamp[us]", pa.timestamp("us")),
        ("list<int64>", pa.list_(pa.int64())),
        (" list < list<string> > ", pa.list_(pa.list_(pa.string()))),
        ("map<int64, float32>", pa.map_(pa.int64(), pa.float32())),
    ],
)
def test_types_have_names(name, type_):
    assert type_of(name, "x") == type_
    assert type_of(type_, "x") == type_


@pytest.mark.parametrize("name", ["", "int65", "list", "list<int64", "list<int64>>", "map<int64>", "list<,>"])
def test_a_type_of_no_known_name_is_an_error_that_lists_some(name):
    with pytest.raises(ValueError, match=r"column 'x' must be one such as int64.*list<int64>"):
        type_of(name, "x")


def test_a_type_that_is_neither_name_nor_type_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="type of column 'a' must be a name such as int64"):
        open_files(put(tmp_path, "a\n1\n"), schema={"a": int})
    with pytest.raises(TypeError, match="must be lists of strings"):
        open_files(put(tmp_path, "a\n1\n"), nulls="NA")


def test_lists_in_cells_can_be_declared_by_name(tmp_path):
    path = put(tmp_path, 'a,h\n1,3 4\n2,\n3,""\n')
    options = {"schema": {"h": "list<int64>"}, "separators": [" ", ";", ":"]}
    (batch,) = read(path, 3, options=options)
    assert batch["h"].to_lists() == [[3, 4], [], []]


def test_a_column_with_text_in_any_file_is_text_in_all_of_them(tmp_path):
    put(tmp_path, "zip,x\n10115,1\n00501,2\n", "1.csv")
    put(tmp_path, "x,zip\n3,V3N4P\n0.5,20095\n", "2.csv")
    source = open_files(tmp_path)
    assert source.schema == pa.schema([("zip", pa.string()), ("x", pa.float64())])
    assert read_all(source).to_pylist() == [
        {"zip": "10115", "x": 1.0},
        {"zip": "00501", "x": 2.0},
        {"zip": "V3N4P", "x": 3.0},
        {"zip": "20095", "x": 0.5},
    ]


@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize(
    ("first", "late", "expected"),
    [
        ("7", "V3N4P", r"Expected integers.* got 'V3N4P'"),
        ("7", "1e5", r"Expected integers.* got '1e5'"),
        ("1.5", "123e4567", r"Expected numbers.* got '123e4567'"),
        ("", "V3N4P", r"Expected no values.* got 'V3N4P'"),
        ("true", "7", r"Expected cells of type bool, as in the first lines.* got '7'"),
    ],
)
def test_a_cell_unlike_the_first_lines_is_an_error_that_names_record_and_column(
    tmp_path, monkeypatch, first, late, expected, quoted
):
    monkeypatch.setattr(csv_module, "_BLOCK", 64)
    path = put(tmp_path, "n,x\n" + f"1,{first}\n" * 50 + f"1,{late}\n" + f"1,{first}\n")
    with pytest.raises(DataError, match=rf"x\.csv, .*column 'x': .*{expected}") as caught:
        read_all(open_files(path, quoted_newlines=quoted))
    assert '"string"' in str(caught.value)
    if quoted:
        assert "record 50," in str(caught.value) or first == "true"
    else:
        assert "record 50, line 52, column" in str(caught.value)
    declared = open_files(path, schema={"x": "string"}, quoted_newlines=quoted)
    assert read_all(declared)["x"].to_pylist()[50] == late


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("schema", [{}, {"cost": "float32"}])
def test_text_among_numbers_is_one_error_with_the_line_of_the_file_and_what_to_write(
    tmp_path, monkeypatch, packed, schema
):
    monkeypatch.setattr(csv_module, "_BLOCK", 64)
    monkeypatch.setattr(csv_module, "_SPAN", 512)
    text = "user,cost\r\n" + "1,1.5\r\n\r\n" * 200 + "2,free\r\n" + "3,2.5\r\n"
    path = put(tmp_path, text)
    if packed:
        path = tmp_path / "x.csv.gz"
        path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError) as caught:
        list(kv.data.read(str(path), 100, options={"schema": schema}))
    told = str(caught.value)
    assert f"{path}, record 200, line 402, column 'cost': Expected numbers" in told
    assert "got 'free'" in told
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert 'options={"nulls": ["", "free"]}' in told
    (batch,) = kv.data.read(str(path), 300, options={"schema": schema, "nulls": ["", "free"]})
    assert batch["cost"][199:].isnan().tolist() == [False, True, False]
    assert 'options={"schema": {"cost": "string"}}' in told
    assert "kv.Feature('cost').hash('farm')" in told
    hashed = kv.FeatureEngine([kv.Feature("cost").hash("farm")])
    options = {"schema": {"cost": "string"}}
    (batch,) = kv.data.read(str(path), 300, options=options, transform=hashed)
    assert int(batch["cost"][200]) == int(kv.ids.farm(["free"])[0])


def test_a_missing_label_of_a_csv_file_is_an_error_that_names_its_line(tmp_path):
    path = put(tmp_path, "user,label\n" + "1,1\n\n" * 30 + "2,\n")
    with pytest.raises(DataError, match=r"record 30, line 62, column 'label': The label is missing"):
        list(kv.data.read(str(path), 8, labels=["label"]))


@pytest.mark.parametrize("cells", [["123e4567", "12345678"], ["1e5"], ["7", "nan", "1E5"]])
def test_digits_with_an_exponent_may_be_base_16_and_need_a_declared_type(tmp_path, cells):
    path = put(tmp_path, "n,x\n" + "".join(f"1,{cell}\n" for cell in cells), "1.csv")
    with pytest.raises(DataError, match=r"1\.csv, column 'x': The cell '.*' may be .*base 16.*schema"):
        open_files(tmp_path).schema  # noqa: B018
    assert open_files(tmp_path, columns=["n"]).schema.names == ["n"]
    assert read_all(open_files(path, schema={"x": "string"}))["x"].to_pylist() == cells
    put(tmp_path, "n,x\n1,deadbeef\n", "2.csv")
    assert read_all(open_files(tmp_path))["x"].to_pylist() == [*cells, "deadbeef"]


def test_numbers_as_programs_write_them_stay_numbers(tmp_path):
    cells = ["1.0", "1e+20", "1e16", "inf", "-Infinity", "nan"]
    path = put(tmp_path, "n,x\n" + "".join(f"1,{cell}\n" for cell in cells))
    for quoted in (True, False):
        values = read_all(open_files(path, quoted_newlines=quoted))["x"].to_pylist()
        assert values[:-1] == [float(cell) for cell in cells[:-1]]


def test_a_column_that_the_first_file_lacks_is_reported(tmp_path, caplog):
    put(tmp_path, "a\n1\n", "1.csv")
    put(tmp_path, "a,b\n2,3\n", "2.csv")
    assert read_all(open_files(tmp_path))["a"].to_pylist() == [1, 2]
    assert "Column 'b' of" in caplog.text
    assert "2.csv is not read" in caplog.text


def test_a_header_of_numbers_is_a_warning_that_says_how_to_read_a_file_without_one(tmp_path, caplog):
    assert read_all(open_files(put(tmp_path, "1,2.5,-3\n2,3,4\n"))).num_rows == 1
    assert "x.csv has numbers (1, 2.5, -3)" in caplog.text
    caplog.clear()
    read_all(open_files(put(tmp_path, "39, State-gov, 77516\n50, Private, 83311\n")))
    assert "has numbers (39, 77516)" in caplog.text
    caplog.clear()
    read_all(open_files(put(tmp_path, "a,b2\n2,3\n")))
    assert not caplog.text


def test_a_file_without_a_header_needs_only_the_names_of_its_columns(tmp_path):
    path = put(tmp_path, "39, Private,0.5\n50, State-gov,\n")
    source = open_files(path, header=False, schema=["age", "work", "share"])
    assert source.schema.types == [pa.int64(), pa.string(), pa.float64()]
    assert read_all(source)["age"].to_pylist() == [39, 50]
    with pytest.raises(ValueError, match="header=False"):
        open_files(path, schema=["age", "work", "share"])
    with pytest.raises(TypeError, match="types by name, or names, got str"):
        open_files(path, header=False, schema="age")


@pytest.mark.parametrize(
    ("cells", "warns"),
    [
        (["007", "7", "08"], True),
        (["00501", "10115", "00501"], False),
        (["01", "02", "12"], False),
        (["0", "10", ""], False),
        (["0.07", "0.7", "1"], False),
        (["007", "7", "x"], False),
    ],
)
def test_cells_that_differ_in_leading_zeros_only_are_a_warning(tmp_path, caplog, cells, warns):
    path = put(tmp_path, "n,zip\n" + "".join(f"1,{cell}\n" for cell in cells))
    read_all(open_files(path))
    assert ("Column 'zip'" in caplog.text and '"zip": "string"' in caplog.text) == warns
    caplog.clear()
    read_all(open_files(path, schema={"zip": "string"}))
    assert not caplog.text


def test_text_of_another_encoding_is_a_warning(tmp_path, caplog):
    path = tmp_path / "x.csv"
    path.write_bytes("n,city\n1,Köln\n".encode("latin-1"))
    assert read_all(open_files(path))["city"].to_pylist() == ["Köln".encode("latin-1")]
    assert "Column 'city' of" in caplog.text
    assert "UTF-8" in caplog.text


def test_ids_in_base_16_may_begin_with_0x(tmp_path):
    (tmp_path / "a.csv").write_text("user,other\n0x1f,1\n0Xff,2\n,3\nff,4\n0x123456,5\n")
    data = kv.data.read(
        tmp_path / "a.csv", 5, options={"hexadecimal": ["user"]}, columns=[kv.data.Varlen("user")]
    )
    assert next(iter(data))["user"].values.tolist() == [0x1F, 0xFF, 0xFF, 0x123456]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("header", [True, False])
def test_a_file_in_utf_16_is_an_error_that_says_how_to_convert_it(tmp_path, encoding, header):
    path = tmp_path / "x.csv"
    path.write_bytes("user,city\n1,Zürich\n".encode(encoding))
    with pytest.raises(DataError, match=r"x\.csv.*UTF-16.*iconv"):
        read_all(open_files(path, header=header, schema=None if header else ["user", "city"]))


def test_a_header_in_another_encoding_is_an_error_that_says_how_to_convert_it(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes("größe,b\n1,2\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.csv.*header.*iconv"):
        read_all(open_files(path))


@pytest.mark.parametrize("option", ["delimiter", "quote"])
@pytest.mark.parametrize("mark", [", ", "tab", "é", 5, "\n"])
def test_a_delimiter_and_a_quote_are_one_character(tmp_path, option, mark):
    with pytest.raises(ValueError, match=re.escape(f"one ASCII character as {option}, got {mark!r}")):
        open_files(put(tmp_path, "a,b\n1,2\n"), **{option: mark})


def test_cells_that_are_null_but_for_spaces_are_a_warning(tmp_path, caplog):
    path = put(tmp_path, "a,b,c\n1, ?,3\n2, x, ?\n")
    read_all(open_files(path))
    read_all(open_files(path, nulls=["?", " ?"]))
    read_all(open_files(put(tmp_path, "a,b\n1,what ?\n", "y.csv"), nulls=["?"]))
    assert not caplog.text
    read_all(open_files(path, nulls=["", "?"]))
    assert "x.csv has cells ' ?'" in caplog.text
    assert "nulls=[' ?']" in caplog.text
