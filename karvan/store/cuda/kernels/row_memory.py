"""Addresses of rows, and their vectors as floats.

Rows have numbers; a chunk of memory holds 2^SHIFT of them:

    row 0 | row 1 | … | hash 0 | hash 1 | … | count, last step, birth, change of 0 | of 1 | …

A row is [vector, padded to 4 bytes | optimizer state, float32], padded to STRIDE bytes. Row 0 is all zeros:
the vector of keys without a row. A birth is the table's version when the row was inserted, a change the
version of its last change; a free row has the birth -1.
"""

import triton
import triton.language as tl

COUNT = tl.constexpr(0)  # int32 fields of a row
LAST = tl.constexpr(1)
BIRTH = tl.constexpr(2)
CHANGE = tl.constexpr(3)
ROW_EXTRA = tl.constexpr(24)  # bytes of a chunk for each row, beside the row


@triton.jit
def floats(address, column, ALIGN: tl.constexpr):
    """Pointers to float32 columns of rows, whose addresses are multiples of ALIGN.

    The compiler cannot see this of addresses that were numbers; with the hints it makes wide accesses. A hint
    holds in the function that computes the pointer, so there is one such function for each type.
    """
    pointer = address.to(tl.pointer_type(tl.float32)) + column
    if ALIGN == 16:
        if len(pointer.shape) == 3:
            return tl.max_contiguous(tl.multiple_of(pointer, (1, 1, 16)), (1, 1, pointer.shape[2]))
        else:
            return tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, pointer.shape[1]))
    else:
        return pointer


@triton.jit
def bfloats(address, column):
    """Pointers to bfloat16 columns of rows."""
    pointer = address.to(tl.pointer_type(tl.bfloat16)) + column
    return tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, pointer.shape[1]))


@triton.jit
def halves(address, column):
    """Pointers to float16 columns of rows."""
    pointer = address.to(tl.pointer_type(tl.float16)) + column
    return tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, pointer.shape[1]))


@triton.jit
def shorts(address, column):
    """Pointers to the 16 bits of columns of rows."""
    pointer = address.to(tl.pointer_type(tl.uint16)) + column
    return tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, pointer.shape[1]))


@triton.jit
def row_address(chunks, row, SHIFT: tl.constexpr, STRIDE: tl.constexpr):
    """The address of each row."""
    chunk = tl.load(chunks + (row >> SHIFT))
    return tl.multiple_of(chunk + (row & ((1 << SHIFT) - 1)).to(tl.int64) * STRIDE, 16)


@triton.jit
def hash_pointer(chunks, row, SHIFT: tl.constexpr, STRIDE: tl.constexpr):
    """Where each row's hash is."""
    chunk = tl.load(chunks + (row >> SHIFT))
    local = (row & ((1 << SHIFT) - 1)).to(tl.int64)
    return (chunk + (STRIDE << SHIFT) + local * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def field_pointer(chunks, row, FIELD: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr):
    """Where each row's count, last step, birth or change is."""
    chunk = tl.load(chunks + (row >> SHIFT))
    local = (row & ((1 << SHIFT) - 1)).to(tl.int64)
    return (chunk + ((STRIDE + 8) << SHIFT) + local * 16 + FIELD * 4).to(tl.pointer_type(tl.int32))


@triton.jit
def read_vector(address, column, mask, TYPE: tl.constexpr, AGAIN: tl.constexpr = False):
    """Vectors as float32; TYPE 0 float32, 1 bfloat16, 2 float16. Addresses are (n, 1), columns (1, c).

    AGAIN: many are read again soon, so that the cache should have them for longer than other memory.
    """
    policy: tl.constexpr = "evict_last" if AGAIN else ""
    if TYPE == 0:
        vector = tl.load(floats(address, column, 16), mask=mask, other=0.0, eviction_policy=policy)
    elif TYPE == 1:
        vector = tl.load(bfloats(address, column), mask=mask, other=0.0, eviction_policy=policy)
    else:
        vector = tl.load(halves(address, column), mask=mask, other=0.0, eviction_policy=policy)
    return vector.to(tl.float32)


@triton.jit
def to_bfloat16_bits(value, noise):
    """The bits of bfloat16, rounded by adding noise below the kept bits; see csrc/kernels/convert.h."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF) + noise, 0x7F7FFFFF)
    rounded = ((bits >> 16) & 0x8000) | (magnitude >> 16)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.uint16)


@triton.jit
def to_float16_bits(value, noise):
    """The bits of float16, rounded by adding noise below the kept bits."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    fixed = (magnitude.to(tl.float32, bitcast=True) * 1099511627776.0).to(tl.uint64) + noise  # in 2^-40
    small = (fixed >> 16).to(tl.uint32)
    normal = tl.minimum((magnitude + (noise >> 3) - 0x38000000) >> 13, 0x7BFF)
    half = tl.where(magnitude < 0x38800000, small, normal)
    half = tl.where(magnitude >= 0x477FE000, 0x7BFF, half)
    half = tl.where(magnitude > 0x7F800000, 0x7E00, half)
    return (((bits >> 16) & 0x8000) | half).to(tl.uint16)


@triton.jit
def write_nearest(address, column, value, mask, TYPE: tl.constexpr):
    """Write vectors, rounded to the nearest; values beyond the type's range become its largest one."""
    bits = value.to(tl.uint32, bitcast=True)
    if TYPE == 0:
        tl.store(floats(address, column, 16), value, mask=mask)
    elif TYPE == 1:
        half = to_bfloat16_bits(value, 0x7FFF + ((bits >> 16) & 1))
        tl.store(shorts(address, column), half, mask=mask)
    else:
        magnitude = bits & 0x7FFFFFFF
        half = to_float16_bits(value, (0xFFF + ((magnitude >> 13) & 1)) << 3)
        # A subnormal is a multiple of 2^-24; adding 2^23 rounds to a whole number of them.
        units = (magnitude.to(tl.float32, bitcast=True) * 16777216.0 + 8388608.0) - 8388608.0
        tiny = ((bits >> 16) & 0x8000) | tl.minimum(units, 65535.0).to(tl.uint32)
        half = tl.where(magnitude < 0x38800000, tiny.to(tl.uint16), half)
        tl.store(shorts(address, column), half, mask=mask)


@triton.jit
def write_rounded(address, column, value, noise, mask, TYPE: tl.constexpr):
    """Write vectors, rounded by the noise."""
    if TYPE == 0:
        tl.store(floats(address, column, 16), value, mask=mask)
    elif TYPE == 1:
        half = to_bfloat16_bits(value, noise)
        tl.store(shorts(address, column), half, mask=mask)
    else:
        half = to_float16_bits(value, noise)
        tl.store(shorts(address, column), half, mask=mask)
