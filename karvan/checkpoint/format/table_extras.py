"""What tables hold in addition to rows, in files: counters of an admission filter, a clock.

Every rank writes the counters of the hashes it owns, and rank 0 the clock. A process that loads reads the
files of those ranks whose hashes it owns; if two of them have the same counter, the larger value counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from karvan.checkpoint.errors import DamagedCheckpointError
from karvan.checkpoint.format.hash_ranges import WHOLE, Range, share_of
from karvan.checkpoint.format.safetensors_file import FileEntry, read_arrays
from karvan.store.exchange.key_sharding import counters_of

Extra = dict[str, NDArray[Any]]

_FILTER = "filter_counts"
_POSITION = "filter_place"  # the index of a piece's first counter, and the number of all counters
_NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "I32": np.int32,
    "U32": np.uint32,
    "U8": np.uint8,
}


def own_extra(extra: Mapping[str, NDArray[Any]], rank: int, ranks: int) -> Extra:
    """The part of a table's extra that a rank writes; all of it if there is one rank."""
    share = share_of(rank, ranks)
    if share == WHOLE:
        return dict(extra)
    made: Extra = {}
    if _FILTER in extra:
        counters = extra[_FILTER]
        piece = counters_of(share.first, share.end, len(counters))
        made = {
            _FILTER: counters[piece].copy(),
            _POSITION: np.array([piece.start, len(counters)], np.int64),
        }
    if rank == 0:
        made |= {name: array for name, array in extra.items() if name != _FILTER}
    return made


def read_extras(folder: Path, files: Sequence[FileEntry | None], share: Range) -> Extra:
    """The extra that a store with a share of the hashes needs, from the ranks' files."""
    made: Extra = {}
    for rank, file in enumerate(files):
        if file is None or not (rank == 0 or share_of(rank, len(files)).overlaps(share)):
            continue
        found = _read(folder, file)
        counters, position = found.pop(_FILTER, None), found.pop(_POSITION, None)
        if counters is not None:
            begin, total = (0, len(counters)) if position is None else position.tolist()
            merged = made.setdefault(_FILTER, np.zeros(total, counters.dtype))
            if len(merged) != total or not 0 <= begin <= total - len(counters):
                raise DamagedCheckpointError.mismatch(
                    folder / file.name,
                    f"{len(counters)} out of {len(merged)} counters",
                    f"those from {begin} on of {total}",
                )
            piece = merged[begin : begin + len(counters)]
            np.maximum(piece, counters, out=piece)
        for name, array in found.items():
            made.setdefault(name, array)
    return made


def _read(folder: Path, file: FileEntry) -> Extra:
    return {
        name: array.data.view(_NUMPY[array.dtype]).reshape(array.shape)
        for name, array in read_arrays(folder, file).items()
    }
