"""`OdpsDataset`: tables of MaxCompute by a `kv.data.Loader`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from karvan.compat.recis.io.dataset_base import DatasetBase
from karvan.compat.unsupported import missing_names
from karvan.data.maxcompute.source import MaxComputeSource
from karvan.data.maxcompute.table_url import parse_tables
from karvan.data.retry import RETRY_SECONDS, Patience, retrying

_DOTTED = re.compile(r"([\w-]+)\.(\w+)((?:/[^/=?]+=[^/?]*)*)")
_FOLDERS = re.compile(r"(odps://[^?]+/tables/\w+)((?:/[^/=?]+=[^/?]*)+)/?")


class OdpsDataset(DatasetBase):
    """Batches of tables of MaxCompute; see `DatasetBase`.

    The account is in the environment, see docs/data_storage.md. A table is "project.table", or
    "odps://project/tables/table"; "/ds=20240101/hh=01" after it is a partition.
    """

    def add_path(self, odps_table: str) -> None:
        """Add a table, or one of its partitions."""
        self._add_path(table_url(odps_table))

    def add_paths(self, odps_tables: Iterable[str]) -> None:
        """Add several tables."""
        for table in odps_tables:
            self.add_path(table)

    def get_table_size(self) -> list[int]:
        """The number of records of each table."""
        return [_records(url) for url in self._paths]


def get_table_size(table_name: str) -> int:
    """The number of records of a table."""
    return _records(table_url(table_name))


def table_url(table: str) -> str:
    """A table as `kv.data.read` names it."""
    if found := _DOTTED.fullmatch(table):
        project, name, folders = found.groups()
        return _with_partition(f"odps://{project}/tables/{name}", folders)
    if found := _FOLDERS.fullmatch(table):
        return _with_partition(*found.groups())
    if not table.startswith("odps://"):
        raise ValueError(
            f"OdpsDataset expects 'project.table' or 'odps://project/tables/table', got {table!r}."
        )
    return table


def _with_partition(url: str, folders: str) -> str:
    return f"{url}?partition={folders.strip('/').replace('/', ',')}" if folders else url


def _records(url: str) -> int:
    source = MaxComputeSource(parse_tables(url))
    return sum(part.records for part in retrying(source.parts, Patience(RETRY_SECONDS)))


__getattr__ = missing_names(
    "recis.io.odps_dataset",
    {"init_odps_session": "leave it out: sessions are opened when the table is read."},
)
