"""CSV and TSV files, compressed ones (gz, bz2, zst, lz4) included. Groups are runs of lines of about 8 MB.

The first time, a file is scanned for line ends, which is many times faster than parsing it; afterwards any
run of lines can be read by itself. A record is a line: cells with line ends in quotes need
`quoted_newlines=True`, for which a file is parsed once to count and always read from its beginning (as are
compressed files). Empty lines are passed over.

Lists fit into a cell with the three `separators`, by default `1|2|3` for a list, `1;2|3` for the list of
lists [[1, 2], [3]] and `7:0.5|8:1` for ids with weights. An empty cell is null, and null is an empty list.
"""

from __future__ import annotations

import csv as text_csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyarrow import csv, types

from karvan import _native
from karvan.data.cells import from_hex, from_text
from karvan.data.errors import DataError
from karvan.data.files import FileSource, Layout
from karvan.data.integers import IntegerTable
from karvan.data.paths import Files

_SPAN = 8 << 20
_BLOCK = 1 << 20
_LONGEST_LINE = 256 << 20


class CsvSource(FileSource):
    """CSV files with a header line, or without one if a schema names the columns.

    `schema` gives types (all columns without a header; with one, those that should not be inferred from the
    first lines of the first file). `hexadecimal` columns are ids written in base 16. `nulls` are the cells
    that stand for a missing value. `quote` is None where quotes have no meaning.
    """

    group_name = "lines"

    def __init__(
        self,
        files: Files,
        columns: Sequence[str] | None = None,
        *,
        schema: pa.Schema | Mapping[str, pa.DataType] | None = None,
        delimiter: str = ",",
        header: bool = True,
        nulls: Sequence[str] = ("",),
        quote: str | None = '"',
        hexadecimal: Sequence[str] = (),
        separators: tuple[str, str, str] = ("|", ";", ":"),
        quoted_newlines: bool = False,
    ) -> None:
        super().__init__(files, columns)
        given = {f.name: f.type for f in schema} if isinstance(schema, pa.Schema) else dict(schema or {})
        if not header and not given:
            raise ValueError("A CSV file without a header needs a schema that names its columns.")
        if len(set(separators)) != 3:
            raise ValueError(f"The three separators must differ, but are {separators}.")
        self._types: dict[str, pa.DataType] = given | dict.fromkeys(hexadecimal, pa.int64())
        self._names = None if header else list(given)
        self._header = header
        self._hexadecimal = frozenset(hexadecimal)
        self._separators = separators
        self._quoted_newlines = quoted_newlines
        self._nulls = list(nulls)
        self._parsing = csv.ParseOptions(
            delimiter=delimiter, quote_char=quote or False, newlines_in_values=quoted_newlines
        )

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        with self._text(path) as text:
            names, begin = self._head(path, text)
            if twice := [name for name in names if names.count(name) > 1]:
                raise DataError("The header names the column twice.", path=path, column=twice[0])
            unknown = sorted(self._types.keys() - set(names))
            if unknown:
                has = ", ".join(names)
                raise DataError(
                    f"The schema has a column that the file has not. Its columns are: {has}.",
                    path=path,
                    column=unknown[0],
                )
        if self._quoted_newlines:
            counts, bounds = self._parse_through(path, names), [begin]
        else:
            with self._text(path) as text:
                counts, bounds = _scan(text, begin)
        self._infer_types(path, names, begin)
        schema = pa.schema([(name, self._types[name]) for name in names])
        return Layout(schema, np.cumsum([0, *counts], dtype=np.int64), bounds)

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
        integers = IntegerTable.of(self._parsing, self._nulls, layout.schema, columns, self._hexadecimal)
        with self._text(path) as text:
            _skip(text, bounds[group])
            for number, (begin, end) in enumerate(pairwise(bounds[group:]), group):
                data = text.read(end - begin)
                rows = int(layout.starts[number + 1] - layout.starts[number])
                whole = None if integers is None else integers.parse(data, rows)
                if whole is not None:
                    yield number, whole
                    continue
                for batch in self._parse(data, names, columns).to_batches():
                    yield number, self._convert(batch)

    def _place(self, layout: Layout, group: int) -> str:
        if group + 1 >= len(layout.starts):
            return "after the last record"
        return f"among records {layout.starts[group]} to {layout.starts[group + 1] - 1}"

    def _text(self, path: str) -> pa.NativeFile:
        return self._files.filesystem.open_input_stream(path)

    def _head(self, path: str, text: pa.NativeFile) -> tuple[list[str], int]:
        """The names of the columns, and the byte at which the records begin."""
        head = text.read(_BLOCK)
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
        return next(cells), mark + len(line) + len(newline)

    def _infer_types(self, path: str, names: list[str], begin: int) -> None:
        """Types of the columns without any, from the first lines of the first file inspected."""
        unknown = [name for name in names if name not in self._types]
        if not unknown:
            return
        with self._text(path) as text:
            _skip(text, begin)
            data = text.read(_BLOCK)
        cut = data.rfind(b"\n") + 1
        data = data[:cut] if cut else data
        if not data.strip():
            found = {name: pa.null() for name in unknown}
        else:
            table = self._parse(data, names, unknown)
            found = {name: table.schema.field(name).type for name in unknown}
        self._types.update(found)

    def _parse(self, data: bytes, names: list[str], columns: Sequence[str]) -> pa.Table:
        for block in (_BLOCK, len(data) + 1):
            reading = csv.ReadOptions(column_names=names, block_size=block)
            try:
                return csv.read_csv(pa.BufferReader(data), reading, self._parsing, self._converting(columns))
            except pa.ArrowInvalid as error:
                if "straddl" not in str(error) or block > len(data):
                    raise
        raise AssertionError

    def _stream(self, path: str, names: list[str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with self._text(path) as text:
            reading = csv.ReadOptions(column_names=names, skip_rows=int(self._header), block_size=_SPAN)
            yield from csv.open_csv(text, reading, self._parsing, self._converting(columns))

    def _parse_through(self, path: str, names: list[str]) -> list[int]:
        with self._text(path) as text:
            reading = csv.ReadOptions(column_names=names, skip_rows=int(self._header), block_size=_SPAN)
            strings = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()))
            try:
                return [batch.num_rows for batch in csv.open_csv(text, reading, self._parsing, strings)]
            except pa.ArrowInvalid as error:
                if "Empty CSV" in str(error):
                    return []
                raise

    def _converting(self, columns: Sequence[str]) -> csv.ConvertOptions:
        in_cells = {name: pa.string() for name in columns if self._is_in_cells(name)}
        plain = {name: self._types[name] for name in columns if name in self._types}
        return csv.ConvertOptions(
            column_types=plain | in_cells,
            null_values=self._nulls,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
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
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _scan(text: pa.NativeFile, begin: int) -> tuple[list[int], list[int]]:
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
            counts.append(_lines(line) + _lines(memoryview(chunk)[head:cut]))
            bounds.append(bounds[-1] + waiting + cut)
        if not chunk:
            return counts, bounds
        open_line, waiting = [chunk[cut:]], len(chunk) - cut


def _lines(run: bytes | memoryview) -> int:
    """Lines that are not empty; pyarrow passes over the others."""
    return _native.count_lines(np.frombuffer(run, np.uint8)) if len(run) else 0


def _skip(text: pa.NativeFile, size: int) -> None:
    if text.seekable():
        text.seek(size)
        return
    while size:
        skipped = len(text.read(min(size, _SPAN)))
        if not skipped:
            raise EOFError("The file ends earlier than when it was counted.")
        size -= skipped
