"""Datasets of ORC files and of tables of MaxCompute, by a `kv.data.Loader`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from karvan.compat.cuda_fallback import device_of
from karvan.compat.recis.ragged import RaggedTensor, to_karvan, to_recis
from karvan.compat.unsupported import UnsupportedError, refuse_methods, require_default
from karvan.data import Fixed, Loader, Raw, Varlen, read
from karvan.data.columns.declarations import Column
from karvan.data.maxcompute import MaxComputeSource, parse_tables
from karvan.data.retry import RETRY_SECONDS, Patience, retrying
from karvan.ragged import Batch, Ragged

__all__ = ["OdpsDataset", "OrcDataset"]

Function = Callable[[Any], Any]


class DatasetBase(IterableDataset[tuple[bool, Any]]):
    """Batches of some data: iterating gives `(False, batch)`, and `(True, None)` at the end.

    A batch is a list with one mapping of names to entries, to which the functions of transform_fn are
    applied. worker_num and worker_idx are those of a `kv.data.Loader`, which divides records and not files.
    Its threads are as many as the larger of read_threads_num and pack_threads_num, and it always fetches at
    least one batch in advance. "pin" is the memory of the machine: a Trainer copies through page-locked
    memory anyway. save_interval: without one `dump_io_state` gives None, as in RecIS; the position is always
    exact. shuffle shuffles the order of splits, by a fixed seed.
    """

    def __init__(
        self,
        batch_size: int,
        worker_idx: int = 0,
        worker_num: int = 1,
        read_threads_num: int = 4,
        pack_threads_num: int | None = None,
        prefetch: int = 1,
        is_compressed: bool = False,
        drop_remainder: bool = False,
        worker_slice_batch_num: int | None = None,
        shuffle: bool = False,
        ragged_format: bool = True,
        transform_fn: Function | Sequence[Function] | None = None,
        save_interval: int | None = 100,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        prefetch_transform: int | None = None,
        user_define_module: Any = None,
        read_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        require_default("user_define_module", user_define_module, None, "change batches by transform_fn.")
        require_default("read_batch_size", read_batch_size, None, "Karvan chooses how much it reads at once.")
        require_default("is_compressed", is_compressed, False, "write the data without RecIS's compression.")
        require_default(
            "worker_slice_batch_num", worker_slice_batch_num, None, "Karvan divides records evenly by itself."
        )
        require_default("ragged_format", ragged_format, True, "use RaggedTensor.to_sparse() where needed.")
        if device not in ("cpu", "cuda", "pin"):
            raise ValueError(f"{type(self).__name__} expects device 'cpu', 'cuda' or 'pin', got {device!r}.")
        self.options: dict[str, Any] = {
            "batch_size": batch_size,
            "rank": worker_idx,
            "world_size": worker_num,
            "workers": max(1, read_threads_num, pack_threads_num or 1),
            "prefetch": max(1, prefetch or 1, prefetch_transform or 1),
            "drop_remainder": drop_remainder,
            "shuffle": int(shuffle),
            "device": device_of("cpu" if device == "pin" else device),
        }
        functions = transform_fn if isinstance(transform_fn, Sequence) else [transform_fn]
        self._transforms: list[Function] = [function for function in functions if function is not None]
        self._ragged_maps: list[Function] = []
        self._maps: list[Function] = []
        self._save_interval = save_interval
        self._dtype = dtype
        self._paths: list[str] = []
        self._columns: dict[str, Column] = {}
        self._loader: Loader | None = None
        self.listed = False  # whether batches are lists of one mapping, which only the first batch shows

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        instead = "give the Trainer an iterable of (False, samples), with (True, None) at its end."
        refuse_methods(cls, dict.fromkeys(("make_dataset_fn", "_shard_path"), instead))

    def read_options(self) -> dict[str, Any]:
        """What `kv.data.read` needs beside the paths, for this kind of data."""
        return {}

    def _add_path(self, path: str) -> None:
        self._declare()
        self._paths.append(path)

    def varlen_feature(
        self, name: str, hash_type: str | None = None, hash_bucket: int = 0, trans_int8: bool = False
    ) -> None:
        """Read a column with any number of values in a row.

        Strings are hashed. With trans_int8 they are read as bytes of int8, with the offsets of rows, which
        are lists of strings, and those of strings. hash_bucket has a meaning with a hash_type only.
        """
        self._declare()
        if hash_type is not None:
            if hash_type not in ("farm", "murmur"):
                raise ValueError(f"varlen_feature expects hash_type 'farm' or 'murmur', got {hash_type!r}.")
            self._add_column(Varlen(name, hash_type, hash_bucket))
        else:
            self._add_column(Raw(name) if trans_int8 else Varlen(name))

    def fixedlen_feature(self, name: str, default_value: Sequence[float]) -> None:
        """Read a column with as many numbers in a row as there are defaults, which replace missing ones."""
        self._declare()
        if isinstance(default_value, int | float):
            default_value = [default_value]
        self._add_column(Fixed(name, list(default_value), len(default_value)))

    def _add_column(self, column: Column) -> None:
        if (first := self._columns.setdefault(column.name, column)) != column:
            raise ValueError(f"Feature '{column.name}' is declared twice, as {first} and as {column}.")

    def map(self, map_func: Function) -> None:
        """Add a function that is applied to each batch, before those of transform_fn."""
        self._declare()
        self._maps.append(map_func)

    def transform_ragged_batch(self, func: Function) -> None:
        """Add a function that is applied to each batch, before those of `map`."""
        self._declare()
        self._ragged_maps.append(func)

    def parse_from(self, io_confs: Iterable[Any]) -> None:
        """Read the columns that some records declare, by `varlen`, `name`, `hash_type` and so on."""
        for conf in io_confs:
            if conf.varlen:
                self.varlen_feature(conf.name, conf.hash_type, conf.hash_bucket_size, conf.trans_int)
            else:
                self.fixedlen_feature(conf.name, [0.0] * conf.dim)

    def filter(self, filter_func: Function) -> None:
        """Not supported."""
        raise UnsupportedError(f"{type(self).__name__}.filter", "filter the records before they are written.")

    def _declare(self) -> None:
        if self._loader is not None:
            raise RuntimeError("The dataset is being read: expected paths and features before that.")

    @property
    def loader(self) -> Loader:
        """Karvan's loader of the batches: mappings of names to Karvan's entries."""
        if self._loader is None:
            if not self._paths or not self._columns:
                raise ValueError(
                    f"{type(self).__name__} expects paths and features before it is read: add_path, "
                    "varlen_feature, fixedlen_feature."
                )
            options = {**self.options, **self.read_options(), "columns": list(self._columns.values())}
            dataset = read(self._paths, transform=self._transform, **options)
            self._loader = cast(Loader, dataset)  # since it has a rank
        return self._loader

    def _transform(self, batch: Batch) -> dict[str, Any]:
        """What a batch becomes by the functions, in Karvan's form."""
        batches: Any = [{name: self._entry(name, entry) for name, entry in batch.items()}]
        for function in (*self._ragged_maps, *self._maps, *self._transforms):
            batches = function(batches)
        self.listed = isinstance(batches, list)
        if self.listed and len(batches) == 1:
            batches = batches[0]
        if not isinstance(batches, Mapping):
            raise TypeError(
                "transform_fn expects functions that return a mapping of names to entries, got "
                f"{type(batches).__name__}."
            )
        return {name: to_karvan(entry) for name, entry in batches.items()}

    def _entry(self, name: str, entry: Any) -> Any:
        converted, column = to_recis(entry), self._columns.get(name)
        if isinstance(column, Raw) and isinstance(entry, Ragged):  # lists of one string, as ids are of one
            rows = torch.arange(entry.rows + 1, device=entry.values.device)
            converted = RaggedTensor(converted.values(), [rows, *converted.offsets()])
        if isinstance(column, Fixed):
            converted = converted.reshape(len(converted), column.length)
        values = converted.values() if isinstance(converted, RaggedTensor) else converted
        if values.is_floating_point() and values.dtype is not self._dtype:
            converted = converted.to(self._dtype)
        return converted

    def present(self, batch: Mapping[str, Any]) -> Any:
        """A batch of the loader as RecIS programs know it."""
        samples = {name: to_recis(entry) for name, entry in batch.items()}
        return [samples] if self.listed else samples

    def __iter__(self) -> Iterator[tuple[bool, Any]]:
        for batch in self.loader:
            yield False, self.present(batch)
        yield True, None

    def dump_io_state(self) -> dict[str, Any] | None:
        """The position, after the batches handed out so far; None without a save_interval."""
        return self.loader.state_dict() if self._save_interval else None

    def load_io_state(self, io_states: Mapping[str, Any] | None) -> None:
        """Go to a position, also of another number of workers if it is the merged one of all."""
        if io_states:
            self.loader.load_state_dict(io_states)

    def reset(self) -> None:
        """Start again at the first batch."""
        self.loader.start_epoch(0)


class OrcDataset(DatasetBase):
    """Batches of ORC files; see `DatasetBase`."""

    def add_path(self, file_path: str | os.PathLike[str]) -> None:
        """Add a folder with files, also in folders below it, or a file."""
        self._add_path(os.fspath(file_path))

    def add_paths(self, file_paths: Iterable[str | os.PathLike[str]]) -> None:
        """Add several paths."""
        for path in file_paths:
            self.add_path(path)

    @override
    def read_options(self) -> dict[str, Any]:
        return {"format": "orc"}


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
    if match := _DOTTED.fullmatch(table):
        project, name, folders = match.groups()
        return _with_partition(f"odps://{project}/tables/{name}", folders)
    if match := _FOLDERS.fullmatch(table):
        return _with_partition(*match.groups())
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
