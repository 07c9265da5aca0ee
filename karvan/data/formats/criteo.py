"""Criteo's click logs: tab-separated lines of a label, 13 integers and 26 ids in base 16, many missing.

source = criteo.open_logs("day_0.gz")
decode = Decoder(criteo.columns())
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import torch
from pyarrow import fs

from karvan.argument_checks import publish
from karvan.data.columns.declarations import Column, Fixed
from karvan.data.formats.csv import CsvSource
from karvan.data.formats.paths import PathLike, find

__all__ = ["IDS", "INTEGERS", "LABEL", "columns", "open_logs", "schema"]

LABEL = "label"
INTEGERS = tuple(f"I{number}" for number in range(1, 14))
IDS = tuple(f"C{number}" for number in range(1, 27))


def schema() -> pa.Schema:
    """Return the schema of Criteo's logs: label, I1 to I13, C1 to C26.

    Returns:
        The schema.

    Example:
        >>> kv.data.criteo.schema().names[:3]
        ['label', 'I1', 'I2']
    """
    numbers = [(name, pa.int64()) for name in (*INTEGERS, *IDS)]
    return pa.schema([(LABEL, pa.float32()), *numbers])


def columns(missing_integer: int = 0, missing_id: int = -1) -> list[Column]:
    """Declare the columns of Criteo's logs: label and integers as float32, ids as int64.

    Args:
        missing_integer: Replaces missing integers.
        missing_id: Replaces missing ids. Real ids have 32 bits, so -1 is none of them.

    Returns:
        The columns.

    Example:
        >>> len(kv.data.criteo.columns())
        40
    """
    label = Fixed(LABEL, dtype=torch.float32)
    integers = [Fixed(name, default=missing_integer, dtype=torch.float32) for name in INTEGERS]
    return [label, *integers, *(Fixed(name, default=missing_id) for name in IDS)]


def open_logs(
    paths: PathLike | Iterable[PathLike], filesystem: fs.FileSystem | None = None, *, labelled: bool = True
) -> CsvSource:
    """Open Criteo's log files as a source.

    Args:
        paths: A path, folder, glob or URL, or several.
        filesystem: A pyarrow file system that has the files.
        labelled: Whether the files have labels; Criteo's test files have none.

    Returns:
        The source.

    Raises:
        DataError: There are no such files.

    Example:
        >>> def read(path):
        ...     logs = kv.data.criteo.open_logs(path)
        ...     columns = kv.data.criteo.columns()
        ...     return kv.data.read(logs, 4096, columns=columns)
    """
    fields = schema() if labelled else schema().remove(0)
    return CsvSource(
        find(paths, filesystem), schema=fields, delimiter="\t", header=False, quote=None, hexadecimal=IDS
    )


publish("karvan.data.formats.criteo")
