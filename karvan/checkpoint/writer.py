"""Writes one checkpoint: captures the state at the call, writes it on threads.

At the call the tables are captured and the dense state is copied. The saving thread then asks the capture for
one part after the other; a few writing threads take checksums and write, so that some compute while others
wait for the disk. The manifest comes last, then the folder's name.

The ranks of a job do this together, on their saving threads. Rank 0 creates the hidden folder and sends its
name; all write what they own into it; rank 0 receives a list of their files, adds the dense state and the
manifest, and publishes. After each of these steps all ranks know whether it succeeded on all; if not, all
fail and nothing is published. If a rank dies, the others raise a RankError; the folder then stays hidden.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from karvan import distributed
from karvan.checkpoint import manifest as manifests
from karvan.checkpoint.atomic_folder import HiddenFolder, UploadFolder, new_folder
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError, together
from karvan.checkpoint.files import has_file, is_there
from karvan.checkpoint.manifest import Base, Manifest
from karvan.checkpoint.safetensors_file import MOST_WRITERS, WRITERS, FileEntry, Throttle, Writers
from karvan.checkpoint.state_tree import encode
from karvan.checkpoint.table_files import DENSE, ShareSource, joined, own_extra, parts_for, put_table
from karvan.distributed import CollectiveChannel
from karvan.distributed.collectives import RankHeartbeats
from karvan.distributed.connection import IN_PROCESS
from karvan.embedding import TableHandle
from karvan.job.checkpoint_url import address_of, url_of
from karvan.store import Capture, SharedStore, Store

# A save in flight.

_log = logging.getLogger(__name__)


def check_writers(what: str, writers: int) -> None:
    """Raise unless so many threads can write."""
    if not 1 <= writers <= MOST_WRITERS:
        raise ValueError(f"{what} expects writers from 1 to {MOST_WRITERS}, got {writers}.")


Report = Callable[[int, BaseException], None]  # called with the step of a save that has failed, and its error


def log_failure(step: int, error: BaseException) -> None:
    """Report at once that a save has failed: the program may wait for it only much later."""
    _log.error("The checkpoint of step %d was not saved: %s", step, error)


def no_report(step: int, error: BaseException) -> None:
    """Report nothing: another rank does."""


class Pending:
    """A save in flight on its own threads.

    The program does not end before it has ended.

    It uses little of the machine while training continues, and all it can get once somebody waits for it.

    Args:
        step: The step of the checkpoint.
        work: What writes it.
        pace: What slows it down.
        report: Called with the step and the error if it fails; by default the error is logged.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> pending = kv.checkpoint.start("seventeen", {}, engine)
        >>> checkpoint = pending.wait()
        >>> pending.done(), pending.error
        (True, None)
    """

    def __init__(
        self, step: int, work: Callable[[], Checkpoint], pace: Throttle, report: Report | None = None
    ) -> None:
        self.step = step
        self._report = report or log_failure
        self._pace = pace
        self._work = work
        self._ended = threading.Event()
        self._result: Checkpoint | None = None
        self._error: BaseException | None = None
        self._error_raised = False  # or acknowledged
        # Not a daemon: the interpreter waits for it at its end.
        threading.Thread(target=self._run, name=f"karvan-save-{step}").start()

    @classmethod
    def failed(cls, step: int, error: BaseException) -> Pending:
        """Make a save that has failed before writing started.

        Args:
            step: The step of the checkpoint.
            error: Why it failed.

        Returns:
            The save.
        """
        save = cls.__new__(cls)
        save.step = step
        save._pace = Throttle()
        save._result, save._error, save._error_raised = None, error, False
        save._ended = threading.Event()
        save._ended.set()
        return save

    def _run(self) -> None:
        work, self._work = self._work, _nothing  # releases what it holds when it has ended
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
            self._report(self.step, error)
        finally:
            del work
            self._ended.set()

    def done(self) -> bool:
        """Check whether it has ended, successfully or not.

        Returns:
            Whether it has.
        """
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is in flight, and if it succeeded."""
        return self._error

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is complete.

        Args:
            timeout: How many seconds to wait; None for no limit.

        Returns:
            The checkpoint.

        Raises:
            TimeoutError: It is not complete yet.
            CheckpointError: The save has failed.
        """
        self._pace.hurry()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The checkpoint of step {self.step} is not complete after {timeout} seconds.")
        if self._error is not None:
            self._error_raised = True
            raise self._error
        assert self._result is not None
        return self._result

    def join(self) -> None:
        """Wait until it has ended, successfully or not."""
        self._pace.hurry()
        self._ended.wait()

    def acknowledge(self) -> None:
        """Say that the error has been handled: `settle` does not raise it any more."""
        self._error_raised = True

    def settle(self) -> None:
        """Wait until it has ended.

        Raises:
            CheckpointError: The save has failed, and the error was not raised before.
        """
        self.join()
        if self._error is not None and not self._error_raised:
            self.wait()


def _nothing() -> Checkpoint:
    raise AssertionError("a save runs once")


Versions = dict[str, int]
T = TypeVar("T")


class Writing:
    """This rank's part of a checkpoint, held until it is written.

    since: the tables' versions of an earlier one, to write only what changed after it (a delta on `base`); a
    ValueError says that this is not known any more, and nothing is held then.
    track: whether tables record what changes, for a delta on this one.
    writers: how many threads of each process write files.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        tables: Mapping[str, TableHandle],
        *,
        step: int,
        metrics: Mapping[str, Any] | None,
        part_bytes: int,
        base: Base | None = None,
        since: Versions | None = None,
        track: bool = False,
        writers: int = WRITERS,
    ) -> None:
        self.step = step
        self._pace = Throttle()
        self._writer_count = writers
        self._writers: Writers | None = None
        self.base = base
        self._connection = distributed.current()
        rank, world = self._connection.rank, self._connection.world_size
        # Dense state is the same on all ranks.
        self._tree, self._dense = encode(dict(state) if rank == 0 else {})
        self._metrics, tensors = encode(dict(metrics or {}))
        if tensors:
            raise TypeError(
                f"Expected metrics that are numbers or text, got a tensor as '{next(iter(tensors))}'."
            )
        _check_shares(tables, rank, world)
        self.versions: Versions = {}
        self._captures: dict[str, Capture] = {}
        parts = {name: parts_for(handle, part_bytes) for name, handle in tables.items()}
        try:
            for store, names in _by_store(tables).items():
                versions = None if since is None else {name: since[name] for name in names}
                capture = store.capture(names, {name: parts[name] for name in names}, versions, track=track)
                self._captures |= dict.fromkeys(names, capture)
                self.versions |= capture.versions
            self._parts = parts
            self._handles = dict(tables)
            self._sources = {
                name: ShareSource(
                    handle.spec,
                    handle.optimizer,
                    self._captures[name],
                    parts[name],
                    own_extra(handle.store.table(name).extra(), rank, world),
                    base is not None,
                    rank,
                    world,
                )
                for name, handle in tables.items()
                if not isinstance(handle.store, SharedStore)
            }
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the captures."""
        for capture in self._captures.values():
            capture.close()

    def start(
        self,
        target: Path,
        check: Callable[[], None] = lambda: None,
        after: Callable[[Checkpoint], None] = lambda _: None,
        prune: Callable[[], None] = lambda: None,
        report: Report | None = None,
    ) -> Pending:
        """Write to `target` on threads.

        check: runs just before the folder gets its name, on rank 0. after: runs when it has, on all ranks.
        prune: runs last, on rank 0. report: called at once after a failure, on rank 0; by default logs it.
        """

        def work() -> Checkpoint:
            try:
                with self._connection.on("save") as channel:
                    checkpoint = self._write(channel, target, check)
                    after(checkpoint)
                    together(channel, target, prune if channel.rank == 0 else lambda: None)
                    return checkpoint
            finally:
                self._end()

        try:
            self._connection.join_save()  # messages of two saves would be mixed up
            self._writers = Writers(self._writer_count, self._pace)
            report = report if self._connection.rank == 0 else no_report
            pending = Pending(self.step, work, self._pace, report)
        except BaseException:  # no thread could be started
            self._end()
            raise
        if self._connection.settings.kind not in IN_PROCESS:
            self._connection.join_save = pending.join
        return pending

    def _end(self) -> None:
        if self._writers is not None:
            self._writers.end()
        self.close()

    def _write(self, channel: CollectiveChannel, target: Path, check: Callable[[], None]) -> Checkpoint:
        hidden: HiddenFolder | UploadFolder | None = None

        def begin() -> str:
            nonlocal hidden
            if channel.rank == 0:
                hidden = new_folder(target)
            return str(hidden.path.relative_to(target.parent)) if hidden else ""

        dense: list[FileEntry] = []
        rounds = RankHeartbeats(channel, self._connection.settings.timeout)

        def put() -> dict[str, Any]:
            assert self._writers is not None
            try:
                return self._put(channel, folder, self._writers, rounds, dense)
            finally:
                self._writers.end()
                rounds.finish()

        def publish() -> str:
            if hidden is None:
                return ""
            reports = {name: [it for share in shares for it in share.get(name, ())] for name in self._handles}
            manifest = Manifest(
                step=self.step,
                kind="full" if self.base is None else "delta",
                base=self.base,
                metrics=self._metrics,
                tables={
                    name: joined(folder, handle.spec, handle.optimizer, reports[name])
                    for name, handle in self._handles.items()
                },
                dense=dense[0],
                state=self._tree,
            )
            return hidden.complete(manifest, self._pace, check).decode()

        try:
            folder = target.parent / together(channel, target, explaining(target, begin))[0]
            shares = together(channel, target, explaining(target, put))
            text = together(channel, target, explaining(target, publish))[0]
        finally:
            if hidden is not None:
                hidden.remove()
        # Not read from the folder, which another process may have replaced or removed by now.
        return Checkpoint(target, manifests.parse(target / manifests.NAME, text.encode()))

    def _put(
        self,
        channel: CollectiveChannel,
        folder: Path,
        writers: Writers,
        rounds: RankHeartbeats,
        dense: list[FileEntry],
    ) -> dict[str, Any]:
        """Write this rank's files; returns a description of its tables."""
        if url_of(folder) is None and not folder.is_dir():
            raise CheckpointError(
                folder.parent,
                f"expected to see '{folder.name}', which rank 0 has created, got nothing: checkpoints must "
                "be on storage that all ranks share.",
            )

        if channel.rank == 0:
            writers.write(dense.append, folder, DENSE, self._dense)
        tables = {
            name: put_table(it, folder, writers, rounds.still_working) for name, it in self._sources.items()
        }
        shared = self._put_shared(folder, rounds) if channel.rank == 0 else {}
        writers.finish()
        return {**{name: [describe()] for name, describe in tables.items()}, **shared}

    def _put_shared(self, folder: Path, rounds: RankHeartbeats) -> dict[str, list[Any]]:
        """Have other processes write the tables that they hold; returns their reports, by table."""
        reports: dict[str, list[Any]] = {}
        for store, names in _by_store(self._handles).items():
            if not isinstance(store, SharedStore):
                continue
            tables = {
                name: {
                    "optimizer": self._handles[name].optimizer,
                    "parts": self._parts[name],
                    "delta": self.base is not None,
                    "base": None if self.base is None else self.base.id,
                }
                for name in names
            }
            shares = store.save_tables(
                self._captures[names[0]],
                address_of(folder),
                tables,
                rounds.still_working,
                writers=self._writer_count,
            )
            reports |= {name: [share[name] for share in shares] for name in names}
        return reports


