"""`LoaderContext`: the program of a loader; and the built-in one, which reads the `data` of the job.

    with kv.LoaderContext() as data:
        data.serve(data.read("clicks/*.parquet", batch_size=4096))

or, for batches that a program makes itself,

    with kv.LoaderContext() as data:
        for epoch in data.epochs():
            for batch in batches_of(epoch, data.index, data.count):
                if not data.send(batch):
                    break

In a job with `sharding: dynamic` trainers lease their records, and a loader reads what they have leased. So
`read` gives all of the data there, and batches that a program makes itself are an error.
"""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from karvan.checkpoint.checkpoint import has_state, name_of
from karvan.cluster.embedding_worker.client import workers_from_environment
from karvan.cluster.loader.epoch_service import Batches, EpochService, as_batch, serve
from karvan.cluster.loader.service import (
    ANSWER_WITHIN,
    IdReceiver,
    LoaderStatistics,
    SavedStatistics,
    SplitIds,
    split_by_name,
)
from karvan.cluster.loader.task_service import TaskService
from karvan.cluster.role_process import RoleSettings, generations_of, listening
from karvan.data import Loader, SharedData, read
from karvan.data.columns.declarations import column_from_settings
from karvan.data.columns.kinds import ColumnKind
from karvan.data.read import is_leased
from karvan.errors import DAMAGED, TEMPORARY, code_of, text_of
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.process_end import handling
from karvan.wire import Service

_log = logging.getLogger("karvan.cluster")

_REPORT_WITHIN = 30.0  # seconds for trainers to receive an error


