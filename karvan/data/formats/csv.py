"""CSV and TSV files, compressed ones (gz, bz2, zst, lz4) included. Groups are runs of lines of about 8 MB.

The first time, a file is scanned for line ends, which is many times faster than parsing it; afterwards any
run of lines can be read by itself. A record is a line: cells with line ends in quotes need
`quoted_newlines=True`, for which a file is parsed once to count and always read from its beginning (as are
compressed files). Empty lines are skipped, except in files of one column, where such a line is a null.

Lists fit into a cell with the three `separators`, by default `1|2|3` for a list, `1;2|3` for the list of
lists [[1, 2], [3]] and `7:0.5|8:1` for ids with weights. An empty cell is null, and a null list is an empty
list; quotes with nothing between them are the empty string. Lines may end in LF, CR LF or CR.
"""

from __future__ import annotations

import csv as text_csv
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, types

from karvan.data.columns.declarations import is_text
from karvan.data.columns.kinds import common_type, type_of
from karvan.data.errors import DataError
from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.csv_cells import (
    ambiguous_cell,
    are_digits,
    differ_only_in_zeros,
    digits_only,
    from_digits,
    from_hex,
    from_text,
    integer_parser,
)
from karvan.data.formats.paths import Files
from karvan.native import _native

_SPAN = 8 << 20
_BLOCK = 1 << 20
_LONGEST_LINE = 64 << 20  # a few compressed bytes can be a line of any length
_COUNTED = 1 << 28  # bytes of a file in which an error counts lines: less than a second

_NUMBER = re.compile(r"\s*[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?\s*")
_LEADING_ZERO = re.compile(rb"(?<![0-9.])0[0-9]")
_MISFIT = re.compile(
    r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to (.+?): invalid value '(.*)'", re.DOTALL
)
_WORDS = {"int64": "integers", "double": "numbers", "float": "numbers"}
_CONVERT = (
    "Convert the file, for example by `iconv -f ENCODING -t UTF-8 FILE > NEW`, or read it by "
    "kv.data.read(pandas.read_csv(FILE, encoding=ENCODING), …)."
)
_log = logging.getLogger("karvan.data")

_ReadAgain = Callable[[str], pa.ChunkedArray]
"""Gives the cells of a column as they are written, from the first of some records on."""


class _FirstLines(NamedTuple):
    """The first lines of a file after its header; is_all: there are no others."""

    path: str
    names: list[str]
    text: bytes
    is_all: bool


