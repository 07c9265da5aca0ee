"""Errors of checkpoints, and steps that succeed on all ranks or are an error on all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from karvan.distributed import CollectiveChannel, RankError
from karvan.errors import is_temporary
from karvan.job.checkpoint_url import shown


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, or a folder that is not one.

    Args:
        path: The checkpoint.
        problem: What is wrong.
        temporary: Whether the disk or the store failed, so that the same save may succeed later.
    """

    def __init__(self, path: str | PathLike[str], problem: str, *, temporary: bool = False) -> None:
        super().__init__(f"{shown(path)}: {problem}")
        self.path = shown(path)
        self.problem = problem
        self.temporary = temporary

    @classmethod
    def mismatch(cls, path: str | PathLike[str], expected: object, received: object) -> CheckpointError:
        """Make an error with the text "expected …, got …".

        Args:
            path: The checkpoint.
            expected: What was expected.
            received: What is there.

        Returns:
            The error.
        """
        return cls(path, f"expected {expected}, got {received}.")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not as it was written: files are missing or changed.

    They may also be those of a checkpoint it builds on. An older checkpoint may be intact. A checkpoint that
    does not fit the model, or that the system does not let us read, is a plain CheckpointError, because an
    older one would not help.

    Args:
        path: The checkpoint.
        problem: What is wrong.
        temporary: Whether it could not be read because of an outage.
    """


def together(
    channel: CollectiveChannel,
    path: str | os.PathLike[str],
    work: Callable[[], Any],
    *,
    name_rank: bool = True,
) -> list[Any]:
    """The results of `work` on every rank; they must be JSON values.

    If it raised on any rank, all raise a CheckpointError, which names the rank unless `name_rank` is off. It
    is a DamagedCheckpointError if no rank has found anything other than damage.
    A single process just does the work.
    """
    if channel.world_size == 1:
        return [work()]
    value, failure = None, None
    try:
        value = work()
    except RankError:
        raise  # the ranks cannot communicate any more
    except Exception as error:
        failure = error
    results = channel.gather_json({"value": value, "problem": failure and _problem(path, failure)})
    problems = [
        (rank, *result["problem"]) for rank, result in enumerate(results) if result["problem"] is not None
    ]
    # Problems that an older checkpoint would not solve come first.
    for rank, where, what, temporary, damaged in sorted(problems, key=lambda problem: bool(problem[4])):
        # An error that all have agreed on names its rank already.
        named = f"rank {rank}: {what}" if name_rank and not what.startswith("rank ") else what
        kind = DamagedCheckpointError if damaged else CheckpointError
        # The text of a CheckpointError has its cause; for any other error the traceback is useful as well.
        agreed = kind(where, named, temporary=temporary)
        raise agreed from None if isinstance(failure, CheckpointError) else failure
    return [result["value"] for result in results]


def _problem(path: str | os.PathLike[str], error: Exception) -> tuple[str, str, bool, bool]:
    if isinstance(error, CheckpointError):
        return error.path, error.problem, error.temporary, isinstance(error, DamagedCheckpointError)
    return os.fspath(path), f"{type(error).__name__}: {error}", is_temporary(error), False


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, sorted, for texts."""
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
