"""Criteo's click logs: tab-separated lines of a label, 13 integers and 26 ids in base 16, many missing.

source = criteo.open_logs("day_0.gz")
decode = Decoder(criteo.columns())
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import torch
from pyarrow import fs

from karvan.data.columns.declarations import Column, Fixed
from karvan.data.formats.csv.source import CsvSource
from karvan.data.formats.paths import PathLike, find
from karvan.public_names import publish

__all__ = ["IDS", "INTEGERS", "LABEL", "columns", "open_logs", "schema"]

LABEL = "label"
INTEGERS = tuple(f"I{number}" for number in range(1, 14))
IDS = tuple(f"C{number}" for number in range(1, 27))


def schema() -> pa.Schema:
    """label, I1 to I13, C1 to C26."""
    numbers = [(name, pa.int64()) for name in (*INTEGERS, *IDS)]
    return pa.schema([(LABEL, pa.float32()), *numbers])


def columns(missing_integer: int = 0, missing_id: int = -1) -> list[Column]:
    """Label and integers as float32, ids as int64; real ids have 32 bits, so -1 is always a missing id."""
    label = Fixed(LABEL, dtype=torch.float32)
    integers = [Fixed(name, default=missing_integer, dtype=torch.float32) for name in INTEGERS]
    return [label, *integers, *(Fixed(name, default=missing_id) for name in IDS)]


def open_logs(
    paths: PathLike | Iterable[PathLike], filesystem: fs.FileSystem | None = None, *, labelled: bool = True
) -> CsvSource:
    """The source of log files; Criteo's test files have no label (`labelled=False`)."""
    fields = schema() if labelled else schema().remove(0)
    return CsvSource(
        find(paths, filesystem), schema=fields, delimiter="\t", header=False, quote=None, hexadecimal=IDS
    )


publish("karvan.data.formats.criteo")