class CsvSource(FileSource):
    """CSV files with a header line, or without one if a schema names the columns.

    `schema` gives types, by name (see `karvan/data/columns/kinds.py`) or as pyarrow types: of all
    columns without a header, or a list of their names; with a header, of those that should not be inferred
    from the first lines of all files (the first megabyte of each). A column with text in one file is text in
    all of them. A cell behind these lines that does not fit is an error.
    `hexadecimal` columns are ids written in base 16. `nulls` are the cells that mean a missing value.
    `quote` is None where quotes have no meaning.
    """

    group_name = "lines"

    def __init__(
        self,
        files: Files,
        columns: Sequence[str] | None = None,
        *,
        schema: pa.Schema | Mapping[str, pa.DataType | str] | Sequence[str] | None = None,
        delimiter: str = ",",
        header: bool = True,
        nulls: Sequence[str] = ("",),
        quote: str | None = '"',
        hexadecimal: Sequence[str] = (),
        separators: Sequence[str] = ("|", ";", ":"),
        quoted_newlines: bool = False,
    ) -> None:
        super().__init__(files, columns)
        if isinstance(schema, pa.Schema):
            schema = {field.name: field.type for field in schema}
        if schema is not None and not isinstance(schema, list | tuple | Mapping):
            raise TypeError(f"Expected a schema of types by name, or names, got {type(schema).__name__}.")
        if header and isinstance(schema, list | tuple):
            raise ValueError("A schema without types is for files without a header: header=False.")
        types_ = schema if isinstance(schema, Mapping) else {}
        declared = {name: type_of(type_, name) for name, type_ in types_.items()}
        if not header and not schema:
            raise ValueError(
                "A CSV file without a header needs a schema that names its columns: types by name, or names."
            )
        for option, mark in (("delimiter", delimiter), ("quote", quote or '"')):
            if not isinstance(mark, str) or len(mark) != 1 or not mark.isascii() or mark in "\r\n":
                raise ValueError(
                    f"Expected one ASCII character as {option}, got {mark!r}. Spaces around numbers are "
                    "ignored; Feature(…).strip() removes them from text."
                )
        if isinstance(nulls, str) or isinstance(hexadecimal, str):
            raise TypeError("nulls and hexadecimal must be lists of strings, but one is a single string.")
        if len(set(separators)) != 3 or len(separators) != 3:
            raise ValueError(f"The three separators must differ, but are {tuple(separators)}.")
        self._types: dict[str, pa.DataType] = declared | dict.fromkeys(hexadecimal, pa.int64())
        self._names = None if header else list(schema or ())
        self._header = header
        self._hexadecimal = frozenset(hexadecimal)
        self._separators = (separators[0], separators[1], separators[2])
        self._quoted_newlines = quoted_newlines
        self._inferred: dict[str, pa.DataType] = {}  # of all files together
        self._ambiguous: dict[tuple[str, str], str] = {}  # of a file and column: a number, or base 16
        self._with_carriage_returns: set[str] = set()
        self._nulls = list(nulls)
        self._delimiter, self._quote = delimiter, quote
        self._parsing = partial(
            csv.ParseOptions,
            delimiter=delimiter,
            quote_char=quote or False,
            newlines_in_values=quoted_newlines,
        )

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        with self._text(path) as text:
            head = text.read(_BLOCK)
            is_all = len(head) < _BLOCK and not text.read(1)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head[:2]:  # its mark, or a letter's zeros
            raise DataError(f"Expected text in UTF-8, got bytes that look like UTF-16. {_CONVERT}", path=path)
        if b"\r" in head and b"\n" not in head:
            self._with_carriage_returns.add(path)
            head = head.replace(b"\r", b"\n")
        names, begin = self._head(path, head)
        numbers = [name.strip() for name in names if _NUMBER.fullmatch(name)]
        if self._header and len(names) > 1 and numbers:
            _log.warning(
                "The header of %s has numbers (%s): if this is a record, the file has no header; give "
                'options={"header": False, "schema": ["…", …]} with the names of all columns.',
                path,
                ", ".join(numbers[:8]),
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError("The header names the column twice.", path=path, column=twice[0])
        unknown = sorted(self._types.keys() - set(names))
        if unknown:
            has = ", ".join(names)
            raise DataError(
                f"The schema has a column that the file does not have. Its columns are: {has}. If the column "
                'may be missing, leave it out of the schema here: Feature(…, missing="empty") needs no type.',
                path=path,
                column=unknown[0],
            )
        if self._quoted_newlines:
            counts, bounds = self._parse_through(path, names) if begin < len(head) else [], [begin]
        else:
            with self._text(path) as text:
                counts, bounds = _scan(text, begin, _all_lines if len(names) == 1 else _lines)
        first = _FirstLines(path, names, head[begin:], is_all)
        columns = [name for name in names if self._columns is None or name in self._columns]
        types_, nulls = self._types, frozenset[str]()
        if columns and first.text.strip():
            types_ = types_ | self._infer_types(first, [name for name in columns if name not in types_])
            nulls = self._find_nulls(first, columns) if path == self._files.paths[0] else nulls
        schema = pa.schema([(name, types_.get(name, pa.null())) for name in names])
        return Layout(schema, np.cumsum([0, *counts], dtype=np.int64), bounds, nulls)

    def _find_schema(self) -> pa.Schema:
        schema = super()._find_schema()
        self._inferred = {field.name: field.type for field in schema if field.name not in self._types}
        self._types |= self._inferred
        return schema

    def _type(self, name: str, schemas: Mapping[str, pa.Schema]) -> pa.DataType:
        if name in self._types:
            return self._types[name]
        of_files = {path: schema.field(name).type for path, schema in schemas.items()}
        if any(is_text(type_) for type_ in of_files.values()):
            return pa.string() if pa.binary() not in of_files.values() else pa.binary()
        for (path, column), cell in self._ambiguous.items():
            if column == name:
                raise DataError(
                    f"The cell '{cell}' may be a number or text, such as an id in base 16. {_declare(name)}",
                    path=path,
                    column=name,
                )
        if {pa.int64(), pa.float64()} <= set(of_files.values()) <= {pa.int64(), pa.float64(), pa.null()}:
            return pa.float64()
        return common_type(name, of_files.items())

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        names = layout.schema.names
        if self._quoted_newlines:
            for number, batch in enumerate(self._stream(path, names, columns)):
                if number >= group:
                    first = int(layout.starts[number])
                    yield (
                        number,
                        self._convert(path, batch, first, partial(self._streamed, path, names, first)),
                    )
            return
        bounds: list[int] = layout.detail
        schema = pa.schema([(name, self._types.get(name, pa.null())) for name in names])
        parse = integer_parser(self._delimiter, self._quote, self._nulls, schema, columns, self._hexadecimal)
        with self._text(path) as text:
            _skip(text, bounds[group])
            for number, (begin, end) in enumerate(pairwise(bounds[group:]), group):
                data = text.read(end - begin)
                rows = int(layout.starts[number + 1] - layout.starts[number])
                parsed = None if parse is None else parse(data, rows)
                if parsed is not None:
                    yield number, parsed
                    continue
                batches = self._converted(path, data, names, columns, int(layout.starts[number]))
                yield from ((number, batch) for batch in batches)

    def _place(self, layout: Layout, group: int) -> str:
        if group + 1 >= len(layout.starts):
            return "after the last record"
        return f"among records {layout.starts[group]} to {layout.starts[group + 1] - 1}"

    def place_of(self, path: str, record: int) -> str:
        """Where a record is, for errors: with the line of the file, unless it lies far behind."""
        layout = self._layout(path)
        group = int(np.searchsorted(layout.starts, record, side="right")) - 1
        if self._quoted_newlines or not 0 <= group < len(layout.starts) - 1:
            return f"record {record}"
        begin, end = layout.detail[group : group + 2]
        if end > _COUNTED:
            return f"record {record}"
        try:
            with self._text(path) as text:
                line = sum(text.read(min(_SPAN, begin - at)).count(b"\n") for at in range(0, begin, _SPAN))
                lines = text.read(end - begin).split(b"\n")
        except OSError:
            return f"record {record}"
        records = [
            at for at, cells in enumerate(lines, line + 1) if len(layout.schema) == 1 or cells.strip(b"\r")
        ]
        return f"record {record}, line {records[record - int(layout.starts[group])]}"

    def _text(self, path: str) -> pa.NativeFile:
        text = self._files.filesystem.open_input_stream(path)
        if path not in self._with_carriage_returns:
            return text
        return pa.TransformInputStream(text, lambda data: bytes(data).replace(b"\r", b"\n"))

    def _head(self, path: str, head: bytes) -> tuple[list[str], int]:
        """The names of the columns, and the byte at which the records begin."""
        mark = 3 if head.startswith(b"\xef\xbb\xbf") else 0
        if not self._header:
            assert self._names is not None
            return self._names, mark
        line, newline, _ = head[mark:].partition(b"\n")
        if not line.strip():
            raise DataError("Expected a header in the first line, but it is empty.", path=path)
        try:
            decoded = line.decode().rstrip("\r")
        except UnicodeDecodeError:
            raise DataError(f"The header is not text in UTF-8. {_CONVERT}", path=path) from None
        cells = text_csv.reader(
            [decoded],
            delimiter=self._delimiter,
            quotechar=self._quote or None,
            quoting=text_csv.QUOTE_MINIMAL if self._quote else text_csv.QUOTE_NONE,
        )
        try:
            return next(cells), mark + len(line) + len(newline)
        except text_csv.Error as error:
            raise DataError(f"The header cannot be read: {error}.", path=path) from error

    def _infer_types(self, first: _FirstLines, unknown: Sequence[str]) -> dict[str, pa.DataType]:
        """Types of columns without one, as far as the first lines of a file have values."""
        if not unknown:
            return {}

        def cells_of(columns: Sequence[str], as_text: Collection[str] = ()) -> pa.Table:
            return self._cells(first, self._converting(first.names, columns, as_text))

        path, head = first.path, first.text
        types = {f.name: f.type for f in cells_of(unknown).schema}
        is_first = path == self._files.paths[0]  # others are like it, and a search of all takes long
        if is_first and (cell := self._spaced_null(head)) is not None:
            _log.warning(
                "%s has cells '%s'. They count as values, because spaces belong to a cell. If they are "
                "missing values, name them in options: nulls=['%s'].",
                path,
                cell,
                cell,
            )
        if bytes_ := [name for name, type_ in types.items() if type_ == pa.binary()]:
            _log.warning(
                "Column '%s' of %s is not text in UTF-8, so its bytes are read as they are. The same text in "
                "another encoding would have other ids.",
                bytes_[0],
                path,
            )
        integers = [name for name, type_ in types.items() if type_ == pa.int64()]
        if is_first and integers and _LEADING_ZERO.search(head):
            for name, column in zip(integers, cells_of(integers, integers), strict=True):
                if differ_only_in_zeros(column.combine_chunks(), name):
                    _log.warning(
                        "Column '%s' of %s has cells that differ only in leading zeros, so they become "
                        "the same number. If they are different ids: %s",
                        name,
                        path,
                        _declare(name),
                    )
        # Arrow reads integers that are too large for int64 as floats, which would round them.
        floats = [name for name, type_ in types.items() if type_ == pa.float64()]
        texts = cells_of(floats, floats) if floats else {}
        for name in floats:
            cells = texts[name].combine_chunks()
            if are_digits(cells):
                types[name] = from_digits(cells, name).type
            elif (cell := ambiguous_cell(cells)) is not None:
                self._ambiguous[path, name] = cell
        return {name: type_ for name, type_ in types.items() if type_ != pa.null()}

    def _find_nulls(self, first: _FirstLines, columns: Sequence[str]) -> frozenset[str]:
        """The columns with an empty cell, or another that means null, in the first lines of a file."""
        converting = self._converting(first.names, columns)
        converting.column_types = dict.fromkeys(columns, pa.binary())
        cells = self._cells(first, converting)
        return frozenset(name for name in columns if cells[name].null_count)

    def _spaced_null(self, head: bytes) -> str | None:
        """A cell that would be null without the spaces around it."""
        nulls = "|".join(re.escape(null) for null in self._nulls if null.strip())
        mark = re.escape(self._delimiter)
        cells = re.compile(
            rf"(?:^|{mark})( +(?:{nulls}) *|(?:{nulls}) +)(?={mark}|\r?$)".encode(), re.MULTILINE
        )
        cell = cells.search(head) if nulls else None
        return cell[1].decode() if cell and cell[1].decode() not in self._nulls else None

    def _cells(self, first: _FirstLines, converting: csv.ConvertOptions) -> pa.Table:
        """The cells of the first lines of a file; those that cannot be read are an error when they are."""
        parsing = self._parsing_of(first.names, invalid_row_handler=lambda row: "skip")
        if self._quoted_newlines:
            with self._opened(first.path, first.names, converting, _BLOCK, parsing) as reader:
                return pa.Table.from_batches([reader.read_next_batch()], reader.schema)
        head = first.text
        cut = len(head) if first.is_all else head.rfind(b"\n") + 1
        lines = pa.BufferReader(head[: cut or len(head)])
        reading = csv.ReadOptions(column_names=first.names, block_size=len(head) + 1)
        return csv.read_csv(lines, reading, parsing, converting)

    @contextmanager
    def _opened(
        self,
        path: str,
        names: list[str],
        converting: csv.ConvertOptions,
        block: int,
        parsing: csv.ParseOptions | None = None,
    ) -> Iterator[csv.CSVStreamingReader]:
        """All records of a file, with line ends in quotes."""
        reading = csv.ReadOptions(column_names=names, skip_rows=int(self._header), block_size=block)
        with self._text(path) as text:
            yield csv.open_csv(text, reading, parsing or self._parsing_of(names), converting)

    def _parse(
        self, data: bytes, names: list[str], columns: Sequence[str], place: Callable[[int], str]
    ) -> pa.Table:
        with suppress(pa.ArrowInvalid):
            return self._read(data, names, self._converting(names, columns))
        # The first lines may have been the only ones with small ids.
        converting = self._converting(names, columns, as_text=self._inferred_as(pa.int64(), columns))
        with suppress(pa.ArrowInvalid):
            return self._read(data, names, converting)
        with self._explained(names, place):  # one thread says the row as well
            return self._read(data, names, converting, threads=False)

    @contextmanager
    def _explained(self, names: Sequence[str], place: Callable[[int], str] | None = None) -> Iterator[None]:
        """Say of a cell that does not fit its column which it is, and what to do.

        place: where a record of the text is, by its number in it.
        """
        try:
            yield
        except pa.ArrowInvalid as error:
            if (misfit := _MISFIT.search(str(error))) is None:
                raise
            column, row, type_, cell = misfit.groups()
            name = names[int(column)]
            like = ", as in the first lines of the files" if name in self._inferred else ""
            raise DataError(
                f"Expected {_WORDS.get(type_, f'cells of type {type_}')}{like}, got '{cell}'. "
                f"{self._advice(name, cell)}",
                place=None if row is None or place is None else place(int(row) - 1),
                column=name,
            ) from None

    def _advice(self, name: str, cell: str) -> str:
        """What to do about a cell that does not fit a column of numbers."""
        try:
            float(cell)
        except ValueError:
            nulls = json.dumps([*self._nulls, cell], ensure_ascii=False)
            return (
                f'If this cell means that there is no value: options={{"nulls": {nulls}}}. If the column is '
                f'text: options={{"schema": {{"{name}": "string"}}}}, and a step that makes ids of it, such '
                f"as kv.Feature('{name}').hash('farm')."
            )
        return _declare(name)

    def _inferred_as(self, type_: pa.DataType, columns: Collection[str]) -> list[str]:
        return [name for name in columns if self._inferred.get(name) == type_]

    def _read(
        self, data: bytes, names: list[str], converting: csv.ConvertOptions, *, threads: bool = True
    ) -> pa.Table:
        for block in (_BLOCK, len(data) + 1):
            reading = csv.ReadOptions(column_names=names, block_size=block, use_threads=threads)
            try:
                return csv.read_csv(pa.BufferReader(data), reading, self._parsing_of(names), converting)
            except pa.ArrowInvalid as error:
                if "straddl" not in str(error) or block > len(data):
                    raise
        raise AssertionError

    def _converted(
        self, path: str, data: bytes, names: list[str], columns: Sequence[str], first: int
    ) -> Iterator[pa.RecordBatch]:
        """The records of some lines, of which `first` is the number of the first."""

        def read_again(at: int, name: str) -> pa.ChunkedArray:
            return self._read(data, names, self._converting(names, [name], [name])).column(0).slice(at)

        at = 0
        table = self._parse(data, names, columns, lambda row: self.place_of(path, first + row))
        for batch in table.to_batches():
            yield self._convert(path, batch, first + at, partial(read_again, at))
            at += batch.num_rows

    def _stream(
        self, path: str, names: list[str], columns: Sequence[str], as_text: Collection[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        integers = self._inferred_as(pa.int64(), columns)
        converting = self._converting(names, columns, as_text=[*integers, *as_text])
        with self._explained(names), self._opened(path, names, converting, _SPAN) as reader:
            yield from reader

    def _streamed(self, path: str, names: list[str], first: int, name: str) -> pa.ChunkedArray:
        """The cells of a column as they are written, from a record on."""
        parts = self._stream(path, names, [name], [name])
        return pa.chunked_array(part.column(0) for part in parts).slice(first)

    def _parse_through(self, path: str, names: list[str]) -> list[int]:
        strings = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()))
        try:
            with self._opened(path, names, strings, _SPAN) as reader:
                return [batch.num_rows for batch in reader]
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error):
                return []
            raise

    def _parsing_of(self, names: Sequence[str], **options: Any) -> csv.ParseOptions:
        return self._parsing(ignore_empty_lines=len(names) > 1, **options)

    def _converting(
        self, names: Sequence[str], columns: Sequence[str], as_text: Collection[str] = ()
    ) -> csv.ConvertOptions:
        texts = {*as_text, *self._inferred_as(pa.null(), columns)}
        in_cells = {name: pa.string() for name in columns if self._is_in_cells(name) or name in texts}
        plain = {name: self._types[name] for name in columns if name in self._types}
        return csv.ConvertOptions(
            column_types=plain | in_cells,
            null_values=self._nulls,
            strings_can_be_null=True,
            # Many programs write a null that is the only cell of its line as empty quotes.
            quoted_strings_can_be_null=len(names) == 1 and not is_text(self._types.get(names[0], pa.null())),
            include_columns=list(columns),
        )

    def _is_in_cells(self, name: str) -> bool:
        type_ = self._types.get(name)
        return name in self._hexadecimal or (type_ is not None and types.is_nested(type_))

    def _convert(
        self, path: str, batch: pa.RecordBatch, first: int, read_again: _ReadAgain
    ) -> pa.RecordBatch:
        """The columns by their types; `first` is the number of the first record in its file."""
        arrays = []

        def require(name: str, cells: pa.Array, fits: pa.Array, expected: str) -> None:
            """Raise for the first cell that is not what the first lines of the files have shown."""
            at = pc.index(fits, False).as_py()
            if at < 0:
                return
            cell = cells[at].as_py()
            raise DataError(
                f"Expected {expected}, as in the first lines of the files, got '{cell}'. "
                + (_declare(name) if inferred == pa.null() else self._advice(name, cell)),
                place=self.place_of(path, first + at),
                column=name,
            )

        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            inferred = self._inferred.get(name)
            if name in self._hexadecimal:
                array = from_hex(array, name)
            elif self._is_in_cells(name):
                array = from_text(array, self._types[name], self._separators, name)
            elif inferred == pa.int64() and array.type == pa.string():
                require(name, array, digits_only(array), "integers")
                array = from_digits(array, name)
            elif inferred == pa.float64():
                if pc.any(pc.is_inf(array)).as_py():
                    cells = read_again(name).slice(0, len(array)).combine_chunks()
                    infinite = pc.match_substring_regex(cells, "(?i)^[+-]?inf(inity)?$")
                    require(name, cells, pc.or_(pc.invert(pc.is_inf(array)), infinite), "numbers")
            elif inferred == pa.null():
                require(name, array, pc.is_null(array), "no values")
                array = pa.nulls(len(array))
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _declare(name: str) -> str:
    return f'Declare the type of the column: options={{"schema": {{"{name}": "string"}}}}, or "float64".'


