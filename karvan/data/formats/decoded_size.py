"""How much a group of a file may become in memory, for formats whose groups are decoded by Arrow.

A few bytes can stand for thousands of times as many. So what a group (a row group, record batch or stripe)
declares is read before it is decoded. A group may become `MOST` bytes, or `TIMES` its stored size if that is
more: real groups rarely exceed that, since all of their columns count.
"""

from __future__ import annotations

from karvan.data.errors import DataError

MOST, TIMES = 256 << 20, 64


def most_decoded(stored: int) -> int:
    """How many bytes a group may have once it is decoded."""
    return max(MOST, TIMES * stored)


def check_decoded(size: int, stored: int) -> None:
    """Raise a DataError if a group of so many stored bytes declares that it becomes too large."""
    if size > most_decoded(stored):
        raise DataError(too_large(stored, f"declares {size:,} bytes"))


def too_large(stored: int, what: str) -> str:
    """The message for a group that would become too large."""
    return (
        f"Expected at most {most_decoded(stored):,} bytes once decoded, since {stored:,} are stored, but it "
        f"{what}. Write the file with fewer records in each row group, record batch or stripe."
    )
