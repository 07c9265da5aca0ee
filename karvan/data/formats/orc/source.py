"""ORC files. Groups are stripes, each of which is decoded completely.

The format has no checksums: damage is detected where it breaks the encoding or the counts of records, which
is more likely in compressed files. In numbers the ORC library detects it by itself; strings, lists and other
types with lengths in the file can crash it, and are decoded in another process (`isolated_decode.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import orc, types

from karvan.data.formats.base import FileSource, Layout
from karvan.data.formats.decoded_size import check_decoded
from karvan.data.formats.orc.isolated_decode import decode_in_child
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
        row = sum(_width(layout.schema.field(name).type) for name in columns)
        found: list[Stripe] = layout.detail
        with self._open(path) as file:
            opened = orc.ORCFile(file)
            for number, stripe in enumerate(found[group:], group):
                check_decoded(stripe.records * row, stripe.size)
                # Memory for all records is allocated at once, so their number must be plausible.
                local = numbers if stripe.records <= stripe.size else []
                isolated = [name for name in columns if name not in local]
                pieces = [opened.read_stripe(number, local)] if local else []
                if isolated or not local:
                    pieces.append(decode_in_child(file, number, stripe, isolated))
                yield number, _side_by_side(pieces)


def _side_by_side(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    names = [name for piece in pieces for name in piece.schema.names]
    return pa.RecordBatch.from_arrays([column for piece in pieces for column in piece.columns], names)


def _is_number(type_: pa.DataType) -> bool:
    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))


def _width(type_: pa.DataType) -> int:
    """How many bytes of a value its type declares; texts and lists have at least an offset."""
    return max(type_.bit_width // 8, 1) if _is_number(type_) else 4
