"""`MaxComputeSource`: tables and partitions of MaxCompute as finite data (needs the extra `odps`).

    kv.data.read("odps://shop/tables/clicks?partition=ds=20240101", batch_size=4096)

Each table or partition is a part, whose records are numbered by a download session. A split is one request
for a range of records. Every process opens sessions of its own, and MaxCompute numbers the records of
unchanged data alike in all of them. A session that has ended is opened again, if its table still has as many
records.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from typing_extensions import override

from karvan.argument_checks import listed
from karvan.data.errors import DataError
from karvan.data.identity import fingerprint_table, spread, text_hash
from karvan.data.maxcompute.table_url import DamagedAnswerError, EndedSessionError, TableURL
from karvan.data.retry import is_outage
from karvan.data.source import Part, Source, Split, require_inside

if TYPE_CHECKING:
    from karvan.data.maxcompute.tunnel import Download, Tunnel

_HASHED_PARTS = 64
_HASHED_BLOCKS = 16  # of all parts, but at least two of each
_BLOCK_RECORDS = 1024
_FEWEST_RECORDS, _MOST_RECORDS = 8_192, 65_536  # of a request, by default
_SPLITS = 64


class MaxComputeSource(Source):
    """The records of tables with the same columns; `columns` selects some, so that others are not sent.

    The columns of partitions (`ds`) follow those of the table, with the type that the table declares, unless
    `partitions` is False.
    """

    def __init__(
        self, tables: Sequence[TableURL], columns: Sequence[str] | None = None, *, partitions: bool = True
    ) -> None:
        try:
            import odps  # noqa: F401
        except ImportError as error:
            raise ImportError("Reading MaxCompute needs pyodps: pip install karvan[odps]") from error
        self._tables = {str(table): table for table in tables}
        self._requested = None if columns is None else list(columns)
        self._partitions = partitions
        self.outages = TunnelOutages()
        self._schema: pa.Schema | None = None
        self._lock = threading.Lock()
        self._tunnels: dict[str, Tunnel] = {}  # by project
        self._downloads: dict[str, Download] = {}  # by part
        self._records: dict[str, int] = {}

    @property
    @override
    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._schema = self._find_schema()
        return self._schema

    def _find_schema(self) -> pa.Schema:
        first = next(iter(self._tables))
        names = self._requested
        if names is None:
            names = [*self._download(first).types, *self._values(first)]
        types = self._types(first, names)
        for path in self._tables:
            for name, type_ in self._types(path, names).items():
                if type_ != types[name]:
                    raise DataError(
                        f"Expected {types[name]}, as {first} has, but the column has {type_}.",
                        path=path,
                        column=name,
                    )
        if all(name in self._values(first) for name in names):
            raise DataError(
                "Expected at least one column that is not in the partition, but all are.", path=first
            )
        return pa.schema(types.items())

    @override
    def parts(self) -> list[Part]:
        """A table or partition each."""
        return [Part(path, self._download(path).records) for path in self._tables]

    @property
    def group_records(self) -> int:
        """How many records a split has by default: each is a request, so it should not be small."""
        records = sum(part.records for part in self.parts())
        return min(_MOST_RECORDS, max(_FEWEST_RECORDS, records // _SPLITS))

    @override
    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        if split.path not in self._tables:
            raise DataError("The split names a table that this source does not have.", path=split.path)
        require_inside(split, self._download(split.path).records)
        yield from self._read(split, self.schema)

    def fingerprint(self) -> str:
        """A hash of records at equal distances, of all columns, up to 1024 in each of at least two places."""
        parts = self.parts()
        sample = [parts[number] for number in spread(len(parts), _HASHED_PARTS)]
        blocks = max(2, _HASHED_BLOCKS // max(1, len(sample)))
        hashes = []
        for part in sample:
            types = self._download(part.path).types
            schema = pa.schema([(name, type_) for name, type_ in types.items() if type_ is not None])
            firsts: Sequence[int] = range(0, part.records, _BLOCK_RECORDS)
            if len(firsts) > blocks:
                firsts = [n * (part.records - _BLOCK_RECORDS) // (blocks - 1) for n in range(blocks)]
            for first in firsts:
                split = Split(part.path, first, min(_BLOCK_RECORDS, part.records - first))
                hashes.append(fingerprint_table(pa.Table.from_batches(self._read(split, schema), schema)))
        return text_hash(" ".join(hashes))

    def _read(self, split: Split, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        values = self._values(split.path)
        columns = [name for name in self._download(split.path).types if name in schema.names]
        done, reopened_at = 0, -1
        while done < split.count:
            download = self._download(split.path)
            try:
                for batch in download.read(split.first + done, split.count - done, columns):
                    done += batch.num_rows
                    yield _with_values(batch, values, schema)
            except EndedSessionError:
                if reopened_at == done:  # not even the new session has a record
                    raise
                reopened_at = done
                self._forget(split.path, download)

    def _types(self, path: str, names: Sequence[str]) -> dict[str, pa.DataType]:
        """The types of some columns of a part."""
        download = self._download(path)
        types = {**download.types, **{name: value.type for name, value in self._values(path).items()}}
        for name in names:
            if name not in types:
                raise DataError(
                    f"There is no such column; there are: {listed(name, list(types))}", path=path, column=name
                )
            if types[name] is None:
                raise DataError(
                    f"Columns of type {download.type_names[name]} cannot be read: name the columns to "
                    "read, and leave this one out.",
                    path=path,
                    column=name,
                )
        return {name: types[name] for name in names}

    def _values(self, path: str) -> dict[str, pa.Scalar]:
        """The partition columns of a part."""
        if not self._partitions:
            return {}
        types = self._download(path).partition_types
        return {
            name: pa.scalar(value).cast(types.get(name) or pa.string())
            for name, value in self._tables[path].partition
        }

    def _download(self, path: str) -> Download:
        from karvan.data.maxcompute.tunnel import Tunnel

        with self._lock:
            if path not in self._downloads:
                table = self._tables[path]
                if table.project not in self._tunnels:
                    self._tunnels[table.project] = Tunnel(table.project)
                tunnel = self._tunnels[table.project].open(table)
                expected = self._records.setdefault(path, tunnel.records)
                if tunnel.records != expected:
                    raise DataError(
                        f"The table was changed while it was read: it had {expected} records, and has "
                        f"{tunnel.records} now. Start again.",
                        path=path,
                    )
                self._downloads[path] = tunnel
            return self._downloads[path]

    def _forget(self, path: str, ended: Download) -> None:
        with self._lock:
            if self._downloads.get(path) is ended:
                del self._downloads[path]

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens its own sessions, with the account of its own environment.
        return {**self.__dict__, "_lock": None, "_tunnels": {}, "_downloads": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"MaxComputeSource({', '.join(self._tables)})"


class TunnelOutages:
    """Recognizes outages of MaxCompute; a damaged answer is doubtful."""

    def is_outage(self, error: BaseException, path: str) -> bool | None:
        """Whether an error is an outage; None if it is doubtful."""
        return True if is_outage(error) else None if isinstance(error, DamagedAnswerError) else False


def _with_values(batch: pa.RecordBatch, values: dict[str, pa.Scalar], schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a schema: those of the table, and the values of its partition."""
    columns = []
    for field in schema:
        if field.name in values:
            columns.append(pa.repeat(values[field.name], batch.num_rows))
        else:
            columns.append(batch.column(field.name))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
