"""ORC files. Groups are stripes, each of which is decoded whole.

The format has no checksums: damage is noticed where it breaks the encoding or the counts of records, which
compressed files make likelier. Of numbers the ORC library notices it by itself; strings, lists and whatever
else has lengths in the file can bring it down, and are decoded in another process (`isolated_decode.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import orc, types

from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.orc.isolated_decode import read_apart
from karvan.data.formats.orc.stripes import Stripe, stripes


class OrcSource(FileSource):
    """ORC files; counts come from their footers."""

    group_name = "stripe"

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        opened = orc.ORCFile(file)
        found = stripes(opened, file.size())
        return Layout(opened.schema, np.cumsum([0, *(stripe.records for stripe in found)]), found)

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        numbers = [name for name in columns if _is_number(layout.schema.field(name).type)]
        found: list[Stripe] = layout.detail
        with self._open(path) as file:
            opened = orc.ORCFile(file)
            for number, stripe in enumerate(found[group:], group):
                # Memory for all records is taken at once, so their number must be one that can be true.
                here = numbers if stripe.records <= stripe.size else []
                apart = [name for name in columns if name not in here]
                pieces = [opened.read_stripe(number, here)] if here else []
                if apart or not here:
                    pieces.append(read_apart(file, number, stripe, apart))
                yield number, _side_by_side(pieces)


def _side_by_side(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    names = [name for piece in pieces for name in piece.schema.names]
    return pa.RecordBatch.from_arrays([column for piece in pieces for column in piece.columns], names)


def _is_number(type_: pa.DataType) -> bool:
    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))
