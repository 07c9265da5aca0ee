"""Rows of ragged columns: slices of them copied, rows as a matrix, and whether offsets are right."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.kernels.jit import Elements, Ids, Integer, checking_kernel, kernel, launch, tl

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 16  # of a program, beside each other
_COLUMNS = 64  # elements of each row that are copied at once


@kernel
def slice_kernel(
    values: Elements,
    starts: Ids,
    offsets: Ids,
    width: Integer,
    out: Elements,
    rows: Integer,
    block: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Copy from each row offsets[i + 1] - offsets[i] values, of `width` elements each, from starts[i] on."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = row < rows
    begin = tl.load(offsets + row, mask=inside, other=0) * width
    length = tl.load(offsets + row + 1, mask=inside, other=0) * width - begin
    source = tl.load(starts + row, mask=inside, other=0) * width
    column = tl.arange(0, columns).to(tl.int64)[None, :]
    longest = tl.max(length, axis=0)
    done = longest & 0
    while done < longest:
        at = column + done
        mask = at < length[:, None]
        copied = tl.load(values + source[:, None] + at, mask=mask, other=0)
        tl.store(out + begin[:, None] + at, copied, mask=mask)
        done += columns


@kernel
def dense_kernel(
    values: Elements,
    offsets: Ids,
    total: Integer,
    length: Integer,
    width: Integer,
    out: Elements,
    rows: Integer,
    left: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Write the first values of each row, or if cut on the left the last, over a matrix that is filled."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = row < rows
    start = tl.minimum(tl.maximum(tl.load(offsets + row, mask=inside, other=0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(offsets + row + 1, mask=inside, other=0), start), total)
    count = tl.minimum(end - start, length)
    if left:
        start = end - count
    count = count * width
    most = tl.max(count, axis=0)
    column = tl.arange(0, columns).to(tl.int64)[None, :]
    target = row * length * width
    done = most & 0
    while done < most:
        at = column + done
        mask = at < count[:, None]
        copied = tl.load(values + (start * width)[:, None] + at, mask=mask, other=0)
        tl.store(out + target[:, None] + at, copied, mask=mask)
        done += columns


@checking_kernel
def offsets_kernel(
    total: Integer, offsets: Ids, count: Integer, whole: tl.constexpr, block: tl.constexpr
) -> None:
    """Stop the device unless offsets never fall and are within the values; `whole`: they span them all."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    begin = tl.load(offsets + at, mask=at < count, other=0)
    after = tl.load(offsets + at + 1, mask=at + 1 < count, other=0)
    falls = (at + 1 < count) & (after < begin)
    assert tl.max(falls.to(tl.int32), axis=0) == 0, "offsets must not decrease; Ragged.validate() says where"
    if whole:
        late = (at == 0) & (begin != 0)
        assert tl.max(late.to(tl.int32), axis=0) == 0, "offsets must start at 0"
        apart = (at + 1 == count) & (begin != total)
        assert tl.max(apart.to(tl.int32), axis=0) == 0, "offsets must end at the number of values"
    else:
        outside = (begin < 0) | (begin > total)
        assert tl.max(outside.to(tl.int32), axis=0) == 0, "offsets must be within the values"


@checking_kernel
def equal_kernel(first: Ids, second: Ids, count: Integer, block: tl.constexpr) -> None:
    """Stop the device unless two columns have equally many lists in each row."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    first_begin = tl.load(first + at, mask=at < count, other=0)
    second_begin = tl.load(second + at, mask=at < count, other=0)
    differ = (at < count) & (first_begin != second_begin)
    assert tl.max(differ.to(tl.int32), axis=0) == 0, "crossed columns must have equally many lists in a row"


def slices(values: Tensor, starts: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Slices of values, one after the other: offsets are those of the result, which has `total` values.

    The slices must be within the values.
    """
    values = values.contiguous()
    out = torch.empty((total, *values.shape[1:]), dtype=values.dtype, device=values.device)
    width = values[:1].numel() if values.shape[0] else 0
    arguments = (_as_integers(values), starts.contiguous(), offsets.contiguous(), width)
    launch(slice_kernel, starts.shape[0], _ROWS, _as_integers(out), *arguments, columns=_COLUMNS)
    return out


def dense_rows(values: Tensor, offsets: Tensor, length: int, fill: int | float, left: bool) -> Tensor:
    """Rows cut on one side, or filled up on the right, to one length."""
    rows = offsets.shape[0] - 1
    values = values.contiguous()
    out = values.new_full((rows, length, *values.shape[1:]), fill)
    width = values[:1].numel() if values.shape[0] else 0
    arguments = (_as_integers(values), offsets.contiguous(), values.shape[0], length, width)
    launch(dense_kernel, rows, _ROWS, _as_integers(out), *arguments, left=left, columns=_COLUMNS)
    return out


def check_offsets(offsets: Tensor, total: int, whole: bool) -> None:
    """Check that rows are within `total` values, or the whole of them, without waiting for the device.

    Wrong ones stop the device, as wrong indices do in torch: the next call that waits for it raises an error.
    """
    launch(offsets_kernel, offsets.shape[0], 1024, offsets.contiguous(), total, whole=whole)


def check_equal(first: Tensor, second: Tensor) -> None:
    """Check that the rows of two columns have equally many lists, as `check_offsets` does."""
    launch(equal_kernel, first.shape[0], 1024, second.contiguous(), first.contiguous())


def _as_integers(values: Tensor) -> Tensor:
    """The bits of the values, so that a kernel is compiled for each size of values and not for each type."""
    return values.detach().view(_INTEGERS[values.element_size()])
