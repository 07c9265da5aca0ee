"""Data of the commands: RecordIO, CSV, tables, readers of a model, and how its `feed` prepares records.

**Readers** (`custom_data_reader`) have `create_shards()`, which gives (name, first record, number of records)
of every shard, or these two by name, and `read_records(task)`, which gives the records from `task.start` to
`task.end` of a shard. Its shards become the parts of a source of Karvan, so its records are divided, shuffled
and leased like those of files.

**Tables** of MaxCompute are `odps://project/tables/name?partition=…`, as `kv.data.read` takes it. ElasticDL's
own form works, too: the name of a table as data, `--data_reader_params "partition=ds=20240101;
columns=['a', 'b']"`, and the variables MAXCOMPUTE_PROJECT, MAXCOMPUTE_AK, MAXCOMPUTE_SK, MAXCOMPUTE_ENDPOINT,
MAXCOMPUTE_TUNNEL_ENDPOINT. A record is a list of the texts of its values.

**`feed(records, mode, metadata)`** gets a list of records, with a `map` as data sets of TensorFlow have it.
It gives features and labels: tensors, `kv.Ragged`s, arrays, lists of one entry for each sample, or mappings
of names to these; or a list or a torch data set of samples. In mode PREDICTION it gives features alone.
`dataset_fn` of the design for PyTorch gets numbers instead, where all records are text of numbers: one array
of all numbers of all records, in their order. Batches are pairs of features and labels, which a `kv.Trainer`
takes.
"""

from __future__ import annotations

import ast
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from typing_extensions import override

from karvan.compat.elasticdl.contract import ContractError, Mode, Shard, TaskType
from karvan.data import DataError, Part, Source, Split, open_files, read
from karvan.data.leased_data import SharedData
from karvan.data.loading.loader import Loader
from karvan.data.loading.settings import Transform
from karvan.data.maxcompute import MaxComputeSource, is_table_url, parse_tables
from karvan.data.retry import RETRY_SECONDS, Patience, retrying
from karvan.ragged import Batch, Entry, NestedRagged, Ragged
from karvan.train.types import as_batch

RECORD = "record"
"""The only column of records that are bytes."""


@dataclass
class Metadata:
    """What is known of records: the names of their columns and, from readers of a model, their types."""

    column_names: list[str] | None = None
    column_dtypes: list[Any] | None = None


@dataclass(frozen=True)
class Task:
    """Records to read; `shard_name`, `start` and `end` are also in `shard`."""

    shard_name: str
    start: int
    end: int
    type: str = TaskType.TRAINING

    @property
    def shard(self) -> Shard:
        """The same as a shard."""
        return Shard(self.shard_name, self.start, self.end)


class AbstractDataReader(ABC):
    """The base of readers that a model defines."""

    def __init__(self, **kwargs: Any) -> None:
        """Arguments are those of --data_reader_params."""
        self.params = kwargs

    @abstractmethod
    def read_records(self, task: Task) -> Iterable[Any]:
        """The records of a task, in order."""

    @abstractmethod
    def create_shards(self) -> Any:
        """(name, first record, number of records) of every shard, or {name: (first record, number)}."""

    @property
    def metadata(self) -> Metadata:
        """What `feed` gets as its third argument."""
        return Metadata()


class ReaderSource:
    """The shards of a reader as a `karvan.data.Source` with a column of records.

    Records that are bytes are in it as they are. Others are pickled: Arrow holds no objects of Python, and
    `feed` may change in place what the reader gives again in the next epoch.
    """

    schema = pa.schema([(RECORD, pa.binary())])

    def __init__(self, reader: Any, mode: str) -> None:
        self._reader = reader
        self._type = mode.upper()  # a TaskType
        shards = _shards(reader.create_shards())
        names = [name for name, _, _ in shards]
        self._shards = {  # several of one file are told apart by their first records
            name if names.count(name) == 1 else f"{name}:{first}": (name, first, count)
            for name, first, count in shards
        }
        if not shards:
            raise ContractError("create_shards must give at least one shard, got none.")

    def parts(self) -> list[Part]:
        """One for each shard."""
        return [Part(path, count) for path, (_, _, count) in self._shards.items()]

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The records of a split; they are only on their way to `feed`, in this process."""
        name, start, _ = self._shards[split.path]
        task = Task(name, start + split.first, start + split.first + split.count, self._type)
        records = list(islice(self._reader.read_records(task), split.count + 1))
        if len(records) != split.count:
            raise DataError(
                f"read_records must give the {split.count} records from {task.start} to {task.end}, got "
                f"{'more' if len(records) > split.count else len(records)}.",
                path=split.path,
            )
        yield pa.record_batch([pa.array(map(_packed, records), pa.binary())], schema=self.schema)


@dataclass(frozen=True)
class OpenData:
    """Data of any kind: what `kv.data.read` reads, its options, and how to take the records of a batch."""

    source: Any
    options: Mapping[str, Any]
    metadata: Any
    records_of: Callable[[Batch], list[Any]]

    def read(self, batch_size: int, records_per_task: int, shuffle: bool, transform: Transform) -> Any:
        """The batches; records are read on one thread, because `feed` and readers are the program's."""
        loader: Loader | SharedData = read(
            self.source,
            batch_size,
            shuffle=records_per_task if shuffle else 0,
            split_records=records_per_task,
            workers=1,
            transform=transform,
            **self.options,
        )
        return loader


