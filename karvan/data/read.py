"""`read`: from a path or a frame to batches, in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import torch
from pyarrow import fs

from karvan import distributed
from karvan.argument_checks import listed
from karvan.data.columns.declarations import Column, Fixed, Varlen, infer_field
from karvan.data.columns.decoder import Decoder, flat_schema, outer_names
from karvan.data.errors import DataError
from karvan.data.formats.base import FileSource
from karvan.data.formats.open_files import open_files
from karvan.data.in_memory import open_frame
from karvan.data.leased_data import SharedData
from karvan.data.loading.loader import Loader
from karvan.data.loading.settings import ReadSettings, Transform
from karvan.data.maxcompute import MaxComputeSource, is_table_url, parse_tables
from karvan.data.retry import RETRY_SECONDS, Patience, retrying
from karvan.data.source import Source
from karvan.devices import data_device
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role

T = TypeVar("T")


def read(
    data: Any,
    batch_size: int,
    *,
    columns: Sequence[Column | str] | None = None,
    labels: Sequence[str] = (),
    format: str | None = None,
    filesystem: fs.FileSystem | None = None,
    options: Mapping[str, Any] | None = None,
    shuffle: int = 0,
    seed: int = 0,
    epochs: int | None = 1,
    steps_per_epoch: int | None = None,
    drop_remainder: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    workers: int = 2,
    prefetch: int = 4,
    transform: Transform | None = None,
    split_records: int | None = None,
    retry_seconds: float = RETRY_SECONDS,
    device: torch.device | str | None = None,
) -> Loader | SharedData:
    """Read batches from files, from a frame or arrays in memory, or from a `Source`.

    In a job with `sharding: dynamic` the result is a `SharedData`: `Trainer.fit` leases its records from the
    job's master while it trains. `shuffle` then mixes the tasks of `split_records` records, and the records
    inside of each.

    Args:
        data: A path, folder, glob or URL, or a list of them; a frame of pandas or polars; an Arrow table; a
            mapping of names to arrays, tensors or lists; or a `Source`. URLs `odps://…` are tables of
            MaxCompute.
        batch_size: How many samples make a batch, of each rank.
        columns: The columns to read, by name or as `Fixed`, `Varlen` or `Raw`. By default all are read, and
            their kinds inferred.
        labels: Columns in which a missing value is an error. A Trainer adds those that its loss names.
        format: The format of files: "parquet", "orc", "ipc", "csv", "tsv", "tfrecord" or "recordio"; by
            default found from their extension or first bytes.
        filesystem: A pyarrow file system that has the files; by default found from the URL.
        options: Options of the format, such as `{"delimiter": ";"}`.
        shuffle: How many records are shuffled at a time; 0 for the order of the source.
        seed: The seed of the order.
        epochs: How often one iteration gives every record; None for endlessly.
        steps_per_epoch: How many batches are an epoch, however large the data is. All ranks then have equally
            many.
        drop_remainder: Whether to skip the last, smaller batch of an epoch.
        rank: Which share of the data is read; by default that of `kv.connect`.
        world_size: How many shares there are; by default that of `kv.connect`.
        workers: How many threads read and decode.
        prefetch: How many batches are prepared in advance.
        transform: A function of batches, such as a `kv.FeatureEngine`.
        split_records: How many records make a split, by which data is divided.
        retry_seconds: How long an unreachable source is tried again before its error is raised.
        device: Where batches arrive. With "cuda" they are copied to the GPU beside the computation.

    Returns:
        An iterable of batches with a position, for `Trainer.fit` or a loop.

    Raises:
        DataError: The data cannot be read as asked.
        TypeError: An argument is of the wrong kind.
        ValueError: An argument is out of range.

    Example:
        >>> frame = {"user": [7, 8, 9], "label": [1.0, 0.0, 1.0]}
        >>> for batch in kv.data.read(frame, batch_size=2):
        ...     print(batch["user"])
        tensor([7, 8])
        tensor([9])
    """
    gpu = data_device(device)
    source, decode = open_data(
        data,
        columns=columns,
        labels=labels,
        format=format,
        filesystem=filesystem,
        options=options,
        retry_seconds=retry_seconds,
    )
    settings = ReadSettings(
        source,
        decode,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        drop_remainder=drop_remainder,
        workers=workers,
        prefetch=prefetch,
        transform=transform,
        split_records=split_records,
        retry_seconds=retry_seconds,
        device=gpu,
    )
    if rank is not None or world_size is not None or not is_leased():
        return Loader(**settings.arguments(), rank=rank, world_size=world_size)
    if epochs != 1 or steps_per_epoch is not None or drop_remainder:
        raise ValueError(
            "sharding: dynamic leases every record once in an epoch, and Trainer.fit has the number of "
            "epochs: "
            "expected no epochs, steps_per_epoch or drop_remainder."
        )
    getattr(source, "require_fixed", lambda: None)()  # of a topic that grows
    return SharedData(settings)


def is_leased() -> bool:
    """Whether the records of this process are leased from the master of its job."""
    if distributed.current().group is not None:
        return True
    job = JobEnvironment.read()
    if job.registry and job.role == Role.TRAINER and job.sharding == "dynamic":
        raise ValueError(
            'The job has sharding: dynamic, but this trainer is not connected: call kv.connect("remote") '
            "before it opens its data."
        )
    return job.role == Role.LOADER and job.sharding == "dynamic"


def open_data(
    data: Any,
    *,
    columns: Sequence[Column | str] | None,
    labels: Sequence[str],
    format: str | None,
    filesystem: fs.FileSystem | None,
    options: Mapping[str, Any] | None,
    retry_seconds: float,
) -> tuple[Source, Decoder]:
    """The source of some data and the decoder of its columns; the arguments are those of `read`."""
    if isinstance(columns, str | Column):
        raise TypeError(f"columns expects a list, got a single {columns!r}: give it [{columns!r}].")
    if wrong := [column for column in columns or () if not isinstance(column, str | Column)]:
        raise TypeError(f"columns expects names, Fixed, Varlen or Raw, got {wrong[0]!r}.")
    if not isinstance(options, Mapping | None):
        raise TypeError(f'options expects a mapping such as {{"delimiter": ";"}}, got {options!r}.')
    names = None if columns is None else [c if isinstance(c, str) else c.name for c in columns]

    def retried(work: Callable[[], T]) -> T:
        return retrying(work, Patience(retry_seconds))

    open_columns = partial(open_files, data, format, filesystem=filesystem, **(options or {}))
    if names is not None and any("." in name for name in names) and _is_path(data):  # fields of structs
        names = outer_names(retried(lambda: open_columns(columns=None).schema), names)
    if is_table_url(data):
        source: Source = _open_tables(data, names, format, filesystem, options)
    elif _is_path(data):
        source = retried(lambda: open_columns(columns=names))
    else:
        _require_files(type(data).__name__, format=format, filesystem=filesystem, options=options)
        if type(data).__name__ == "LazyFrame":
            raise TypeError(
                "Expected a frame with its rows, but received a LazyFrame: give it frame.collect()."
            )
        is_source = all(hasattr(data, name) for name in ("schema", "parts", "read"))
        source = data if is_source else open_frame(data)
    for column in columns or ():
        if isinstance(source, FileSource) and isinstance(column, Fixed) and column.dtype is not None:
            source.declare_numbers(column.name, column.dtype.is_floating_point)
        if isinstance(source, FileSource) and isinstance(column, Varlen):
            source.declare_list(column.name)
    schema = retried(lambda: source.schema)
    fields = flat_schema(schema)
    requested: Sequence[Column | str] = fields.names if columns is None else columns
    if isinstance(labels, str):
        raise TypeError(f"labels must be a list of names, but is the string {labels!r}.")
    nullable = retried(getattr(source, "columns_with_nulls", frozenset))
    decode = Decoder([_inferred(fields, c) if isinstance(c, str) else c for c in requested], labels, nullable)
    decode.check(schema)
    return source, decode


def _open_tables(
    data: str | Sequence[str],
    names: Sequence[str] | None,
    format: str | None,
    filesystem: fs.FileSystem | None,
    options: Mapping[str, Any] | None,
) -> MaxComputeSource:
    _require_files("a table of MaxCompute", format=format, filesystem=filesystem)
    if unknown := [name for name in options or {} if name != "partitions"]:
        raise ValueError(f"There is no option '{unknown[0]}' for MaxCompute; there is: partitions.")
    return MaxComputeSource(parse_tables(data), names, **(options or {}))


def _require_files(data: str, **arguments: object) -> None:
    """Raise a ValueError for an argument that is for files, if the data is something else."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is for files, but the data is {data}.")


def _is_path(data: object) -> bool:
    if isinstance(data, str | os.PathLike):
        return True
    return isinstance(data, list | tuple) and len(data) > 0 and all(map(_is_path, data))


def _inferred(schema: pa.Schema, name: str) -> Column:
    if schema.get_field_index(name) < 0:
        raise DataError(f"There is no such column; there are: {listed(name, schema.names)}", column=name)
    return infer_field(schema.field(name))
