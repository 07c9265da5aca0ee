"""Numbers that are written as text: "42", "-5", "18446744073709551615", "2.5e-3"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from karvan import kernels
from karvan.features.ops.base import (
    RowOp,
    describe,
    describe_for_ids,
    expect_text,
    is_text,
    keep,
    row_numbers,
    strings_of,
)
from karvan.ragged import Entry, NestedRagged, OptionalText, Ragged, as_offsets, offsets_from, values_of

if TYPE_CHECKING:
    import pyarrow as pa


_INT64 = torch.iinfo(torch.int64)
_SAFE = 18  # digits that always fit into 64 bits
_POWERS = 30  # higher powers occur only in numbers that are too large
_DIGITS = 19  # of the largest number of 64 bits with a sign
_TOLERANCE = 1e-9  # far above the rounding of a sum of 30 doubles


@dataclass(frozen=True)
class ParseIds(RowOp):
    """Decimal numbers of 64 bits, signed or unsigned, instead of strings; an empty string has no id.

    The result always has offsets, so that batches with and without empty strings are of one kind. Ids
    are returned unchanged.
    """

    name: ClassVar[str] = "to_ids"
    takes_text: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Strings, or ids."""
        if is_text(entries[0]):
            expect_text(entries[0])
        elif values_of(entries[0]).dtype != torch.int64:
            raise TypeError(
                f"expected strings, or ids of torch.int64, but received {describe_for_ids(entries[0])}; "
                "to_ids(buckets=…) turns other numbers into ids."
            )

    def run_rows(self, *entries: Entry) -> Entry:
        """One id for each string that is not empty."""
        (entry,) = entries
        if not is_text(entry):
            return entry
        strings = strings_of(entry)
        offsets = as_offsets(strings)
        present = offsets.diff() > 0
        starts = offsets[:-1][present]
        parsed = _parse_by_arrow(strings.values, starts)
        if parsed is None:
            parsed = parse_anywhere(strings.values, starts, offsets.diff()[present])
        if isinstance(entry, NestedRagged):
            return Ragged(parsed, keep(Ragged(present, entry.outer), present).offsets)
        return Ragged(parsed, torch.nn.functional.pad(present.cumsum(0), (1, 0)))


def _parse_by_arrow(text: Tensor, starts: Tensor) -> Tensor | None:
    """The same as `parse_anywhere`, much faster; None for text that Arrow refuses or reads differently."""
    if not text.is_cpu or bool((text > ord("9")).any()):  # Arrow also reads 0x1F
        return None
    import pyarrow as pa  # slow to import, and few features need it

    words = _words(text, starts)
    for kind in (pa.int64(), pa.uint64()):
        try:
            return torch.from_numpy(words.cast(kind).to_numpy().view("int64").copy())
        except pa.ArrowInvalid:
            continue
    return None


def _words(text: Tensor, starts: Tensor) -> pa.Array:
    """Adjacent strings as Arrow has them."""
    import pyarrow as pa

    bounds = torch.nn.functional.pad(starts, (0, 1), value=text.shape[0])
    buffers = [None, pa.py_buffer(bounds.numpy()), pa.py_buffer(text.contiguous().numpy())]
    return pa.Array.from_buffers(pa.large_string(), starts.shape[0], buffers)