def open_data(
    origin: str,
    mode: str,
    params: Mapping[str, Any],
    custom: Callable[..., Any] | None,
    records_per_task: int,
) -> OpenData:
    """The data at a path, or of a reader that the model defines; params are those of --data_reader_params."""
    if custom is not None:
        reader = custom(data_origin=origin, records_per_task=records_per_task, **params)
        metadata = getattr(reader, "metadata", None) or Metadata()
        return OpenData(ReaderSource(reader, mode), {}, metadata, _unpacked)
    if is_table(origin, params):
        table = open_table(origin, params)
        return OpenData(table, {}, Metadata(table.names), _rows_of(table.names))
    allowed = {"reader_type", "sep", "columns"}
    if unknown := sorted(set(params) - allowed):
        raise ContractError(f"--data_reader_params expects {', '.join(sorted(allowed))}, got {unknown[0]}.")
    kind = params.get("reader_type") or ("Text" if _is_text(origin) else "RecordIO")
    if kind not in ("Text", "RecordIO"):
        raise ContractError(f"reader_type must be Text, RecordIO or ODPS, got '{kind}'.")
    if kind == "Text":
        return _open_csv(origin, params.get("sep"), params.get("columns"))
    if len(params) > ("reader_type" in params):
        raise ContractError("sep and columns of --data_reader_params are for CSV, got RecordIO.")
    # RecordIO files of ElasticDL have any names; those of other formats say so.
    form = None if ".tfr" in Path(origin).name else "recordio"
    options = {"options": {"content": "bytes"}, "format": form}
    return OpenData(origin, options, Metadata(), lambda batch: _texts(batch[RECORD]))


