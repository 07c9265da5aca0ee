"""Whether a position is that of a `Loader` or of a stream from loaders.

The position of one kind of data means nothing to another kind, even where both read the same records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOADER = "a Loader (kv.data.read)"


def stream_of(loaders: int) -> str:
    """The kind of a stream."""
    return f"kv.data.from_loaders() of {loaders} loader{'' if loaders == 1 else 's'}"


def kind_of(state: Any) -> str | None:
    """The kind of data that a position is of, in words; None if it is neither of these."""
    if not isinstance(state, Mapping) or "version" not in state:
        return None
    if "settings" in state:
        return LOADER
    return stream_of(len(state["loaders"])) if "loaders" in state else None


def mismatch(saved: str | None, given: str | None) -> str:
    """What to do about a position in the middle of an epoch that is of another kind than the data."""
    before, now = saved or "another kind of data", given or "another kind of data"
    setting = ""
    if before.startswith("kv.data.from_loaders") and now.startswith("kv.data.from_loaders"):
        setting = f", by roles.loaders: {before.split()[2]} in the job"
    return (
        f"The position is of {before}, but the data is {now}. Finish the epoch with "
        f"{saved or 'the data that it began with'}{setting}, or begin it again with drop_unfinished=True "
        "of fit (karvan train --drop-unfinished). The epoch then starts at its first batch and trains "
        "the earlier batches a second time."
    )