def capture_on_all(
    channel: CollectiveChannel, target: Path, take: Callable[[], Writing | None]
) -> Writing | None:
    """The result of `take`, if it succeeded on all ranks; None if it is None on any of them."""
    writing: Writing | None = None
    complete = False

    def attempt() -> bool:
        nonlocal writing
        writing = take()
        return writing is not None

    try:
        complete = all(together(channel, target, attempt))
    finally:
        if not complete and writing is not None:
            writing.close()
    return writing if complete else None


def check_target(target: Path) -> None:
    """Raise if the target exists and is not a checkpoint: it would be lost."""
    if is_there(target) and not has_file(target / manifests.NAME):
        raise CheckpointError.mismatch(target, "a checkpoint to replace, or nothing", "something else")


def _check_shares(tables: Mapping[str, TableHandle], rank: int, world: int) -> None:
    for name, handle in tables.items():
        received = handle.store.share
        if received != (rank, world):
            raise ValueError(
                f"Expected table '{name}' to hold the share of rank {rank} of {world}, got the share of "
                f"rank {received[0]} of {received[1]}: create engines after kv.connect, and save while "
                "connected."
            )


def _by_store(tables: Mapping[str, TableHandle]) -> dict[Store, list[str]]:
    groups: dict[Store, list[str]] = {}
    for name, handle in tables.items():
        groups.setdefault(handle.store, []).append(name)
    return groups


def explaining(target: Path, work: Callable[[], T]) -> Callable[[], T]:
    """The same work; an OSError becomes a CheckpointError."""

    def explained() -> T:
        try:
            return work()
        except OSError as error:
            where = f" at {error.filename}" if error.filename else ""
            what = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                what += ", so it was not saved; earlier checkpoints are untouched"
            text = f"expected to write a checkpoint, got '{what}'{where}."
            # Any OSError is taken as temporary: the folder was writable when the fit started.
            raise CheckpointError(target, text, temporary=True) from error

    return explained
