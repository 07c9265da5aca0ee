"""Durations and times for people."""

from datetime import UTC, datetime

import pytest

from karvan.display import ago_text, duration_text

NOW = datetime(2026, 11, 19, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (2.34, "2.3 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (86400 * 3 + 3600, "3 d 01 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("time", "text"),
    [
        ("2026-11-19T11:59:58+00:00", "just now"),
        ("2026-11-19T11:59:18+00:00", "42 seconds ago"),
        ("2026-11-19T12:57:00+01:00", "3 minutes ago"),
        ("2026-11-19T11:00:00+00:00", "1 hour ago"),
        ("2026-11-16T10:00:00+00:00", "3 days ago"),
        ("2027-01-01T00:00:00+00:00", "just now"),  # another machine's clock
        ("today", "today"),
    ],
)
def test_a_time_is_told_by_how_long_ago_it_was(time, text):
    assert ago_text(time, NOW) == text