def _scan(
    text: pa.NativeFile, begin: int, lines: Callable[[bytes | memoryview], int]
) -> tuple[list[int], list[int]]:
    """The number of records of each run of lines, and the bytes at which the runs begin and the last ends."""
    _skip(text, begin)
    counts: list[int] = []
    bounds = [begin]
    open_line: list[bytes] = []
    waiting = 0
    while True:
        chunk = text.read(_SPAN)
        cut = chunk.rfind(b"\n") + 1 if chunk else 0
        if chunk and not cut:
            open_line.append(chunk)
            waiting += len(chunk)
            if waiting > _LONGEST_LINE:
                raise ValueError(f"A line is longer than {_LONGEST_LINE >> 20} MiB.")
            continue
        # Only the line that the last chunk left open is copied.
        head = chunk.find(b"\n") + 1
        line = b"".join([*open_line, chunk[:head]])
        if line:
            counts.append(lines(line) + lines(memoryview(chunk)[head:cut]))
            bounds.append(bounds[-1] + waiting + cut)
        if not chunk:
            return counts, bounds
        open_line, waiting = [chunk[cut:]], len(chunk) - cut


def _lines(run: bytes | memoryview) -> int:
    """Lines that are not empty; pyarrow skips the others."""
    return _native.count_lines(np.frombuffer(run, np.uint8)) if len(run) else 0


def _all_lines(run: bytes | memoryview) -> int:
    """Lines, including empty ones."""
    text = bytes(run)
    ends = text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
    return ends + (text[-1:] not in (b"", b"\n", b"\r"))


def _skip(text: pa.NativeFile, size: int) -> None:
    if text.seekable():
        text.seek(size)
        return
    while size:
        skipped = len(text.read(min(size, _SPAN)))
        if not skipped:
            raise EOFError("The file is shorter than when its records were counted.")
        size -= skipped