class LoaderContext:
    """This process as one of a job's loaders, which read data and send batches to trainers.

    It serves until `close`, also as a context manager. The job gives it its `index`, the number of loaders
    `count`, and its addresses.

    Args:
        queue: How many batches may wait for each trainer. Reading pauses while a queue is full.
        settings: The addresses; by default those of the environment of a launched job.
        workers: What receives ids; by default the embedding workers of the launched job.
        split: How ids are divided among the workers.

    Example:
        >>> def main():  # the program of a loader, started by `karvan launch`
        ...     with kv.LoaderContext() as data:
        ...         data.serve(data.read("clicks/*.parquet", batch_size=4096))
    """

    def __init__(
        self,
        *,
        queue: int = 8,
        settings: RoleSettings | None = None,
        workers: Sequence[IdReceiver] | None = None,
        split: SplitIds = split_by_name,
    ) -> None:
        settings = settings or RoleSettings.from_environment(Role.LOADER)
        self.index = settings.job.index
        self.count = settings.job.count
        leased = JobEnvironment.read().sharding == "dynamic"
        self._service = _service(settings, leased, queue, workers, split)
        self._transforms: list[object] = []  # with statistics
        self._columns: dict[str, ColumnKind] = {}
        self._saved = SavedStatistics(JobEnvironment.read().checkpoints)
        self._started = False
        self._once = False  # whether batches are sent outside of `epochs`
        self._open = False  # whether an epoch has started and not ended
        self._ended = threading.Event()
        self._stack = ExitStack()
        self._stack.enter_context(handling({signal.SIGTERM: lambda *_: sys.exit(0)}))
        self._stack.enter_context(listening(self._service, settings, self._ended))
        atexit.register(self._leave)

    def read(self, data: Any, batch_size: int, **options: Any) -> Loader | SharedData:
        """Read this loader's share of data, as `kv.data.read` does.

        If trainers lease their records, it reads all of it.

        A `transform` takes the statistics that the newest checkpoint of the job has under its name, even if
        it was fitted to other data: the model was trained with those. Trainers save the statistics of
        transforms that were passed to `read` before `serve`, `epochs` or `send`.

        Args:
            data: What to read, as of `kv.data.read`.
            batch_size: How many samples make a batch.
            **options: Further arguments of `kv.data.read`.

        Returns:
            The data, for `serve`.
        """
        self._use(options.get("transform"))
        if isinstance(self._service, EpochService):
            options |= {"rank": self.index, "world_size": self.count}
        opened = read(data, batch_size, **options)
        self._columns = {**opened.column_kinds(), **self._columns}
        return opened

    def serve(self, batches: Batches) -> None:
        """Send all batches of as many epochs as trainers ask for.

        It usually runs until the process ends.

        Args:
            batches: The result of `read`; or something that gives an epoch each time it is iterated; or a
                function from the number of an epoch to its batches. Without `state_dict` and
                `load_state_dict` it must give the same batches every time. In a job with `sharding: dynamic`
                it must be the result of `read`.
        """
        self._started = True
        if isinstance(self._service, TaskService):
            if not isinstance(batches, SharedData):
                raise TypeError(
                    "A loader of a job with sharding: dynamic reads the records that trainers have leased: "
                    f"expected data.serve(data.read(…)), got {type(batches).__name__}. For batches that a "
                    "program makes itself, use sharding: static."
                )
            self._use(batches.transform)
            self._service.offer(batches, self._statistics())
            self._service.wait_until_closed()
            return
        with self._reporting():
            self._use(getattr(batches, "transform", None))
            serve(self._service, batches, self._statistics())

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs that trainers ask for, each as soon as it is requested.

        The same number comes again if an epoch has to be sent again, because a loader or a trainer was
        replaced. An epoch must then repeat the same batches.

        Returns:
            An iterator of numbers.

        Raises:
            RuntimeError: The epoch was begun by `serve`, from whose position such a program cannot continue.
        """
        service = self._epoch_service("epochs")
        service.identify(None, self._statistics())
        while (start := service.begin()) is not None:
            if start.index:  # the position is of a program that had positions
                raise RuntimeError(
                    f"A loader with positions started epoch {start.epoch}. A program that sends batches "
                    "itself cannot continue it: restart the epoch, or use a loader that reads data."
                )
            self._started = self._open = True
            yield start.epoch
            self.end()

    def send(self, batch: Mapping[str, Any], meta: Any = None) -> bool:
        """Send the next batch of the epoch.

        It waits while the queue of its trainer is full.

        Args:
            batch: The batch; it must not be changed afterwards.
            meta: A value of JSON, which becomes `meta` of the trainer's batch.

        Returns:
            False if further batches are not needed, because this or another epoch has to be sent again.
        """
        service = self._epoch_service("send")
        checked = as_batch(batch)
        if not self._open:
            self._begin_once(service)
        if service.send(checked, None, meta):
            return True
        if self._once:
            self._require_restart()
        return False

    def end(self) -> None:
        """End the epoch: it has no more batches."""
        service = self._epoch_service("end")
        if not self._open and not self._once:
            self._begin_once(service)
        if self._open:
            self._open = False
            if not service.end() and self._once:
                self._require_restart()

    def close(self) -> None:
        """End the epoch, wait until trainers need no more, and stop serving.

        Raises:
            ValueError: Nothing was served.
        """
        if isinstance(self._service, TaskService):
            self._leave()
            if not self._started:
                raise ValueError(
                    "The program of a loader has ended and served no data: expected data.serve(data.read(…))."
                )
            return
        try:
            with self._reporting():
                if self._open or not self._started:
                    self.end()
                self._service.finish()
                if not self._service.wait_until_left():
                    self._require_restart()
        finally:
            self._leave()

    def __enter__(self) -> LoaderContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._report(error)
            self._leave()

    def _epoch_service(self, method: str) -> EpochService:
        if isinstance(self._service, TaskService):
            raise ValueError(
                f"data.{method} sends batches that a program makes itself, but trainers of a job with "
                "sharding: dynamic lease records: expected data.serve(data.read(…)), or sharding: static."
            )
        return self._service

    def _use(self, transform: object) -> None:
        """Load the checkpoint's statistics into a transform, and report them to trainers."""
        if not has_state(transform):
            return
        self._saved.give(transform)
        statistics = self._service.statistics
        if statistics is None:
            if all(transform is not transform_ for transform_ in self._transforms):
                self._transforms.append(transform)
        elif LoaderStatistics.of([transform]).digests.items() - statistics.digests.items():
            raise ValueError(
                f"Trainers do not know the statistics of transform '{name_of(transform)}': expected "
                "data.read(…, transform=…) with it before data.serve, data.epochs or the first data.send, so "
                "that checkpoints have them."
            )

    def _statistics(self) -> LoaderStatistics:
        for transform in self._transforms:
            self._saved.give(transform)  # the program may have called fit since
        return LoaderStatistics.of(self._transforms, self._columns)

    def _reporting(self) -> ExitStack:
        """Reports errors inside of it to trainers."""
        stack = ExitStack()
        stack.push(lambda kind, error, trace: self._report(error))
        return stack

    def _report(self, error: BaseException | None) -> None:
        if isinstance(self._service, TaskService):
            return  # the launcher reports it: this process ends with it
        if isinstance(error, Exception) and not isinstance(error, _RestartRequiredError):
            self._service.fail(error)
            self._service.wait_until_reported(_REPORT_WITHIN)

    def _begin_once(self, service: EpochService) -> None:
        if self._once:
            raise RuntimeError("expected batches of one epoch, got one after its end; see `epochs`.")
        self._started = self._once = self._open = True
        service.identify(None, self._statistics())
        service.begin_once()

    def _require_restart(self) -> None:
        if not self._ended.is_set():
            raise _RestartRequiredError(
                f"{self._service.name} has to send its epoch again, which takes a new process of its "
                "program: a launched job starts it. With `for epoch in data.epochs()` no restart is needed."
            )

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        self._ended.set()
        self._stack.close()


