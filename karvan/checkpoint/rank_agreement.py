"""Steps that succeed on all ranks, or are an error on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.distributed import CollectiveChannel, RankError
from karvan.errors import is_temporary


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