def parse_anywhere(text: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """The numbers that adjacent, non-empty strings spell, in torch's arithmetic."""
    count = lengths.shape[0]
    if not count:
        return torch.empty(0, dtype=torch.int64, device=text.device)
    negative = text[starts] == ord("-")
    word = row_numbers(lengths, text.shape[0])
    position = torch.arange(text.shape[0], device=text.device) - starts[word]
    digits = text.to(torch.int64) - ord("0")
    is_sign = negative[word] & (position == 0) & (lengths[word] > 1)
    digits.masked_fill_(is_sign, 0)
    wrong = (digits < 0) | (digits > 9)
    if bool(wrong.any()):
        raise _error(text, starts, lengths, int(word[wrong][0]))
    power = (lengths[word] - 1 - position).clamp_(max=_POWERS)
    # Sums wrap around, and so do their differences, which are the bits of each number.
    sums = torch.cumsum(digits * _powers(text.device)[power], 0)
    ends = sums[starts + lengths - 1]
    size = torch.cat([ends[:1], ends.diff()])
    if int(lengths.max()) > _SAFE:
        fits = _fits(digits, power, word, size, negative)
        if not bool(fits.all()):
            raise _error(text, starts, lengths, int((~fits).nonzero()[0, 0]))
    return torch.where(negative, -size, size)


def _fits(digits: Tensor, power: Tensor, word: Tensor, size: Tensor, negative: Tensor) -> Tensor:
    """Whether each number fits into 64 bits: by its size as a double, and close to the limit by its bits."""
    scale = torch.pow(10.0, torch.arange(_POWERS + 1, dtype=torch.float64, device=digits.device))
    about = torch.zeros(size.shape[0], dtype=torch.float64, device=digits.device)
    about.index_add_(0, word, digits.to(torch.float64) * scale[power])
    limit = torch.full_like(about, 2.0**64).masked_fill_(negative, 2.0**63)
    at_limit = torch.where(negative, (size >= 0) | (size == _INT64.min), size < 0)
    return (about < limit * (1 - _TOLERANCE)) | ((about < limit * (1 + _TOLERANCE)) & at_limit)


def _powers(device: torch.device) -> Tensor:
    """10 to the power of 0, 1, …, modulo 2**64."""
    powers = [pow(10, n, 1 << 64) for n in range(_POWERS + 1)]
    return torch.tensor([p - (1 << 64) if p >> 63 else p for p in powers], device=device)


def _error(text: Tensor, starts: Tensor, lengths: Tensor, word: int) -> ValueError:
    start = int(starts[word])
    word_text = bytes(text[start : start + int(lengths[word])].tolist()).decode(errors="replace")
    return ValueError(
        f"expected decimal integers of 64 bits, but received {word_text[:100]!r}; "
        'strip() removes spaces around numbers, and .hash("farm") turns any strings into ids.'
    )


@dataclass(frozen=True)
class ParseNumbers(RowOp):
    """The floats that strings spell, such as "2.5e-3"; for an empty or missing string, the default.

    Numbers are returned unchanged.
    """

    default: float
    name: ClassVar[str] = "to_numbers"
    takes_text: ClassVar[bool] = True
    takes_missing: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Strings on the CPU, or numbers."""
        if not is_text(entries[0]):
            return
        if kernels.on_gpu(values_of(entries[0])):
            raise TypeError(
                f"expected strings on the CPU, but received {describe(entries[0])} on "
                f"{values_of(entries[0]).device}; use this step in the transform of a loader, before batches "
                "are copied to the GPU."
            )
        expect_text(entries[0])

    def run_rows(self, *entries: Entry) -> Entry:
        """One float32 for each string, rounded from a float64."""
        (entry,) = entries
        if not is_text(entry):
            return entry
        strings = strings_of(entry)
        offsets = as_offsets(strings)
        present = offsets.diff() > 0
        numbers = torch.full((strings.rows,), self.default, dtype=torch.float32)
        numbers[present] = _parse_floats(strings.values, offsets[:-1][present])
        if not isinstance(entry, NestedRagged):
            return numbers
        if not isinstance(entry, OptionalText):
            return Ragged(numbers, entry.outer)
        filled = torch.full((entry.rows,), self.default, dtype=torch.float32)
        filled[entry.lengths() > 0] = numbers
        return filled


def _parse_floats(text: Tensor, starts: Tensor) -> Tensor:
    import pyarrow as pa

    words = _words(text, starts)
    try:
        return torch.from_numpy(words.cast(pa.float64()).to_numpy().astype("float32"))
    except pa.ArrowInvalid as error:
        word = str(error).removeprefix("Failed to parse string: ").split(" as a scalar")[0]
        raise ValueError(
            f"expected decimal numbers, but received {word[:100]}; strip() removes spaces around numbers."
        ) from None


@dataclass(frozen=True)
class ToText(RowOp):
    """Integers as their decimal text, with a minus sign where they are negative: -12 becomes "-12".

    With `unsigned`, and for torch.uint64, they are from 0 to 2**64 - 1, as unsigned ids that int64 holds.
    One integer in a row becomes a string, lists become lists of strings. Strings are returned unchanged.
    """

    unsigned: bool = False

    name: ClassVar[str] = "to_text"
    takes_text: ClassVar[bool] = True

    def check(self, *entries: Entry) -> None:
        """Integers in plain rows, without weights, or strings."""
        (entry,) = entries
        if is_text(entry):
            return
        values = values_of(entry)
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"expected integers, but received {describe_for_ids(entry)}.")
        if isinstance(entry, NestedRagged) or values.dim() > (2 if isinstance(entry, Tensor) else 1):
            raise TypeError(f"expected integers in plain rows, but received {describe(entry)}.")
        if isinstance(entry, Ragged) and entry.weights is not None:
            raise ValueError(
                "expected integers without weights, because strings cannot carry them, but received "
                f"{describe(entry)}."
            )

    def run_rows(self, *entries: Entry) -> Entry:
        """On a GPU this waits for it: the size of the text depends on the numbers."""
        (entry,) = entries
        if is_text(entry):
            return entry
        assert not isinstance(entry, NestedRagged)
        values = values_of(entry).reshape(-1)
        unsigned = self.unsigned or values.dtype is torch.uint64
        numbers = values.to(torch.int64)
        write = _write_by_arrow if numbers.is_cpu else write_anywhere
        text, inner = write(numbers, unsigned)
        if isinstance(entry, Ragged) and entry.offsets is not None:
            return NestedRagged(text, inner, entry.offsets)
        if isinstance(entry, Tensor) and entry.dim() == 2:
            count, columns = entry.shape
            return NestedRagged(text, inner, torch.arange(count + 1, device=text.device) * columns)
        return Ragged(text, inner)


def _write_by_arrow(numbers: Tensor, unsigned: bool) -> tuple[Tensor, Tensor]:
    """The same as `write_anywhere`, much faster."""
    import numpy as np
    import pyarrow as pa

    words = pa.array(numbers.numpy().view("uint64" if unsigned else "int64")).cast(pa.large_string())
    _, bounds, data = words.buffers()
    offsets = torch.from_numpy(np.frombuffer(bounds, np.int64, len(numbers) + 1).copy())
    text = torch.from_numpy(np.frombuffer(data, np.uint8, int(offsets[-1])).copy())
    return text, offsets


def write_anywhere(numbers: Tensor, unsigned: bool = False) -> tuple[Tensor, Tensor]:
    """The decimal text of integers, one after the other, and its offsets, in torch's arithmetic."""
    large = (numbers < 0) & unsigned  # from 2**63 on: their last digit is written for itself
    tens = ((numbers >> 1) & _INT64.max) // 5
    below = torch.where(numbers > 0, -numbers, numbers)  # the smallest number has no opposite
    below = torch.where(large, -tens, below)
    powers = torch.tensor([10**n for n in range(_DIGITS)], device=numbers.device)
    digits = 1 + (below.unsqueeze(1) <= -powers[1:]).sum(1) + large
    offsets = offsets_from(digits + ((numbers < 0) & ~large))
    total = int(offsets[-1])
    word = row_numbers(offsets.diff(), total)
    place = offsets[1:][word] - 1 - torch.arange(total, device=word.device)  # 0 is the last digit
    power = (place - large[word].to(torch.int64)).clamp(0, _DIGITS - 1)
    shifted = torch.div(below[word], powers[power], rounding_mode="trunc")
    text = ord("0") - torch.fmod(shifted, 10)
    text = torch.where(large[word] & (place == 0), ord("0") + (numbers - 10 * tens)[word], text)
    return torch.where(place < digits[word], text, ord("-")).to(torch.uint8), offsets
