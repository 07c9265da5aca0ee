"""What tables hold besides rows, in files: counters of an admission filter, a clock.

Every rank writes the counters of its own hashes, and rank 0 the clock. Who loads takes the files of those
ranks whose hashes it owns; where two of them tell a counter, the larger one holds.
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

_FILTER, _PLACE = "filter_counts", "filter_place"  # the latter: where a piece begins, and of how many it is
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
    """What a rank writes of what its table holds; all of it if it is alone."""
    share = share_of(rank, ranks)
    if share == WHOLE:
        return dict(extra)
    made: Extra = {}
    if _FILTER in extra:
        counters = extra[_FILTER]
        piece = counters_of(share.first, share.end, len(counters))
        made = {
            _FILTER: counters[piece].copy(),
            _PLACE: np.array([piece.start, len(counters)], np.int64),
        }
    if rank == 0:
        made |= {name: array for name, array in extra.items() if name != _FILTER}
    return made


def read_extras(folder: Path, files: Sequence[FileEntry | None], share: Range) -> Extra:
    """What a store with a share of the hashes needs of the ranks' files."""
    made: Extra = {}
    for rank, file in enumerate(files):
        if file is None or not (rank == 0 or share_of(rank, len(files)).overlaps(share)):
            continue
        found = _read(folder, file)
        counters, place = found.pop(_FILTER, None), found.pop(_PLACE, None)
        if counters is not None:
            begin, total = (0, len(counters)) if place is None else place.tolist()
            whole = made.setdefault(_FILTER, np.zeros(total, counters.dtype))
            if len(whole) != total or not 0 <= begin <= total - len(counters):
                raise DamagedCheckpointError.mismatch(
                    folder / file.name,
                    f"{len(counters)} out of {len(whole)} counters",
                    f"those from {begin} on of {total}",
                )
            here = whole[begin : begin + len(counters)]
            np.maximum(here, counters, out=here)
        for name, array in found.items():
            made.setdefault(name, array)
    return made


def _read(folder: Path, file: FileEntry) -> Extra:
    return {
        name: array.data.view(_NUMPY[array.dtype]).reshape(array.shape)
        for name, array in read_arrays(folder, file).items()
    }