class _RestartRequiredError(RuntimeError):
    """The program has to be restarted."""


def _service(
    settings: RoleSettings,
    leased: bool,
    queue: int = 8,
    workers: Sequence[IdReceiver] | None = None,
    split: SplitIds = split_by_name,
) -> EpochService | TaskService:
    """The service of a loader; workers: by default those of the launched job."""
    if queue < 2:
        raise ValueError(f"queue must be at least 2 batches for each trainer, got {queue}.")
    if workers is None:
        workers = workers_from_environment(ANSWER_WITHIN) if leased else workers_from_environment()
    if leased:
        return TaskService(settings.job.index, workers=workers, split=split)
    index, count, generations = settings.job.index, settings.job.count, generations_of(settings)
    return EpochService(index, count, queue=queue, generations=generations, workers=workers, split=split)


# The built-in loader: reads the `data` of the job, for as many epochs as trainers ask for.
#
# | key of `data` | meaning | default |
# |---|---|---|
# | files, or train | paths, folders, globs, URLs | required |
# | batch_size | | 4096 |
# | columns | names, or mappings with `name`, `kind` (fixed, varlen, raw) and its arguments | all |
# | others of `kv.data.read` | format, options, shuffle, seed, drop_remainder, workers, prefetch, … | |
#
# Keys that begin with `eval` are for trainers.


_OF_LOADER = ("data", "rank", "world_size", "epochs", "steps_per_epoch", "transform", "filesystem", "device")


def make(settings: RoleSettings) -> Service:
    """The loader of a process; see `karvan/cluster/role_process.py`."""
    source = read_share(_data(), settings.job.index, settings.job.count)
    source.identity()  # reads a little of each file, so that an unreadable one is an error at once
    statistics = LoaderStatistics.of((), source.column_kinds())
    service = _service(settings, isinstance(source, SharedData))
    if isinstance(service, TaskService):
        assert isinstance(source, SharedData)
        service.offer(source, statistics)
        return service

    def run() -> None:
        while not service.closed:
            try:
                serve(service, source, statistics)
            except Exception as error:
                if code_of(error) in (DAMAGED, TEMPORARY):
                    _log.error("%s could not continue reading: %s", service.name, text_of(error))
                else:
                    _log.exception("%s could not continue reading", service.name)
                service.fail(error)

    threading.Thread(target=run, name="karvan-reading", daemon=True).start()
    return service


def read_share(data: Mapping[str, Any], index: int, count: int) -> Loader | SharedData:
    """What loader `index` of `count` reads; a ValueError says what is wrong with `data`.

    In a job with `sharding: dynamic` every loader can read all of it.
    """
    options = {name: value for name, value in data.items() if not name.startswith("eval")}
    file_keys = [name for name in ("files", "train") if name in options]
    if len(file_keys) != 1:
        raise ValueError(f"data of a job with loaders expects files, or train, got: {', '.join(data)}.")
    files = options.pop(file_keys[0])
    batch_size = options.pop("batch_size", 4096)
    allowed = [name for name in inspect.signature(read).parameters if name not in _OF_LOADER]
    for name in options:
        if name in ("features", "transform"):
            raise ValueError(
                f"data of a job has no '{name}': features are a part of the model, or of a loader's own "
                "program, kv.LoaderContext().read(…, transform=engine); see docs/loaders.md."
            )
        if name not in allowed:
            raise ValueError(f"data expects keys of files, {', '.join(allowed)}, got '{name}'.")
    if options.get("columns") is not None:
        options["columns"] = [column_from_settings(column) for column in options["columns"]]
    try:
        if is_leased():
            return read(files, batch_size, **options)
        return read(files, batch_size, rank=index, world_size=count, **options)
    except TypeError as error:
        raise ValueError(f"data: {error}") from error


def _data() -> Mapping[str, Any]:
    text = JobEnvironment.read().data
    try:
        data = json.loads(text) if text else None
    except ValueError as error:
        raise ValueError(f"KARVAN_DATA expects JSON, got {text[:100]!r}.") from error
    if not isinstance(data, dict):
        raise ValueError("A loader without a program expects `data` of the job (KARVAN_DATA), got none.")
    return data
