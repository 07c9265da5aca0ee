"""`Checkpoints`: the checkpoints of a run, one folder each, of which the last and the best are kept."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.folder import remove_folders
from karvan.checkpoint.manifest import NAME, Base
from karvan.checkpoint.pending import Pending
from karvan.checkpoint.tables import Model, tables_of
from karvan.checkpoint.writing import Versions, Writing, check_target
from karvan.embedding import TableHandle

PART_BYTES = 64 << 20
_STEP = re.compile(r"^step-(\d{12,})$")


class Checkpoints:
    """A folder of checkpoints: `step-000000001000`, ….

    keep_last: how many to keep, the newest; None keeps all.
    keep_best: a metric's name and "max" or "min"; the best checkpoint by it is kept as well.
    full_every: n means one full checkpoint, then n - 1 deltas with what changed since the one before, and so
    on. What a kept delta builds on is kept. The first save of a `Checkpoints` is a full one.
    part_bytes: how large the files of a table may become.

    Several processes may read the folder while one writes to it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: tuple[str, str] | None = None,
        full_every: int = 1,
        part_bytes: int = PART_BYTES,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"Checkpoints expects keep_last of at least 1, or None, got {keep_last}.")
        if full_every < 1:
            raise ValueError(f"Checkpoints expects full_every of at least 1, got {full_every}.")
        if part_bytes < 1:
            raise ValueError(f"Checkpoints expects part_bytes of at least 1, got {part_bytes}.")
        if keep_best is not None and (len(keep_best) != 2 or keep_best[1] not in ("max", "min")):
            raise ValueError(f'Checkpoints expects keep_best as ("auc", "max") or "min", got {keep_best!r}.')
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.full_every = full_every
        self.part_bytes = part_bytes
        self._pending: Pending | None = None
        self._last: _Last | None = None  # what a delta can build on

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        model: Model,
        *,
        metrics: Mapping[str, Any] | None = None,
        block: bool = False,
    ) -> Pending:
        """Save the state and the model's tables as they are now; training may go on while it is written.

        A save that is under way is waited for first, and if it failed, and nobody has been told, its error
        is raised here. block: return when the checkpoint is complete.
        """
        if step < 0:
            raise ValueError(f"Expected a step of at least 0, got {step}.")
        self.wait()
        tables = tables_of(model)
        target = self.folder / f"step-{step:012d}"
        check_target(target)
        last = self._last
        writing = self._writing(step, state, tables, metrics, target)
        base = writing.base
        # A save that fails leaves nothing to build on.
        self._last = None

        def check() -> None:
            if base is not None and not _is(self.folder, base):
                raise CheckpointError(
                    target, f"expected its base {base.folder} to stay while it was written, but it has gone."
                )

        def after(made: Checkpoint) -> None:
            deltas = last.deltas + 1 if last is not None and base is not None else 0
            self._last = _Last(made, tables, writing.versions, deltas)
            self._prune()

        self._pending = writing.start(target, check, after)
        if block:
            self._pending.wait()
        return self._pending

    def _writing(
        self,
        step: int,
        state: Mapping[str, Any],
        tables: Mapping[str, TableHandle],
        metrics: Mapping[str, Any] | None,
        target: Path,
    ) -> Writing:
        last = self._last

        def take(base: Base | None, since: Versions | None) -> Writing:
            return Writing(
                state,
                tables,
                step=step,
                metrics=metrics,
                part_bytes=self.part_bytes,
                base=base,
                since=since,
                track=self.full_every > 1,
            )

        if (
            last is not None
            and last.deltas + 1 < self.full_every
            and last.made.step < step
            and last.describes(tables)
            and _is(self.folder, last.base)
            and not target.exists()
        ):
            try:
                return take(last.base, last.versions)
            except ValueError:
                pass  # a table does not know any more what changed: all of it, then
        return take(None, None)

    def wait(self) -> None:
        """Wait for the save that is under way; raises its error, unless that was raised before."""
        if self._pending is not None:
            self._pending.settle()

    def list(self) -> list[Checkpoint]:
        """All checkpoints whose manifests can be read, oldest first."""
        return _readable(self.folder)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint; None if there is none. One whose manifest is damaged is an error."""
        for folder in reversed(_folders(self.folder)):
            try:
                return Checkpoint(folder)
            except CheckpointError:
                if (folder / NAME).exists():  # otherwise somebody has just removed it
                    raise
        return None

    def best(self) -> Checkpoint | None:
        """The best checkpoint by `keep_best`, the newest of equal ones; None if none has the metric."""
        if self.keep_best is None:
            raise ValueError('Checkpoints was made without keep_best: expected ("auc", "max"), got None.')
        return _best(_readable(self.folder), *self.keep_best)

    def _prune(self) -> None:
        if self.keep_last is not None:
            remove_folders(self.folder, lambda: _doomed(self.folder, self.keep_last, self.keep_best))


class _Last:
    """The newest checkpoint this process has saved, as a base for deltas."""

    def __init__(
        self, made: Checkpoint, tables: Mapping[str, TableHandle], versions: Versions, deltas: int
    ) -> None:
        self.made = made
        self.versions = versions
        self.deltas = deltas  # since the last full one
        manifest = made.manifest
        self.base = Base(made.path.name, made.step, manifest.id, manifest.checksum)
        self._stores = {name: handle.engine.store for name, handle in tables.items()}

    def describes(self, tables: Mapping[str, TableHandle]) -> bool:
        """Whether these are the tables that were saved, with the same kind of rows."""
        saved = self.made.manifest.tables
        return self._stores.keys() == tables.keys() and all(
            handle.engine.store is self._stores[name]
            and handle.optimizer == saved[name].optimizer
            and len(handle.initial_state) == saved[name].state
            for name, handle in tables.items()
        )


def _is(folder: Path, base: Base) -> bool:
    try:
        found = Checkpoint(folder / base.folder).manifest
    except CheckpointError:
        return False
    return (found.id, found.checksum) == (base.id, base.checksum)


def _folders(folder: Path) -> list[Path]:
    """What looks like a checkpoint, oldest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = {int(match[1]): name for name in names if (match := _STEP.match(name))}
    return [folder / steps[step] for step in sorted(steps) if (folder / steps[step] / NAME).exists()]


def _readable(folder: Path) -> list[Checkpoint]:
    found = []
    for path in _folders(folder):
        try:
            found.append(Checkpoint(path))
        except CheckpointError:
            continue
    return found


def _best(among: list[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    sign = 1 if mode == "max" else -1
    rated = [
        (sign * value, one.step, one)
        for one in among
        if isinstance(value := one.metrics.get(metric), int | float) and not math.isnan(value)
    ]
    return max(rated, key=lambda entry: entry[:2])[2] if rated else None


def _doomed(
    folder: Path, keep_last: int | None, keep_best: tuple[str, str] | None
) -> dict[Path, Path | None]:
    """What is to go, the newest first, each with what it builds on."""
    there = _readable(folder)
    kept = there if keep_last is None else there[-keep_last:]
    best = _best(there, *keep_best) if keep_best else None
    needed: set[Path] = set()
    for one in [*kept, *([best] if best else [])]:
        needed.add(one.path)
        try:
            needed |= {below.path for below in one.chain}
        except CheckpointError:
            continue  # it lacks something already
    # What cannot be read may be somebody else's: it is left alone. The newest first: a delta must not outlive
    # what it builds on, even if this process is killed in between.
    return {one.path: _below(one) for one in reversed(there) if one.path not in needed}


def _below(one: Checkpoint) -> Path | None:
    base = one.manifest.base
    return None if base is None else one.path.parent / Path(base.folder).name
