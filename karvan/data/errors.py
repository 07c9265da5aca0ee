"""`DataError`: what is wrong with the data, with file, record and column."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from karvan.errors import is_out_of_memory, is_temporary

# What pyarrow and the file systems raise for bytes that they cannot parse.
_FOREIGN = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, EOFError, KeyError)


_SOME_MEMORY = 1 << 26  # bytes that a process gets unless it has none left

_NO_THREAD = "Failed to launch worker thread: Resource temporarily unavailable"  # Arrow's, for want of memory

# Google's client states an error's text, and then repeats it among other details.
_GOOGLE = re.compile(r"google::cloud::Status\((.*?) error_info=\{.*")


class DataError(ValueError):
    """Data that cannot be read as asked.

    It names the file, the position in it and the column as far as known.

    Args:
        detail: What is wrong.
        path: The file.
        place: The position in it.
        column: The column.
        temporary: Whether the storage cannot be reached at the moment, so that the same data may be readable
            later.
    """

    def __init__(
        self,
        detail: str,
        *,
        path: str | None = None,
        place: str | None = None,
        column: str | None = None,
        temporary: bool = False,
    ) -> None:
        where = [path, place, None if column is None else f"column '{column}'"]
        location = ", ".join(part for part in where if part is not None)
        super().__init__(f"{location}: {detail}" if location else detail)
        self.detail = detail
        self.path = path
        self.place = place
        self.column = column
        self.temporary = temporary


@contextmanager
def located(path: str | None = None, place: str | None = None, column: str | None = None) -> Iterator[None]:
    """Add the location to errors: those of pyarrow and file systems, and `DataError`s without one."""
    try:
        yield
    except DataError as error:
        adds_column = error.column is None and column is not None
        if error.path is not None or (path is None and not adds_column):
            raise
        raise DataError(
            error.detail,
            path=path,
            place=error.place or place,
            column=error.column or column,
            temporary=error.temporary,
        ) from (error.__cause__ or error)
    except _FOREIGN as error:
        if isinstance(error, MemoryError) and is_out_of_memory(error) and _lacks_memory(error):
            raise
        temporary = is_temporary(error) or str(error).endswith(_NO_THREAD)
        raise DataError(reason(error), path=path, place=place, column=column, temporary=temporary) from error


def _lacks_memory(error: MemoryError) -> bool:
    """Whether this process has no memory left; damaged bytes may ask for too much, too."""
    if " size " in str(error):  # as Arrow says it, and a machine may have as much
        return True
    try:
        mmap.mmap(-1, _SOME_MEMORY).close()
    except (MemoryError, OSError):
        return True
    return False


def reason(error: BaseException) -> str:
    """The first line of an error's text, which is what a reader needs."""
    lines = str(error).strip().splitlines()
    return _GOOGLE.sub(r"\1", lines[0]) if lines else type(error).__name__
