"""Growth of an index: its slots move to a larger one, some in each step, while lookups use both."""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import BLOCK, COUNTERS, USED
from karvan.store.cuda.kernels.find import SPARE_LANES, claim, first_slot


@triton.jit(do_not_specialize=["table", "first", "count"])
def move_slots(old, old_mask, index, mask, counters, table, spare, first, count, WIDTH: tl.constexpr):
    """Copy the slots [first, first + count) of an old index that have a row into the new one.

    Slot old_mask + 1 is that of the key whose hash is 0.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = first + number
    there = number < count
    words = old + slot.to(tl.int64) * 16
    hashes = tl.load(words.to(tl.pointer_type(tl.int64)), mask=there, other=0)
    row = tl.load((words + 8).to(tl.pointer_type(tl.int64)), mask=there, other=0)
    wanted = there & (row > 0)
    hashes = tl.where(slot == old_mask + 1, 0, hashes)
    lanes = spare + (number % SPARE_LANES).to(tl.int64) * 16
    place, claimed = claim(index, mask, first_slot(mask, hashes, WIDTH), hashes, wanted, lanes)
    tl.store(place.to(tl.pointer_type(tl.int64)), row, mask=wanted)
    tl.atomic_add(counters + table * COUNTERS + USED, tl.sum(claimed.to(tl.int64), axis=0))
