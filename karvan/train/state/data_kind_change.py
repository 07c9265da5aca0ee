"""A run that continues with another kind of data than its checkpoint's: a `Loader` after `from_loaders()`.

Both may read the same records, but the position of one means nothing to the other. At the end of an epoch no
position is needed: the next epoch starts at its first batch, in the order that it has by its number. Within
an epoch it is an error, unless what was trained of the epoch is to be dropped.
"""

from __future__ import annotations

import logging
from typing import Any

from karvan.data.loading.position import kind_of, mismatch
from karvan.train.feed.batch_source import position_of
from karvan.train.reporting.results import TrainingCounts
from karvan.train.state.dataset import UnfinishedError
from karvan.train.types import Positioned

_log = logging.getLogger("karvan.train")


def starts_epoch(
    position: Any, data: Any, counts: TrainingCounts, drop_unfinished: bool, *, warns: bool
) -> bool:
    """Whether data was moved to the start of its epoch, because the position is of another kind of data."""
    if position is None or not isinstance(data, Positioned):
        return False
    saved, current = kind_of(position), kind_of(position_of(data))
    if saved == current:
        return False
    if not drop_unfinished and (counts.batches or _grows(data)):
        raise UnfinishedError(f"Epoch {counts.epoch} cannot be continued. {mismatch(saved, current)}")
    if warns and counts.batches:
        _log.warning(
            "Epoch %d starts again at its first batch: %d of its batches are trained a second time.",
            counts.epoch,
            counts.batches,
        )
    counts.batches = 0
    start = getattr(data, "start_epoch", None)  # other data is at its start
    if start is not None:
        start(counts.epoch)
    return True


def _grows(data: Any) -> bool:
    """Whether an epoch starts where the one before ended, so that a position is always needed."""
    ask = getattr(data, "identity", None)
    known = ask() if callable(ask) else None
    return known is not None and known.grows
