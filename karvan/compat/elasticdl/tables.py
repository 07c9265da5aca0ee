"""Tables of MaxCompute as data of the commands: their names, accounts, and records.

A table is `odps://project/tables/name?partition=…`, as `kv.data.read` takes it. ElasticDL's own form works,
too: the name of a table as data, `--data_reader_params "partition=ds=20240101; columns=['a', 'b']"`, and the
variables MAXCOMPUTE_PROJECT, MAXCOMPUTE_AK, MAXCOMPUTE_SK, MAXCOMPUTE_ENDPOINT, MAXCOMPUTE_TUNNEL_ENDPOINT.
A record is a list of the texts of its values.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from typing_extensions import override

from karvan.compat.elasticdl.contract import ContractError
from karvan.data import Part, Source, Split
from karvan.data.maxcompute.source import MaxComputeSource
from karvan.data.maxcompute.table_url import is_table_url, parse_tables
from karvan.data.retry import RETRY_SECONDS, Patience, retrying

RECORD = "record"
"""The only column of records that are packed as bytes."""

PACKED = pa.schema([(RECORD, pa.binary())])

_PROJECT = "MAXCOMPUTE_PROJECT"
_VARIABLES = {
    "MAXCOMPUTE_AK": "ODPS_ACCESS_ID",
    "MAXCOMPUTE_SK": "ODPS_ACCESS_KEY",
    "MAXCOMPUTE_ENDPOINT": "ODPS_ENDPOINT",
    "MAXCOMPUTE_TUNNEL_ENDPOINT": "ODPS_TUNNEL_ENDPOINT",
}
_PARAMS = {"reader_type", "partition", "columns"}
_REFUSED = {
    "table": "name the table as the data, --training_data",
    "label_col": "define feed, which gives features and labels",
    "num_processes": "records are read in the background anyway",
    **dict.fromkeys(
        ("project", "access_id", "access_key", "endpoint", "tunnel_endpoint"),
        f"set {_PROJECT}, {', '.join(_VARIABLES)} in the environment",
    ),
}


def account_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of pyodps, where ElasticDL's are set and they are not."""
    return {
        ours: environment[theirs]
        for theirs, ours in _VARIABLES.items()
        if environment.get(theirs) and not environment.get(ours)
    }


def is_table(origin: str, params: Mapping[str, Any]) -> bool:
    """Whether data is a table: a URL, or a name, with reader_type=ODPS or MAXCOMPUTE_PROJECT."""
    if is_table_url(origin) or params.get("reader_type") == "ODPS":
        return True
    named = bool(os.environ.get(_PROJECT)) and params.get("reader_type") is None
    return named and not Path(origin).exists() and "/" not in origin and not origin.endswith(".csv")


def open_table(origin: str, params: Mapping[str, Any]) -> TableRecords:
    """The records of a table."""
    for name in params:
        if name in _REFUSED:
            raise ContractError(f"--data_reader_params has no {name} for a table: {_REFUSED[name]}.")
    if unknown := sorted(set(params) - _PARAMS):
        raise ContractError(
            f"--data_reader_params of a table expects {', '.join(sorted(_PARAMS))}, got {unknown[0]}."
        )
    columns = params.get("columns")
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Sequence)):
        raise ContractError(f"columns expects a list of names, as ['a', 'b'], got {columns!r}.")
    return TableRecords(_url(origin, params.get("partition")), columns)


def _url(origin: str, partition: Any) -> str:
    url = origin
    if not is_table_url(origin):
        project, _, name = origin.rpartition(".")
        project = project or os.environ.get(_PROJECT, "")
        if not project:
            raise ContractError(
                f"The table '{origin}' needs a project: expected {_PROJECT} in the environment, "
                "project.table, or odps://project/tables/name."
            )
        url = f"odps://{project}/tables/{name}"
    if partition is None:
        return url
    if "?" in url:
        raise ContractError(
            f"'{origin}' has a partition: expected none in --data_reader_params, got another."
        )
    return f"{url}?partition={quote(str(partition), safe='=,/')}"


class TableRecords(Source):
    """A `karvan.data.Source` of a table's records, packed: lists of texts, in the order of the columns."""

    schema = PACKED

    def __init__(self, url: str, columns: Sequence[str] | None) -> None:
        self._table = MaxComputeSource(parse_tables(url), columns, partitions=False)
        self.outages = self._table.outages
        self.names: list[str] = retrying(lambda: self._table.schema.names, Patience(RETRY_SECONDS))

    @override
    def parts(self) -> list[Part]:
        return self._table.parts()

    @override
    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        for batch in self._table.read(split):
            columns = [map(str, column.to_pylist()) for column in batch.columns]
            packed = [pickle.dumps(list(record)) for record in zip(*columns, strict=True)]
            yield pa.record_batch([pa.array(packed, pa.binary())], schema=self.schema)

    def fingerprint(self) -> str:
        """What changes when the table does."""
        return self._table.fingerprint()
