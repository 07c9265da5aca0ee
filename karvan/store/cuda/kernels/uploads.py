"""Numbers that a graph reads from page-locked memory: a kernel starts sooner after it than after a copy."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def read_numbers(address, target, count, SIZE: tl.constexpr):
    """Copy int64 numbers from an address of the host."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    origin = address.to(tl.pointer_type(tl.int64)) + at
    tl.store(target + at, tl.load(origin, mask=at < count, volatile=True), mask=at < count)
