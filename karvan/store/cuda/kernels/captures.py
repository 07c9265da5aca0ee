"""Kernels of captures: rows copied in the background, and rows saved before they change.

`pending` has a number for each row of an arena: 1 + the row's index in the list of a capture, or 0. A row
that was copied or saved is not pending any more. Kernels of both kinds never run at the same time.
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import UNIQUE
from karvan.store.cuda.kernels.maintenance import copy_words
from karvan.store.cuda.kernels.row_memory import row_address


@triton.jit(do_not_specialize=["first", "count"])
def gather_rows(
    rows,
    first,
    count,
    pending,
    saved,
    report,
    chunks,
    target,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy those of the rows [first, first + count) of a list that are pending to an address.

    report, chunks, target: addresses; at `report`, note how many rows were saved so far.
    """
    number = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    valid = number < count
    row = tl.load(rows + first + number, mask=valid, other=0)
    valid = valid & (tl.load(pending + row, mask=valid, other=0) == first + number + 1)
    source = row_address(chunks.to(tl.pointer_type(tl.int64)), row, SHIFT, STRIDE)
    copy_words(source, target + number.to(tl.int64) * STRIDE, valid, STRIDE // 4, COLUMNS)
    tl.store(pending + row, tl.zeros_like(row), mask=valid)
    if tl.program_id(0) == 0:
        tl.store(report.to(tl.pointer_type(tl.int64)), tl.load(saved))


@triton.jit(do_not_specialize=["most", "limit"])
def save_rows(
    rows,
    work,
    most,
    pending,
    limit,
    saved,
    places,
    chunks,
    programs,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Copy those of distinct rows that are pending to the next free places, with their indices in the list.

    RUNS: as many rows as the lookup of `work` has runs; `most` otherwise. limit: rows from it on are new.
    places: addresses of PLACES places each, first the rows, then their indices.
    """
    count = most
    if RUNS:
        count = tl.load(work + UNIQUE)
    for start in range(tl.program_id(0) * GROUP, count, programs * GROUP):
        number = start + tl.arange(0, GROUP)
        row = tl.load(rows + number, mask=number < count, other=0).to(tl.int32)
        index = tl.load(pending + row, mask=row < limit, other=0) - 1
        present = index >= 0
        total = tl.sum(present.to(tl.int64), axis=0)
        if total > 0:
            place = tl.atomic_add(saved, total) + tl.cumsum(present.to(tl.int64), axis=0) - 1
            address = tl.load(places + (place // PLACES), mask=present, other=0)
            local = place % PLACES
            source = row_address(chunks, row, SHIFT, STRIDE)
            copy_words(source, address + local * STRIDE, present, STRIDE // 4, COLUMNS)
            indices = (address + STRIDE * PLACES + local * 4).to(tl.pointer_type(tl.int32))
            tl.store(indices, index, mask=present)
            tl.store(pending + row, tl.zeros_like(row), mask=present)
