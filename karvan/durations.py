"""Durations and times as people say them: "42 s", "3 min 05 s", "2 h 05 min", "3 days ago"."""

from __future__ import annotations

from datetime import UTC, datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration_text(seconds: float) -> str:
    """A duration in at most two units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02} h"


def ago_text(time: str, now: datetime | None = None) -> str:
    """How long ago an ISO time was; text that is no time, such as that of a damaged file, stays as it is."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return time
    if then.tzinfo is None:
        then = then.astimezone()
    seconds = ((now or datetime.now(UTC)) - then).total_seconds()
    for unit, name in ((_DAY, "day"), (_HOUR, "hour"), (_MINUTE, "minute")):
        if (count := int(seconds // unit)) >= 1:
            return f"{count} {name}{'s' * (count != 1)} ago"
    return "just now" if seconds < 5 else f"{int(seconds)} seconds ago"
