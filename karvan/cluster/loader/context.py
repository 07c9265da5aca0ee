"""`LoaderContext`: the program of a loader.

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
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

from karvan.checkpoint.transforms import has_state, name_of
from karvan.cluster.embedding_worker.client import workers_from_environment
from karvan.cluster.loader.epoch_source import Batches, as_batch, serve
from karvan.cluster.loader.id_forwarding import ANSWER_WITHIN, IdReceiver, SplitIds, split_by_name
from karvan.cluster.loader.service import LoaderService
from karvan.cluster.loader.statistics import LoaderStatistics, SavedStatistics
from karvan.cluster.loader.task_service import TaskReadingService
from karvan.cluster.role_process import RoleSettings, generations_of, listening
from karvan.data import Loader, SharedData, read
from karvan.data.columns.kinds import ColumnKind
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role

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
        self._settings = settings = settings or RoleSettings.from_environment(Role.LOADER)
        self.index = settings.index
        self.count = settings.count
        self._reading: TaskReadingService | None = None
        leased = JobEnvironment.read().sharding == "dynamic"
        if workers is None:
            workers = workers_from_environment(ANSWER_WITHIN) if leased else workers_from_environment()
        self._service = LoaderService(
            settings.index,
            settings.count,
            queue=queue,
            generations=generations_of(settings),
            workers=workers,
            split=split,
        )
        if leased:
            self._reading = TaskReadingService(settings.index, workers=workers, split=split)
        self._transforms: list[object] = []  # with statistics
        self._columns: dict[str, ColumnKind] = {}
        self._saved = SavedStatistics(JobEnvironment.read().checkpoints)
        self._started = False
        self._once = False  # whether batches are sent outside of `epochs`
        self._open = False  # whether an epoch has started and not ended
        self._ended = threading.Event()
        self._stack = ExitStack()
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._terminate)
            self._stack.callback(signal.signal, signal.SIGTERM, before)
        self._stack.enter_context(listening(self._reading or self._service, settings, self._ended))
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
        if self._reading is None:
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
        if self._reading is not None:
            self._serve_tasks(self._reading, batches)
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
        self._require_fixed_shares("epochs")
        self._service.identify(None, self._statistics())
        while (start := self._service.begin()) is not None:
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
        self._require_fixed_shares("send")
        checked = as_batch(batch)
        if not self._open:
            self._begin_once()
        if self._service.send(checked, None, meta):
            return True
        if self._once:
            self._require_restart()
        return False

    def end(self) -> None:
        """End the epoch: it has no more batches."""
        self._require_fixed_shares("end")
        if not self._open and not self._once:
            self._begin_once()
        if self._open:
            self._open = False
            if not self._service.end() and self._once:
                self._require_restart()

    def close(self) -> None:
        """End the epoch, wait until trainers need no more, and stop serving.

        Raises:
            ValueError: Nothing was served.
        """
        if self._reading is not None:
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
            if isinstance(error, Exception):
                self._report(error)
            self._leave()

    def _serve_tasks(self, reading: TaskReadingService, data: object) -> None:
        if not isinstance(data, SharedData):
            raise TypeError(
                "A loader of a job with sharding: dynamic reads the records that trainers have leased: "
                f"expected data.serve(data.read(…)), got {type(data).__name__}. For batches that a program "
                "makes itself, use sharding: static."
            )
        self._use(data.transform)
        reading.offer(data, self._statistics())
        reading.wait_until_closed()

    def _require_fixed_shares(self, method: str) -> None:
        if self._reading is not None:
            raise ValueError(
                f"data.{method} sends batches that a program makes itself, but trainers of a job with "
                "sharding: dynamic lease records: expected data.serve(data.read(…)), or sharding: static."
            )

    def _use(self, transform: object) -> None:
        """Load the checkpoint's statistics into a transform, and report them to trainers."""
        if not has_state(transform):
            return
        self._saved.give(transform)
        known = (self._reading or self._service).statistics
        if known is None:
            if all(transform is not one for one in self._transforms):
                self._transforms.append(transform)
        elif LoaderStatistics.of([transform]).digests.items() - known.digests.items():
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
        if self._reading is not None:
            return  # the launcher reports it: this process ends with it
        if isinstance(error, Exception) and not isinstance(error, _RestartRequiredError):
            self._service.fail(error)
            self._service.wait_until_reported(_REPORT_WITHIN)

    def _begin_once(self) -> None:
        if self._once:
            raise RuntimeError("expected batches of one epoch, got one after its end; see `epochs`.")
        self._started = self._once = self._open = True
        self._service.identify(None, self._statistics())
        self._service.begin_once()

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

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        sys.exit(0)


class _RestartRequiredError(RuntimeError):
    """The program has to be restarted."""
