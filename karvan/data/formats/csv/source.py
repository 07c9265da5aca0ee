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
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyarrow import csv, types

from karvan.data.columns.declarations import is_text
from karvan.data.columns.type_names import type_of
from karvan.data.errors import DataError, located
from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.csv.integer_tables import IntegerTable
from karvan.data.formats.csv.list_cells import are_digits, from_digits, from_hex, from_text
from karvan.data.formats.paths import Files
from karvan.native import _native

_SPAN = 8 << 20
_BLOCK = 1 << 20
_LONGEST_LINE = 256 << 20


class CsvSource(FileSource):
    """CSV files with a header line, or without one if a schema names the columns.

    `schema` gives types, by name (see `karvan/data/columns/type_names.py`) or as pyarrow types: of all
    columns without a header; with one, of those that should not be inferred from the first lines of the first
    file that has a value.
    `hexadecimal` columns are ids written in base 16. `nulls` are the cells that mean a missing value.
    `quote` is None where quotes have no meaning.
    """

    group_name = "lines"

    def __init__(
        self,
        files: Files,
        columns: Sequence[str] | None = None,
        *,
        schema: pa.Schema | Mapping[str, pa.DataType | str] | None = None,
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
        declared = {name: type_of(type_, name) for name, type_ in (schema or {}).items()}
        if not header and not declared:
            raise ValueError("A CSV file without a header needs a schema that names its columns.")
        if isinstance(nulls, str) or isinstance(hexadecimal, str):
            raise TypeError("nulls and hexadecimal must be lists of strings, but one is a single string.")
        if len(set(separators)) != 3 or len(separators) != 3:
            raise ValueError(f"The three separators must differ, but are {tuple(separators)}.")
        self._types: dict[str, pa.DataType] = declared | dict.fromkeys(hexadecimal, pa.int64())
        self._names = None if header else list(declared)
        self._header = header
        self._hexadecimal = frozenset(hexadecimal)
        self._separators = (separators[0], separators[1], separators[2])
        self._quoted_newlines = quoted_newlines
        self._inferred_integers: set[str] = set()
        self._with_carriage_returns: set[str] = set()
        self._nulls = list(nulls)
        self._parsing = csv.ParseOptions(
            delimiter=delimiter, quote_char=quote or False, newlines_in_values=quoted_newlines
        )
        self._parsing_one_column = csv.ParseOptions(
            delimiter=delimiter,
            quote_char=quote or False,
            newlines_in_values=quoted_newlines,
            ignore_empty_lines=False,
        )

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        with self._text(path) as text:
            head = text.read(_BLOCK)
        if b"\r" in head and b"\n" not in head:
            self._with_carriage_returns.add(path)
            head = head.replace(b"\r", b"\n")
        names, begin = self._head(path, head)
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError("The header names the column twice.", path=path, column=twice[0])
        unknown = sorted(self._types.keys() - set(names))
        if unknown:
            has = ", ".join(names)
            raise DataError(
                f"The schema has a column that the file does not have. Its columns are: {has}.",
                path=path,
                column=unknown[0],
            )
        if self._quoted_newlines:
            counts, bounds = self._parse_through(path, names) if begin < len(head) else [], [begin]
        else:
            with self._text(path) as text:
                counts, bounds = _scan(text, begin, _all_lines if len(names) == 1 else _lines)
        return Layout(self._schema_of(names), np.cumsum([0, *counts], dtype=np.int64), bounds)

    def _schema_of(self, names: Sequence[str]) -> pa.Schema:
        return pa.schema([(name, self._types.get(name, pa.null())) for name in names])

    def _find_schema(self) -> pa.Schema:
        names = super()._find_schema().names
        for path in self._files.paths:
            unknown = [name for name in names if name not in self._types]
            if unknown:
                self._types |= self._infer_types(path, unknown)
        return self._schema_of(names)

    def _type(self, name: str, schemas: Mapping[str, pa.Schema]) -> pa.DataType:
        return self._types.get(name, pa.null())

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        names = layout.schema.names
        if self._quoted_newlines:
            for number, batch in enumerate(self._stream(path, names, columns)):
                if number >= group:
                    yield number, self._convert(batch)
            return
        bounds: list[int] = layout.detail
        schema = self._schema_of(names)
        integers = IntegerTable.of(self._parsing, self._nulls, schema, columns, self._hexadecimal)
        with self._text(path) as text:
            _skip(text, bounds[group])
            for number, (begin, end) in enumerate(pairwise(bounds[group:]), group):
                data = text.read(end - begin)
                rows = int(layout.starts[number + 1] - layout.starts[number])
                parsed = None if integers is None else integers.parse(data, rows)
                if parsed is not None:
                    yield number, parsed
                    continue
                for batch in self._parse(data, names, columns).to_batches():
                    yield number, self._convert(batch)

    def _place(self, layout: Layout, group: int) -> str:
        if group + 1 >= len(layout.starts):
            return "after the last record"
        return f"among records {layout.starts[group]} to {layout.starts[group + 1] - 1}"

    def _text(self, path: str) -> pa.NativeFile | _LineFeeds:
        text = self._files.filesystem.open_input_stream(path)
        return _LineFeeds(text) if path in self._with_carriage_returns else text

    def _head(self, path: str, head: bytes) -> tuple[list[str], int]:
        """The names of the columns, and the byte at which the records begin."""
        mark = 3 if head.startswith(b"\xef\xbb\xbf") else 0
        if not self._header:
            assert self._names is not None
            return self._names, mark
        line, newline, _ = head[mark:].partition(b"\n")
        if not line.strip():
            raise DataError("Expected a header in the first line, but it is empty.", path=path)
        quote = self._parsing.quote_char
        decoded = line.decode(errors="strict").rstrip("\r")
        cells = text_csv.reader(
            [decoded],
            delimiter=self._parsing.delimiter,
            quotechar=quote or None,
            quoting=text_csv.QUOTE_MINIMAL if quote else text_csv.QUOTE_NONE,
        )
        try:
            return next(cells), mark + len(line) + len(newline)
        except text_csv.Error as error:
            raise DataError(f"The header cannot be read: {error}.", path=path) from error

    def _infer_types(self, path: str, unknown: Sequence[str]) -> dict[str, pa.DataType]:
        """Types of columns without one, as far as the first lines of a file have values."""
        layout = self._layouts[path]
        names = layout.schema.names
        with located(path):
            with self._text(path) as text:
                _skip(text, layout.detail[0])
                data = text.read(_BLOCK)
                is_all = len(data) < _BLOCK and not text.read(1)
            cut = 0 if is_all else data.rfind(b"\n") + 1
            data = data[:cut] if cut else data
            if not data.strip():
                return {}
            found = {f.name: f.type for f in self._parse(data, names, unknown).schema}
            # Arrow reads integers that are too large for int64 as floats, which would round them.
            floats = [name for name, type_ in found.items() if type_ == pa.float64()]
            if floats:
                text_of = self._read(data, names, self._converting(names, floats, as_text=floats))
                for name in floats:
                    cells = text_of.column(name).combine_chunks()
                    if are_digits(cells):
                        found[name] = from_digits(cells, name).type
        self._inferred_integers |= {name for name, type_ in found.items() if type_ == pa.int64()}
        return {name: type_ for name, type_ in found.items() if type_ != pa.null()}

    def _parse(self, data: bytes, names: list[str], columns: Sequence[str]) -> pa.Table:
        try:
            return self._read(data, names, self._converting(names, columns))
        except pa.ArrowInvalid:
            integers = [name for name in columns if name in self._inferred_integers]
            if not integers:
                raise
            # The first lines of the first file may have been the only ones with small ids.
            return self._read(data, names, self._converting(names, columns, as_text=integers))

    def _read(self, data: bytes, names: list[str], converting: csv.ConvertOptions) -> pa.Table:
        for block in (_BLOCK, len(data) + 1):
            reading = csv.ReadOptions(column_names=names, block_size=block)
            try:
                return csv.read_csv(pa.BufferReader(data), reading, self._parsing_of(names), converting)
            except pa.ArrowInvalid as error:
                if "straddl" not in str(error) or block > len(data):
                    raise
        raise AssertionError

    def _stream(self, path: str, names: list[str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with self._text(path) as text:
            reading = csv.ReadOptions(column_names=names, skip_rows=int(self._header), block_size=_SPAN)
            integers = [name for name in columns if name in self._inferred_integers]
            converting = self._converting(names, columns, as_text=integers)
            yield from csv.open_csv(text, reading, self._parsing_of(names), converting)

    def _parse_through(self, path: str, names: list[str]) -> list[int]:
        with self._text(path) as text:
            reading = csv.ReadOptions(column_names=names, skip_rows=int(self._header), block_size=_SPAN)
            strings = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()))
            try:
                batches = csv.open_csv(text, reading, self._parsing_of(names), strings)
                return [batch.num_rows for batch in batches]
            except pa.ArrowInvalid as error:
                if "Empty CSV" in str(error):
                    return []
                raise

    def _parsing_of(self, names: Sequence[str]) -> csv.ParseOptions:
        return self._parsing_one_column if len(names) == 1 else self._parsing

    def _converting(
        self, names: Sequence[str], columns: Sequence[str], as_text: Collection[str] = ()
    ) -> csv.ConvertOptions:
        in_cells = {name: pa.string() for name in columns if self._is_in_cells(name) or name in as_text}
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

    def _convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name in self._hexadecimal:
                array = from_hex(array, name)
            elif self._is_in_cells(name):
                array = from_text(array, self._types[name], self._separators, name)
            elif name in self._inferred_integers and array.type == pa.string():
                array = from_digits(array, name)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


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
                raise ValueError(f"A line is longer than {_LONGEST_LINE >> 20} MB.")
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


class _LineFeeds(io.RawIOBase):
    """Text with a line feed for each carriage return; positions of bytes do not change."""

    def __init__(self, text: pa.NativeFile) -> None:
        super().__init__()
        self._file = text

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(None if size < 0 else size)
        return data.replace(b"\r", b"\n")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, position: int, whence: int = 0) -> int:
        return int(self._file.seek(position, whence))

    def close(self) -> None:
        self._file.close()
        super().close()


def _skip(text: pa.NativeFile, size: int) -> None:
    if text.seekable():
        text.seek(size)
        return
    while size:
        skipped = len(text.read(min(size, _SPAN)))
        if not skipped:
            raise EOFError("The file is shorter than when its records were counted.")
        size -= skipped