def parse_params(flag: str, text: str) -> dict[str, Any]:
    """The arguments in a text such as "sep=,; columns=['a', 'b']": Python values, or else text."""
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, sign, value = part.partition("=")
        if not sign or not name.strip().isidentifier():
            raise ContractError(f"{flag} expects name=value; name=value, got '{part}'.")
        try:
            values[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            values[name.strip()] = value.strip(" ") if value.strip(" ") else value
    return values


def _open_csv(origin: str, sep: str | None, columns: Any) -> OpenData:
    """Every cell as text, in the order of the columns."""
    settings: dict[str, Any] = {} if sep is None else {"delimiter": sep}
    chosen = list(columns or open_files(origin, "csv", partitions=False, **settings).schema.names)
    options = {**settings, "schema": dict.fromkeys(chosen, "string"), "nulls": []}
    reads = {"format": "csv", "options": options, "columns": chosen}
    return OpenData(origin, reads, Metadata(chosen), _rows_of(chosen))


def _rows_of(names: Sequence[str]) -> Callable[[Batch], list[Any]]:
    """What gives the records of a batch of texts: for each the texts of these columns."""

    def records_of(batch: Batch) -> list[Any]:
        cells = [[text.decode() for text in _texts(batch[name])] for name in names]
        return [list(row) for row in zip(*cells, strict=True)]

    return records_of


def _is_text(origin: str) -> bool:
    names = [origin] if not Path(origin).is_dir() else [path.name for path in Path(origin).iterdir()]
    return any(name.endswith((".csv", ".csv.gz")) for name in names)


def _texts(column: Any) -> list[bytes]:
    """The bytes of each sample."""
    assert isinstance(column, Ragged)
    assert column.offsets is not None
    data = column.values.numpy().tobytes()
    bounds = column.offsets.tolist()
    return [data[first:last] for first, last in pairwise(bounds)]


def _packed(record: Any) -> bytes:
    """Bytes as they are, unless they begin as all pickles do; anything else pickled."""
    plain = type(record) is bytes and not record.startswith(pickle.PROTO)
    return record if plain else pickle.dumps(record)


def _unpacked(batch: Batch) -> list[Any]:
    packed = _texts(batch[RECORD])  # by this process
    return [pickle.loads(record) if record.startswith(pickle.PROTO) else record for record in packed]


def _shards(descriptions: Any) -> list[tuple[str, int, int]]:
    listed = list(descriptions)
    if isinstance(descriptions, Mapping):
        listed = [(name, *place) for name, place in descriptions.items()]
    try:
        shards = [(str(name), int(first), int(count)) for name, first, count in listed]
    except (TypeError, ValueError) as error:
        raise ContractError(
            "create_shards must give (name, first record, number of records) of every shard, or a mapping "
            f"of names to the two numbers, got {str(listed)[:80]}."
        ) from error
    if len({(name, first) for name, first, _ in shards}) < len(shards):
        raise ContractError("create_shards must give different shards, got one twice.")
    return shards


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
    """A `karvan.data.Source` of a table's records: the texts of the values of its columns."""

    def __init__(self, url: str, columns: Sequence[str] | None) -> None:
        self._table = MaxComputeSource(parse_tables(url), columns, partitions=False)
        self.outages = self._table.outages
        self.names: list[str] = retrying(lambda: self._table.schema.names, Patience(RETRY_SECONDS))

    @property
    @override
    def schema(self) -> pa.Schema:
        return pa.schema([(name, pa.string()) for name in self.names])

    @override
    def parts(self) -> list[Part]:
        return self._table.parts()

    @override
    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        for batch in self._table.read(split):
            columns = [pa.array(map(str, column.to_pylist()), pa.string()) for column in batch.columns]
            yield pa.record_batch(columns, schema=self.schema)

    def fingerprint(self) -> str:
        """What changes when the table does."""
        return self._table.fingerprint()


class Records(list[Any]):
    """The records of a batch."""

    def map(self, function: Callable[[Any], Any]) -> Records:
        """The result for each record."""
        return Records(function(record) for record in self)

    def shuffle(self, *arguments: Any, **options: Any) -> NoReturn:
        """An error: it says who shuffles."""
        raise ContractError(
            "feed gets the records of one batch, and records for training are shuffled before: leave "
            "dataset.shuffle(…) out."
        )

    def batch(self, *arguments: Any, **options: Any) -> NoReturn:
        """An error: it says who makes batches."""
        raise ContractError(
            "feed gets the records of one batch, of --minibatch_size records: leave dataset.batch(…) out."
        )


class FeedStep:
    """A transform of batches; records_of gives the records of a batch."""

    def __init__(
        self,
        feed: Callable[..., Any],
        mode: str,
        metadata: Any,
        records_of: Callable[[Batch], list[Any]],
        *,
        numbers: bool = False,
    ) -> None:
        self._feed = feed
        self._mode = mode
        self._metadata = metadata
        self._records_of = records_of
        self._numbers = numbers

    def __call__(self, batch: Batch) -> Any:
        """Features and labels."""
        records: Any = Records(self._records_of(batch))
        if self._numbers and (numbers := numbers_of(records)) is not None:
            records = numbers
        fed = self._feed(records, self._mode, self._metadata)
        features, labels = self._parts(fed)
        parts = [_part("features", features)] + ([] if labels is None else [_part("labels", labels)])
        try:
            return as_batch(parts)
        except ValueError as error:
            raise ContractError(f"feed must give one of each for every sample: {error}") from error

    def _parts(self, parts: Any) -> tuple[Any, Any]:
        if isinstance(parts, Records | torch.utils.data.Dataset):
            samples = [parts[index] for index in range(len(parts))]  # type: ignore[arg-type]
            if samples and isinstance(samples[0], tuple):
                parts = tuple(
                    _joined([sample[part] for sample in samples]) for part in range(len(samples[0]))
                )
            else:
                parts = _joined(samples)
        if isinstance(parts, tuple) and len(parts) == 2:
            return parts[0], None if self._mode == Mode.PREDICTION else parts[1]
        if self._mode == Mode.PREDICTION and parts is not None and not isinstance(parts, tuple):
            return parts, None
        expected = "features" if self._mode == Mode.PREDICTION else "a pair of features and labels"
        got = f"a tuple of {len(parts)}" if isinstance(parts, tuple) else type(parts).__name__
        raise ContractError(f"feed must give {expected} in mode {self._mode}, got {got}.")


def numbers_of(records: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """All numbers of records that are text of numbers, or cells of a CSV file; None if they are not."""
    words: list[Any] = []
    for record in records:
        if isinstance(record, bytes | str):
            text = record.decode("latin-1") if isinstance(record, bytes) else record
            words += text.replace(",", " ").split()
        elif isinstance(record, list):
            words += record
        else:
            return None
    try:
        return np.array(words, np.float32)
    except ValueError:
        return None


def _joined(entries: list[Any]) -> Any:
    """Entries of samples, which may be mappings, as one list, or lists by name."""
    if entries and isinstance(entries[0], Mapping):
        return {name: [entry[name] for entry in entries] for name in entries[0]}
    return entries


def _part(name: str, part: Any) -> Entry | dict[str, Entry]:
    if isinstance(part, Mapping):
        return {str(inner): _entry(f"{name} '{inner}'", value) for inner, value in part.items()}
    return _entry(name, part)


def _entry(name: str, value: Any) -> Entry:
    """A tensor or rows as they are; anything else as a tensor, with floats in torch's usual dtype."""
    if isinstance(value, Tensor | Ragged | NestedRagged):
        return value
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return torch.stack(list(value))
    try:
        array = np.asarray(value)
        tensor = torch.tensor(array)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"feed must give {name} as a tensor, an array, or a list of one for each sample, all of one "
            f"shape: {error}"
        ) from error
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
