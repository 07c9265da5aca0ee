"""URLs of MaxCompute: `odps://project/tables/name?partition=ds=20240101,hh=01`.

Accounts and endpoints are no part of them. A URL that has some is refused without repeating it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from karvan.data.errors import DataError

# Errors of MaxCompute after which it is worth asking again.


class DamagedAnswerError(DataError):
    """An answer with wrong checksums or too few records; it may be right when asked again."""


class EndedSessionError(DataError):
    """The download session does not exist any more; another one can be opened."""


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

    def __str__(self) -> str:
        schema = f"/schemas/{self.schema}" if self.schema else ""
        spec = f"?partition={self.partition_spec}" if self.partition else ""
        return f"{_SCHEME}{self.project}{schema}/tables/{self.table}{spec}"


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
