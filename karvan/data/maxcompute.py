"""`MaxComputeSource`: tables and partitions of MaxCompute as finite data (needs the extra `odps`).

    kv.data.read("odps://shop/tables/clicks?partition=ds=20240101", batch_size=4096)

Each table or partition is a part, whose records are numbered by a download session. A split is one request
for a range of records. Every process opens sessions of its own, and MaxCompute numbers the records of
unchanged data alike in all of them. A session that has ended is opened again, if its table still has as many
records.

Accounts and endpoints are no part of a URL. A URL that has some is refused without repeating it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from typing_extensions import override

from karvan.argument_checks import listed
from karvan.data.errors import DataError
from karvan.data.identity import fingerprint_table, spread, text_hash
from karvan.data.retry import is_outage
from karvan.data.source import Part, Source, Split, require_inside

if TYPE_CHECKING:
    from karvan.data.maxcompute_tunnel import Download, Tunnel

_SCHEME = "odps://"
_FORM = "odps://project/tables/name, with ?partition=ds=20240101,hh=01 for a table that has partitions"
_PATH = re.compile(r"([\w-]+)(?:/schemas/(\w+))?/tables/(\w+)((?:/[^/=]+=[^/]*)*)/?")


@dataclass(frozen=True)
class TableURL:
    """A table, or one of its partitions; `partition` has the value of every partition column."""

    project: str
    schema: str | None
    table: str
    partition: tuple[tuple[str, str], ...] = ()

    @property
    def partition_spec(self) -> str | None:
        """As pyodps takes it."""
        return ",".join(f"{name}={value}" for name, value in self.partition) or None

    @property
    def path(self) -> str:
        """Where the table is, in URLs."""
        schema = f"/schemas/{self.schema}" if self.schema else ""
        return f"{self.project}{schema}/tables/{self.table}"

    def __str__(self) -> str:
        return _SCHEME + self.path + (f"?partition={self.partition_spec}" if self.partition else "")


def is_table_url(data: object) -> bool:
    """Whether data is a URL of MaxCompute, or a list that has one."""
    if isinstance(data, list | tuple):
        return any(map(is_table_url, data))
    return isinstance(data, str) and data.startswith(_SCHEME)


def parse_tables(data: str | Iterable[str | os.PathLike[str]]) -> list[TableURL]:
    """The tables that a URL, or a list of URLs, names; one of them twice is an error."""
    tables = [_parse(os.fspath(path_)) for path_ in ([data] if isinstance(data, str) else data)]
    for number, table in enumerate(tables):
        if table in tables[:number]:
            raise DataError("The table is named twice, so its records would be read twice.", path=str(table))
    return tables


def _parse(text: str) -> TableURL:
    if not text.startswith(_SCHEME):
        raise DataError("Files and tables of MaxCompute cannot be read together.", path=text)
    path, _, query = text.removeprefix(_SCHEME).partition("?")
    if "@" in path:
        raise DataError(
            "A URL of MaxCompute has no account: set ODPS_ACCESS_ID and ODPS_ACCESS_KEY in the environment, "
            f"and remove what is before the @. Expected {_FORM}."
        )
    match = _PATH.fullmatch(path)
    if match is None:
        raise DataError(f"Expected {_FORM}.", path=_SCHEME + path)
    project, schema, table, folders = match.groups()
    if folders:
        whole, spec = TableURL(project, schema, table), folders.strip("/").replace("/", ",")
        raise DataError(
            f"A partition is an option of the URL: write {whole}?partition={spec}.",
            path=_SCHEME + path,
        )
    parts = [part.partition("=") for part in query.split("&") if part]
    options = [(name, unquote(value)) for name, _, value in parts]  # a plus is no space here
    if unknown := [name for name, _ in options if name != "partition"]:
        raise DataError(
            f"There is no option '{unknown[0]}' in a URL of MaxCompute; there is: partition.",
            path=_SCHEME + path,
        )
    if len(options) > 1:
        raise DataError(
            "A URL has one partition: expected a list of URLs for several of them.", path=_SCHEME + path
        )
    partition = _partition(options[0][1], _SCHEME + path) if options else ()
    return TableURL(project, schema, table, partition)


def _partition(spec: str, path: str) -> tuple[tuple[str, str], ...]:
    pairs = [pair.partition("=") for pair in re.split("[,/]", spec)]
    values = tuple((name.strip(), value.strip().strip("'\"")) for name, _, value in pairs)
    names = [name for name, _ in values]
    if not all(name and value for name, value in values) or len(set(names)) < len(names):
        raise DataError(
            f"Expected partition=ds=20240101,hh=01, with each partition column once, got partition={spec}.",
            path=path,
        )
    return values


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
        from karvan.data.maxcompute_tunnel import EndedSessionError

        values = self._values(split.path)
        columns = [name for name in self._download(split.path).types if name in schema.names]
        done, reopened_at = 0, -1
        while done < split.count:
            download = self._download(split.path)
            try:
                for batch in download.read(split.first + done, split.count - done, columns):
                    done += batch.num_rows
                    arrays = [
                        pa.repeat(values[name], batch.num_rows) if name in values else batch.column(name)
                        for name in schema.names
                    ]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            except EndedSessionError:
                if reopened_at == done:  # not even the new session has a record
                    raise
                reopened_at = done
                with self._lock:
                    if self._downloads.get(split.path) is download:
                        del self._downloads[split.path]

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
        from karvan.data.maxcompute_tunnel import Tunnel

        with self._lock:
            if path not in self._downloads:
                table = self._tables[path]
                if table.project not in self._tunnels:
                    self._tunnels[table.project] = Tunnel(table.project)
                download = self._tunnels[table.project].open(
                    path, table.path, table.table, table.partition_spec
                )
                expected = self._records.setdefault(path, download.records)
                if download.records != expected:
                    raise DataError(
                        f"The table was changed while it was read: it had {expected} records, and has "
                        f"{download.records} now. Start again.",
                        path=path,
                    )
                self._downloads[path] = download
            return self._downloads[path]

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
        from karvan.data.maxcompute_tunnel import DamagedAnswerError

        return True if is_outage(error) else None if isinstance(error, DamagedAnswerError) else False
