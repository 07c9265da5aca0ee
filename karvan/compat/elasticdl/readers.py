"""Data of the commands: RecordIO, CSV, tables, and readers that a model defines (`custom_data_reader`).

A reader has `create_shards()`, which gives (name, first record, number of records) of every shard, or these
two by name, and `read_records(task)`, which gives the records from `task.start` to `task.end` of a shard.
Its shards become the parts of a source of Karvan, so its records are divided, shuffled and leased like those
of files.
"""

from __future__ import annotations

import ast
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from karvan.compat.elasticdl.constants import Mode, TaskType
from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl.tables import PACKED, RECORD, is_table, open_table
from karvan.data import DataError, Part, Split, open_files, read
from karvan.data.leasing.shared_data import SharedData
from karvan.data.loading.batch_steps import Transform
from karvan.data.loading.loader import Loader
from karvan.ragged import Batch, Ragged

_TYPES = {
    Mode.TRAINING: TaskType.TRAINING,
    Mode.EVALUATION: TaskType.EVALUATION,
    Mode.PREDICTION: TaskType.PREDICTION,
}


@dataclass
class Metadata:
    """What is known of records: the names of their columns and, from readers of a model, their types."""

    column_names: list[str] | None = None
    column_dtypes: list[Any] | None = None


@dataclass(frozen=True)
class Shard:
    """Records `start` to `end` of the shard of a name."""

    name: str
    start: int
    end: int


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
    """The shards of a reader as a `karvan.data.Source` with a column of records."""

    schema = PACKED

    def __init__(self, reader: Any, mode: str) -> None:
        self._reader = reader
        self._type = _TYPES[mode]
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
        """The records of a split; they are packed only on their way to `feed`."""
        name, start, _ = self._shards[split.path]
        task = Task(name, start + split.first, start + split.first + split.count, self._type)
        records = list(islice(self._reader.read_records(task), split.count + 1))
        if len(records) != split.count:
            raise DataError(
                f"read_records must give the {split.count} records from {task.start} to {task.end}, got "
                f"{'more' if len(records) > split.count else len(records)}.",
                path=split.path,
            )
        yield pa.record_batch([pa.array(map(pickle.dumps, records), pa.binary())], schema=self.schema)


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
        return OpenData(table, {}, Metadata(table.names), _unpacked)
    known = {"reader_type", "sep", "columns"}
    if unknown := sorted(set(params) - known):
        raise ContractError(f"--data_reader_params expects {', '.join(sorted(known))}, got {unknown[0]}.")
    kind = params.get("reader_type") or ("Text" if _is_text(origin) else "RecordIO")
    if kind not in ("Text", "RecordIO"):
        raise ContractError(f"reader_type must be Text, RecordIO or ODPS, got '{kind}'.")
    if kind == "Text":
        return _open_csv(origin, params.get("sep"), params.get("columns"))
    if len(params) > ("reader_type" in params):
        raise ContractError("sep and columns of --data_reader_params are for CSV, got RecordIO.")
    options = {"options": {"content": "bytes"}, "format": _format_of(origin)}
    return OpenData(origin, options, Metadata(), lambda batch: _texts(batch[RECORD]))


def parse_params(flag: str, text: str) -> dict[str, Any]:
    """The arguments in a text such as "sep=,; columns=['a', 'b']": Python values, or else text."""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, sign, value = part.partition("=")
        if not sign or not name.strip().isidentifier():
            raise ContractError(f"{flag} expects name=value; name=value, got '{part}'.")
        try:
            found[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            found[name.strip()] = value.strip(" ") if value.strip(" ") else value
    return found


def _open_csv(origin: str, sep: str | None, columns: Any) -> OpenData:
    """Every cell as text, in the order of the columns."""
    given: dict[str, Any] = {} if sep is None else {"delimiter": sep}
    chosen = list(columns or open_files(origin, "csv", partitions=False, **given).schema.names)
    options = {**given, "schema": dict.fromkeys(chosen, "string"), "nulls": []}

    def records_of(batch: Batch) -> list[Any]:
        cells = [[text.decode() for text in _texts(batch[name])] for name in chosen]
        return [list(row) for row in zip(*cells, strict=True)]

    reads = {"format": "csv", "options": options, "columns": chosen}
    return OpenData(origin, reads, Metadata(chosen), records_of)


def _is_text(origin: str) -> bool:
    names = [origin] if not Path(origin).is_dir() else [each.name for each in Path(origin).iterdir()]
    return any(name.endswith((".csv", ".csv.gz")) for name in names)


def _format_of(origin: str) -> str | None:
    """RecordIO files of ElasticDL have any names; those of other formats say so."""
    return None if ".tfr" in Path(origin).name else "recordio"


def _texts(column: Any) -> list[bytes]:
    """The bytes of each sample."""
    assert isinstance(column, Ragged)
    assert column.offsets is not None
    data = column.values.numpy().tobytes()
    bounds = column.offsets.tolist()
    return [data[first:last] for first, last in pairwise(bounds)]


def _unpacked(batch: Batch) -> list[Any]:
    return [pickle.loads(packed) for packed in _texts(batch[RECORD])]  # this process has packed them


def _shards(given: Any) -> list[tuple[str, int, int]]:
    listed = [(name, *place) for name, place in given.items()] if isinstance(given, Mapping) else list(given)
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
