"""ORC files. Groups are stripes, each of which is decoded whole.

The format has no checksums: damage is noticed where it breaks the encoding or the counts of records, which
compressed files make likelier. Lists and maps whose stored lengths are damaged are the one case that can,
rarely, bring the ORC library (and the process) down; data from strangers is better taken as Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import orc, types

from karvan.data.files import FileSource, Layout


class OrcSource(FileSource):
    """ORC files; counts come from their footers."""

    group_name = "stripe"

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        opened = orc.ORCFile(file)
        counts = _stripe_rows(opened)
        if len(counts) != opened.nstripes or sum(counts) != opened.nrows:
            raise ValueError(
                f"The footer promises {opened.nrows} records in {opened.nstripes} stripes, "
                f"but lists {sum(counts)} in {len(counts)}."
            )
        return Layout(opened.schema, np.cumsum([0, *counts], dtype=np.int64))

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        with self._open(path) as file:
            opened = orc.ORCFile(file)
            for number in range(group, len(layout.starts) - 1):
                yield number, opened.read_stripe(number, list(columns))

    def _separable(self) -> list[str]:
        # The ORC library trusts the lengths of lists; a column known to be damaged is not given to it again.
        return [field.name for field in self.schema if not types.is_nested(field.type)]


def _stripe_rows(opened: orc.ORCFile) -> list[int]:
    """The records of each stripe, which pyarrow knows only inside of the footer's protobuf message.

    The fields are FileTail.footer (2), Footer.stripes (3) and StripeInformation.numberOfRows (5).
    """
    tail = bytes(opened.reader.serialized_file_tail())
    counts = []
    for footer in _fields(tail, 2):
        for stripe in _fields(footer, 3):
            counts.append(int(next(iter(_fields(stripe, 5)), 0)))
    return counts


def _fields(message: bytes, wanted: int) -> list[Any]:
    """The values of one field of a protobuf message: bytes, or integers."""
    found: list[Any] = []
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = message[at : at + size], at + size
        else:
            raise ValueError("The footer cannot be read.")
        if tag >> 3 == wanted:
            found.append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("The footer ends too early.")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
