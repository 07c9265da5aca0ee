"""Tables of integers in text, such as Criteo's logs, parsed natively.

The core reads plain cells only and gives up at anything else: a fraction, a blank, a carriage return, a line
with an extra cell. The caller then parses the same text with pyarrow, which supports all that is allowed and
reports the rest, so that neither results nor errors depend on which of the two has read a file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import csv

from karvan.native import _native

_TYPES = (pa.int64(), pa.float32(), pa.float64())
_DELIMITERS = ("\t", ",", ";", "|")


@dataclass(frozen=True)
class IntegerTable:
    """How to read a table: the base of each column, 0 for those that are not requested."""

    delimiter: str
    quote: bytes
    bases: list[int]
    schema: pa.Schema
    """The requested columns, in the order of the text."""
    names: list[str]
    """Their names, in the order of the request."""

    @classmethod
    def of(
        cls,
        parsing: csv.ParseOptions,
        nulls: Sequence[str],
        schema: pa.Schema,
        columns: Sequence[str],
        hexadecimal: Collection[str],
    ) -> IntegerTable | None:
        """The table of a file with this schema; None if it may hold what the core does not read."""
        requested = pa.schema([field for field in schema if field.name in columns])
        plain = len(schema) > 1 and parsing.delimiter in _DELIMITERS and list(nulls) == [""]
        if not plain or not len(requested) or any(field.type not in _TYPES for field in requested):
            return None
        bases = [
            0 if field.name not in columns else 16 if field.name in hexadecimal else 10 for field in schema
        ]
        quote = (parsing.quote_char or "").encode()
        return cls(parsing.delimiter, quote, bases, requested, list(columns))

    def parse(self, text: bytes, rows: int) -> pa.RecordBatch | None:
        """The records of the text, or None if it is not exactly `rows` lines of integers."""
        if b"\r" in text or (self.quote and self.quote in text):
            return None
        values = np.empty((len(self.schema), rows), np.int64)
        present = np.full((len(self.schema), (rows + 7) // 8), 255, np.uint8)
        buffer = np.frombuffer(text, np.uint8)
        missing = _native.parse_lines(buffer, self.delimiter, self.bases, values, present)
        if missing is None:
            return None
        arrays = {}
        for index, field in enumerate(self.schema):
            bits = pa.py_buffer(present[index]) if missing[index] else None
            cells = pa.Array.from_buffers(
                pa.int64(), rows, [bits, pa.py_buffer(values[index])], missing[index]
            )
            arrays[field.name] = cells if field.type == pa.int64() else cells.cast(field.type, safe=False)
        return pa.RecordBatch.from_pydict({name: arrays[name] for name in self.names})
