"""Resuming from the newest intact checkpoint, or from a chosen one.

Checkpoints are tried from the newest to the oldest. One is intact if its manifest can be read, all its files
and those of the chain it builds on exist with the right sizes, and the checksums of what is read match; so
trying one is loading it. A damaged one is reported by a warning, and the previous one is loaded completely
instead, over whatever was loaded before. Deltas that build on a damaged checkpoint are damaged as well: they
are newer, so they were tried before it.

Once a checkpoint was loaded, the damaged ones above it are renamed to `damaged-step-…`. If none is intact,
that is an error and nothing is renamed. An error other than damage, such as another model's tables or a file
that the system does not let us read, ends the search: an older checkpoint would not help, or would lose steps
for no reason.

A request for a named checkpoint gets that one or an error. The next resume would take checkpoints of later
steps and mix them with the new training, so they are renamed to `abandoned-step-…`.

The ranks of a job do this together: rank 0 lists the folder and renames, every attempt succeeds on all ranks
or fails on all of them with the same error, so all make the same decision. If a rank dies, the others raise a
RankError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from karvan import distributed
from karvan.checkpoint.atomic_folder import ABANDONED, DAMAGED, set_aside
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError, together
from karvan.checkpoint.manifest import is_taken
from karvan.checkpoint.survey import is_step_name, saved_folders, step_of
from karvan.distributed import CollectiveChannel
from karvan.job.checkpoint_url import shown

_log = logging.getLogger(__name__)
_LISTINGS = 10  # attempts to list a folder in which another process prunes meanwhile

T = TypeVar("T")


class _PrunedError(Exception):
    """Another process has removed the checkpoint that was to be loaded."""


def check_resume(resume: object) -> None:
    """Raise unless it is True, False or the name of a checkpoint."""
    if isinstance(resume, bool) or (isinstance(resume, str) and is_step_name(resume)):
        return
    raise ValueError(
        "resume expects True, False or the name of a checkpoint, such as 'step-000000001000', "
        f"got {resume!r}."
    )


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint of a folder, intact or not; None if there is none. A collective."""
    names = _names(distributed.current().here, folder)
    return step_of(folder / names[-1]) if names else None


def resume(
    folder: Path, load: Callable[[Checkpoint], T], name: str | None = None, *, rename: bool = True
) -> tuple[Checkpoint, T] | None:
    """The newest intact checkpoint, or the one of that name, and the result of `load` for it; a collective.

    None if there is no checkpoint. `load` loads all that is needed, and is called again for an older one when
    it raises a DamagedCheckpointError. rename: set aside checkpoints that are damaged, or later than the
    named one.
    """
    channel = distributed.current().here
    for _ in range(_LISTINGS):
        attempt = _Attempt(channel, folder, _names(channel, folder), load, rename)
        if name is not None:
            return attempt.named(name)
        try:
            return attempt.newest()
        except _PrunedError:  # so there is a newer one
            continue
    raise CheckpointError(
        folder, f"expected checkpoints that stay while they are loaded, got changes {_LISTINGS} times."
    )


def _names(channel: CollectiveChannel, folder: Path) -> list[str]:
    def look() -> list[str]:
        return [path.name for path in saved_folders(folder)] if channel.rank == 0 else []

    names: list[str] = together(channel, folder, look)[0]
    return names


@dataclass(frozen=True)
class _Attempt(Generic[T]):
    """Resumes from a folder with checkpoints of these names, the oldest first."""

    channel: CollectiveChannel
    folder: Path
    names: Sequence[str]
    load: Callable[[Checkpoint], T]
    rename: bool

    def newest(self) -> tuple[Checkpoint, T] | None:
        """The newest intact checkpoint; None if there is none."""
        damaged: list[Path] = []
        first: DamagedCheckpointError | None = None
        for name in reversed(self.names):
            path = self.folder / name
            try:
                checkpoint = _open(self.channel, path)
                result = self.load(checkpoint)
            except CheckpointError as error:
                if _has_gone(self.channel, path):
                    raise _PrunedError from error
                if not isinstance(error, DamagedCheckpointError):
                    raise
                damaged.append(path)
                first = first or error
                if self.channel.rank == 0:
                    _log.warning("The checkpoint %s is damaged: %s", name, error)
                continue
            if damaged and self.channel.rank == 0:
                _report(checkpoint, damaged, set_aside(damaged, DAMAGED) if self.rename else {})
            return checkpoint, result
        if first is not None:
            listed = ", ".join(path.name for path in damaged)
            raise DamagedCheckpointError(
                self.folder,
                f"expected an intact checkpoint, got {len(damaged)} damaged: {listed}. The newest: {first} "
                "Nothing was changed. Restore a checkpoint from a backup, or train in another folder.",
            ) from first
        return None

    def named(self, name: str) -> tuple[Checkpoint, T]:
        """The checkpoint of a name; those of later steps are set aside."""
        others = ", ".join(other for other in self.names if other != name) or "none"
        if name not in self.names:
            raise CheckpointError(
                self.folder, f"expected a checkpoint {name}, got none of that name; there are: {others}."
            )
        try:
            checkpoint = _open(self.channel, self.folder / name)
            result = self.load(checkpoint)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                error.path, f"{error.problem} So the requested {name} is damaged; others are: {others}."
            ) from error
        later = [self.folder / other for other in self.names if step_of(Path(other)) > checkpoint.step]
        if later and self.rename and self.channel.rank == 0:
            for path, aside in set_aside(later, ABANDONED).items():
                _log.warning(
                    "Resuming from %s as requested; the later checkpoint %s was renamed to %s.",
                    name,
                    path.name,
                    aside.relative_to(path.parent),
                )
        return checkpoint, result


def _open(channel: CollectiveChannel, path: Path) -> Checkpoint:
    """The checkpoint at a path; all ranks must see the same one."""
    checkpoints: list[Checkpoint] = []

    def read() -> str:
        checkpoints.append(Checkpoint(path))
        return checkpoints[0].manifest.id

    if len(set(together(channel, path, read, name_rank=False))) > 1:
        raise CheckpointError(
            path,
            "expected all ranks to see the same checkpoint, got different ones: checkpoints must be on "
            "storage that all ranks share.",
        )
    return checkpoints[0]


def _has_gone(channel: CollectiveChannel, path: Path) -> bool:
    return not together(channel, path, lambda: channel.rank != 0 or is_taken(path))[0]


def _report(checkpoint: Checkpoint, damaged: Sequence[Path], asides: Mapping[Path, Path]) -> None:
    names = ", ".join(str(aside.relative_to(path.parent)) for path, aside in asides.items())
    _log.warning(
        "Resuming from %s, the newest intact checkpoint; the %d steps up to %s are lost.%s",
        shown(checkpoint.path),
        step_of(damaged[0]) - checkpoint.step,
        damaged[0].name,
        f" Damaged checkpoints were renamed to {names}." if names else "",
    )
