"""`Checkpoints`: the checkpoints of a run, one folder each, and which of them are retained."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from karvan import distributed
from karvan.checkpoint.atomic_folder import remove_folders, try_writing
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError, together
from karvan.checkpoint.files import lease_object, upload
from karvan.checkpoint.manifest import Base, is_taken
from karvan.checkpoint.recovery import newest_step, resume
from karvan.checkpoint.safetensors_file import WRITERS
from karvan.checkpoint.survey import (
    all_chosen,
    best_of,
    chosen,
    find_alone,
    folders,
    is_checkpoint,
    newest,
    one_chosen,
    readable,
    step_of,
)
from karvan.checkpoint.table_files import Model, tables_of
from karvan.checkpoint.writer import (
    Pending,
    Report,
    Versions,
    Writing,
    capture_on_all,
    check_target,
    check_writers,
    explaining,
)
from karvan.embedding import TableHandle
from karvan.job.checkpoint_url import address_of, local_path, shown
from karvan.owner import check_owner
from karvan.store import Store

_log = logging.getLogger(__name__)

T = TypeVar("T")

PART_BYTES = 64 << 20
HISTORY = "history.jsonl"  # a Trainer writes it beside its checkpoints


class Checkpoints:
    """A folder of checkpoints: `step-000000001000`, ….

    Several processes may read the folder while one writes to it. The ranks of a job write together: all
    create a `Checkpoints` and call the same methods, each with its rows, on storage that all of them share.
    Older checkpoints are removed when a new one is complete.

    Args:
        folder: The folder, or a URL. It is created by the first save.
        keep_last: How many to keep, the newest; None keeps all.
        keep_best: A metric's name and "max" or "min". The best checkpoint by it is kept as well.
        full_every: Every so many checkpoints, one is full; the others have what changed since the one before.
            The first save of a `Checkpoints` is full. The checkpoints that a kept one builds on are kept,
            too.
        part_bytes: How large the files of a table may become.
        writers: How many threads of each process write files. More are faster where the storage takes long
            for a file, and hold `part_bytes` of memory each.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> checkpoints = kv.Checkpoints("run", keep_last=2)
        >>> saved = checkpoints.save(1, {"lr": 0.1}, engine, block=True)
        >>> checkpoints.latest().step
        1
        >>> checkpoint, state = checkpoints.resume(engine)
        >>> state
        {'lr': 0.1}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: tuple[str, str] | None = None,
        full_every: int = 1,
        part_bytes: int = PART_BYTES,
        writers: int = WRITERS,
    ) -> None:
        check_writers("Checkpoints", writers)
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"Checkpoints expects keep_last of at least 1, or None, got {keep_last}.")
        if full_every < 1:
            raise ValueError(f"Checkpoints expects full_every of at least 1, got {full_every}.")
        if part_bytes < 1:
            raise ValueError(f"Checkpoints expects part_bytes of at least 1, got {part_bytes}.")
        if keep_best is not None and (len(keep_best) != 2 or keep_best[1] not in ("max", "min")):
            raise ValueError(f'Checkpoints expects keep_best as ("auc", "max") or "min", got {keep_best!r}.')
        self.folder = local_path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.full_every = full_every
        self.part_bytes = part_bytes
        self.writers = writers
        self._pending: Pending | None = None
        self._last: _Last | None = None  # the checkpoint that a delta can build on
        self._later_reported = False

    def __repr__(self) -> str:
        options = {"keep_last": self.keep_last, "keep_best": self.keep_best, "full_every": self.full_every}
        defaults = {"keep_best": None, "full_every": 1}
        texts = [f"{name}={value!r}" for name, value in options.items() if defaults.get(name, "") != value]
        steps = [path.name.removeprefix("step-").lstrip("0") or "0" for path in folders(self.folder)]
        more = "… " if len(steps) > 5 else ""
        saved = f"{len(steps)} of steps {more}{', '.join(steps[-5:])}" if steps else "none yet"
        return f"Checkpoints({shown(self.folder)!r}, {', '.join(texts)}: {saved})"

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        model: Model,
        *,
        metrics: Mapping[str, Any] | None = None,
        block: bool = False,
        report: Report | None = None,
    ) -> Pending:
        """Save a state and the model's tables as they are now.

        Training may continue while they are written.

        It waits for a save in flight first. If that has failed, and the error was not raised yet, it is
        raised here.

        Args:
            step: The step, which names the checkpoint.
            state: A tree of dicts, lists, numbers, strings and tensors.
            model: The model; its tables are saved.
            metrics: Numbers of this step, for `keep_best`.
            block: Whether to return when the checkpoint is complete.
            report: Called with the step and the error as soon as writing has failed, on rank 0 and on any
                thread. By default the error is logged.

        Returns:
            The save, which can be waited for.

        Raises:
            CheckpointError: The folder cannot be written, or ranks save different steps.
            ValueError: The step is negative.
        """
        if step < 0:
            raise ValueError(f"Expected a step of at least 0, got {step}.")
        channel = distributed.current().here
        target = self.folder / f"step-{step:012d}"
        tables: dict[str, TableHandle] = {}

        def prepare() -> tuple[int, bool]:
            self.wait()
            tables.update(tables_of(model))
            if channel.rank == 0:
                check_owner(self.folder, lease_object(self.folder))
            return step, self._may_be_delta(step, tables, target if channel.rank == 0 else None)

        ranks = together(channel, target, explaining(target, prepare))
        if len({its_step for its_step, _ in ranks}) > 1:
            raise CheckpointError.mismatch(
                self.folder, "all ranks to save the same step", [its_step for its_step, _ in ranks]
            )

        take = partial(
            Writing,
            *(state, tables),
            step=step,
            metrics=metrics,
            part_bytes=self.part_bytes,
            track=self.full_every > 1,
            writers=self.writers,
        )
        # Until this save is complete there is nothing to build on: a save after a failure is full.
        last, self._last = self._last, None
        writing = None
        if last is not None and all(may for _, may in ranks):
            writing = capture_on_all(channel, target, partial(_delta, take, last))
        if writing is None:
            writing = capture_on_all(channel, target, take)
        assert writing is not None
        base, versions = writing.base, writing.versions

        def check() -> None:
            # A process that was paused while it wrote may have lost the folder.
            check_owner(self.folder, lease_object(self.folder))
            if base is not None and not _is(self.folder, base):
                raise CheckpointError(
                    target,
                    f"expected its base {base.folder} to stay while it was written, but it was removed.",
                )

        def after(checkpoint: Checkpoint) -> None:
            deltas = last.deltas + 1 if last is not None and base is not None else 0
            stores = {name: handle.store for name, handle in tables.items()}
            self._last = _Last(checkpoint, stores, versions, deltas)

        self._pending = writing.start(target, check, after, partial(self._prune, target), report)
        if block:
            self._pending.wait()
        return self._pending

    def _may_be_delta(self, step: int, tables: Mapping[str, TableHandle], target: Path | None) -> bool:
        """Whether a delta may build on the last save; target: given on the rank that checks the folder."""
        last = self._last
        return (
            last is not None
            and last.deltas + 1 < self.full_every
            and last.checkpoint.step < step
            and last.describes(tables)
            and (target is None or (_is(self.folder, last.base) and not is_taken(target)))
        )

    def require_writable(self) -> None:
        """Check that the folder can be written, and create it if necessary.

        All ranks call it together.

        Raises:
            CheckpointError: A rank or a parameter server cannot write there.
        """
        connection = distributed.current()

        def try_all() -> None:
            try_writing(self.folder)
            if connection.servers is not None and connection.rank == 0:
                try:
                    connection.servers.check_folder(address_of(self.folder))
                except ValueError as error:
                    raise CheckpointError(self.folder, str(error)) from None

        together(connection.here, self.folder, try_all)

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: The save has failed, and the error was not raised before.
        """
        if self._pending is not None:
            self._pending.settle()

    def list(self) -> list[Checkpoint]:
        """List the checkpoints with readable manifests, oldest first.

        Returns:
            The checkpoints.
        """
        return all_chosen(self.folder, lambda: readable(self.folder))

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint.

        Returns:
            The checkpoint; None if there is none.

        Raises:
            CheckpointError: Its manifest is damaged.
        """
        return one_chosen(self.folder, lambda: newest(self.folder))

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, intact or damaged.

        Returns:
            The step; None if there is no checkpoint.
        """
        return newest_step(self.folder)

    def resume(self, model: Model, name: str | None = None) -> tuple[Checkpoint, dict[str, Any]] | None:
        """Load the newest intact checkpoint.

        Damaged ones are renamed to damaged-step-…, with a warning. If all are damaged, nothing is renamed.

        Args:
            model: The model; its tables get the rows.
            name: A checkpoint, such as "step-000000001000". Only this one is loaded, and those of later steps
                are renamed to abandoned-step-….

        Returns:
            The checkpoint and its state; None if there is none.

        Raises:
            CheckpointError: All checkpoints are damaged, or none fits the model.
        """
        return self.resume_with(lambda checkpoint: checkpoint.load(model), name)

    def resume_with(
        self, load: Callable[[Checkpoint], T], name: str | None = None
    ) -> tuple[Checkpoint, T] | None:
        """Load the newest intact checkpoint by a function of your own, as `resume` does.

        Args:
            load: A function that loads a checkpoint. It is called for an older one if it raises a
                DamagedCheckpointError.
            name: As of `resume`.

        Returns:
            The checkpoint, and what the function returned; None if there is none.
        """
        return resume(self.folder, load, name)

    def best(self) -> Checkpoint | None:
        """Return the best checkpoint by `keep_best`, the newest of equal ones.

        Returns:
            The checkpoint; None if none has the metric.

        Raises:
            ValueError: There is no `keep_best`.
        """
        if self.keep_best is None:
            raise ValueError('Checkpoints was created without keep_best: expected ("auc", "max"), got None.')
        metric, mode = self.keep_best
        return one_chosen(self.folder, lambda: best_of(readable(self.folder), metric, mode))

    def _prune(self, path: Path) -> None:
        try:
            upload(self.folder / HISTORY)
        except OSError as error:
            _log.warning("%s could not be uploaded; the next save tries again: %s", HISTORY, error)
        try:
            self._remove_old(path)
        except CheckpointError as error:  # of a store; the save is complete
            _log.warning("Old checkpoints could not be removed; the next save tries again: %s", error)

    def _remove_old(self, newest: Path) -> None:
        later = [path.name for path in folders(self.folder) if step_of(path) > step_of(newest)]
        if later and not self._later_reported:
            self._later_reported = True
            _log.warning(
                "%s has checkpoints of later steps than the one just saved, %s: %s. The next resume takes "
                "the newest of them, unless you move them to another folder.",
                shown(self.folder),
                newest.name,
                ", ".join(later),
            )
        if (keep_last := self.keep_last) is not None:
            remove_folders(self.folder, lambda: _doomed(self.folder, keep_last, self.keep_best, newest))


class _Last(NamedTuple):
    """The newest checkpoint this process has saved, as a base for deltas."""

    checkpoint: Checkpoint
    stores: Mapping[str, Store]  # of its tables
    versions: Versions
    deltas: int  # since the last full one

    @property
    def base(self) -> Base:
        """The checkpoint as a delta names it."""
        manifest = self.checkpoint.manifest
        return Base(self.checkpoint.path.name, manifest.step, manifest.id, manifest.checksum)

    def describes(self, tables: Mapping[str, TableHandle]) -> bool:
        """Whether these are the tables that were saved, with the same kind of rows."""
        saved = self.checkpoint.manifest.tables
        return self.stores.keys() == tables.keys() and all(
            handle.store is self.stores[name]
            and handle.optimizer == saved[name].optimizer
            and len(handle.initial_state) == saved[name].state
            for name, handle in tables.items()
        )


def _delta(take: Callable[..., Writing], last: _Last) -> Writing | None:
    """The result of `take` for a delta; None if a table does not know what changed."""
    try:
        return take(base=last.base, since=last.versions)
    except ValueError:
        return None


def _is(folder: Path, base: Base) -> bool:
    try:
        manifest = Checkpoint(folder / base.folder).manifest
    except CheckpointError:
        return False
    return (manifest.id, manifest.checksum) == (base.id, base.checksum)


def _doomed(
    folder: Path, keep_last: int, keep_best: tuple[str, str] | None, newest: Path
) -> dict[Path, Path | None]:
    """The checkpoints to remove, the newest first, each with its base; `newest`, just saved, stays."""
    checkpoints = readable(folder)
    retained = [*checkpoints[-keep_last:], *(saved for saved in checkpoints if saved.path == newest)]
    if keep_best and (best := best_of(checkpoints, *keep_best)):
        retained.append(best)
    needed: set[Path] = set()
    for checkpoint in retained:
        needed.add(checkpoint.path)
        try:
            needed |= {below.path for below in checkpoint.chain}
        except CheckpointError:
            continue  # its base is missing already
    # Folders that cannot be read may belong to somebody else: they stay. The newest first: a delta must not
    # outlive what it builds on, even if this process is killed in between.
    doomed: dict[Path, Path | None] = {}
    for checkpoint in reversed(checkpoints):
        if checkpoint.path not in needed:
            base = checkpoint.manifest.base
            doomed[checkpoint.path] = None if base is None else folder / Path(base.folder).name
    return doomed


# Saves one checkpoint at a given path, and finds one at a path.


def start(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    model: Model = None,
    *,
    step: int = 0,
    metrics: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
    writers: int = WRITERS,
) -> Pending:
    """Start to save a full checkpoint, and write it while training continues.

    All ranks of a job call it.

    Args:
        path: The checkpoint's folder, or a URL. A checkpoint that is there already is replaced.
        state: A tree of dicts, lists, numbers, strings and tensors.
        model: The model; its tables are saved.
        step: The step of the checkpoint.
        metrics: Numbers of this step.
        part_bytes: How large the files of a table may become.
        writers: How many threads write files.

    Returns:
        The save, which can be waited for.

    Raises:
        CheckpointError: The folder cannot be written.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> pending = kv.checkpoint.start("twelve", {}, engine, step=3)
        >>> pending.wait().step
        3
    """
    check_writers("A save", writers)
    target = Path(os.path.abspath(local_path(path)))
    channel = distributed.current().here

    def take() -> Writing:
        if channel.rank == 0:
            check_target(target)
        return Writing(
            state, tables_of(model), step=step, metrics=metrics, part_bytes=part_bytes, writers=writers
        )

    writing = capture_on_all(channel, target, take)
    assert writing is not None
    return writing.start(target)


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    model: Model = None,
    *,
    step: int = 0,
    metrics: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
    writers: int = WRITERS,
) -> Checkpoint:
    """Save a full checkpoint and wait until it is complete.

    All ranks of a job call it.

    Args:
        path: The checkpoint's folder, or a URL. A checkpoint that is there already is replaced.
        state: A tree of dicts, lists, numbers, strings and tensors.
        model: The model; its tables are saved.
        step: The step of the checkpoint.
        metrics: Numbers of this step.
        part_bytes: How large the files of a table may become.
        writers: How many threads write files.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: The folder cannot be written.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> kv.checkpoint.save("thirteen", {"lr": 0.1}, engine).state()
        {'lr': 0.1}
    """
    return start(
        path, state, model, step=step, metrics=metrics, part_bytes=part_bytes, writers=writers
    ).wait()


def resume_at(
    path: str | os.PathLike[str] | Checkpoint, load: Callable[[Checkpoint], T]
) -> tuple[Checkpoint, T]:
    """Load a checkpoint, or the newest intact one of a run's folder, by a function.

    All ranks call it.

    Args:
        path: The checkpoint, or the run's folder.
        load: A function that loads a checkpoint.

    Returns:
        The checkpoint, and what the function returned.

    Raises:
        CheckpointError: There is no intact checkpoint.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.checkpoint.save("fourteen", {"lr": 0.1}, engine)
        >>> checkpoint, state = kv.checkpoint.resume_at(
        ...     "fourteen", lambda checkpoint: checkpoint.load(engine)
        ... )
        >>> state
        {'lr': 0.1}
    """
    if isinstance(path, Checkpoint):
        return path, load(path)
    folder = local_path(path)
    if not is_checkpoint(folder):
        resumed = resume(folder, load)
        if resumed is not None:
            return resumed
    newest = find(folder)
    return newest, load(newest)


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at a path, or the newest one of a run's folder.

    All ranks call it.

    Args:
        path: The checkpoint, or the run's folder.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: There is none.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> saved = kv.Checkpoints("fifteen").save(5, {}, engine, block=True)
        >>> kv.checkpoint.find("fifteen").step
        5
    """
    folder = local_path(path)
    return chosen(folder, lambda: find_alone(folder))
