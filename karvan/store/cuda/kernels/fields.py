"""Where kernels find things: in descriptors and counters that the host writes for them, and in rows.

A descriptor is a row of int64 numbers; addresses are among them. Both sides use the names of this file.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)  # positions that one program looks up; those of a feature start at a multiple

# A feature in a batch.
VALUES = tl.constexpr(0)  # the address of its ids
CELLS = tl.constexpr(1)  # how many ids
BASE = tl.constexpr(2)  # its first position
TABLE = tl.constexpr(3)  # the index of its table in the store
OFFSETS = tl.constexpr(4)  # the address of the samples' offsets; 0: each sample has one id
WEIGHTS = tl.constexpr(5)  # the address of the ids' weights; 0: none
SAMPLES = tl.constexpr(6)
LENGTH = tl.constexpr(7)  # padded: cells of a sample
STACK = tl.constexpr(8)  # positions of a cell
MODE = tl.constexpr(9)  # 0 pooled, 1 cells, 2 padded
COMBINER = tl.constexpr(10)  # 0 sum, 1 mean, 2 sqrtn, 3 mean by count
OUT = tl.constexpr(11)  # the address of its output
OUT_ROWS = tl.constexpr(12)  # rows of its output
OUT_BASE = tl.constexpr(13)  # its first output row, where all outputs follow one another in whole blocks
GRADIENT = tl.constexpr(14)  # the address of its output's gradient; 0: none
GRADIENT_STRIDE = tl.constexpr(15)  # floats from one of the gradient's rows to the next
SAMPLE_BASE = tl.constexpr(
    16
)  # its first sample, where those of all features follow one another in whole blocks
SLOT = tl.constexpr(17)  # the index of its table among those of the lookup
FEATURE_FIELDS = tl.constexpr(18)

# A table.
INDEX = tl.constexpr(0)  # the address of its index
MASK = tl.constexpr(1)  # the number of slots, a power of two, less one
OLD_INDEX = tl.constexpr(2)  # the address of the index that it grows out of; 0: none
OLD_MASK = tl.constexpr(3)
STREAM = tl.constexpr(4)  # of its initial vectors
ADMITS = tl.constexpr(5)  # 1 if every key gets a row
VERSION = tl.constexpr(6)  # of the table, by which a row is known to be older or newer than a lookup
INIT = tl.constexpr(7)  # 0 constant, 1 uniform, 2 normal, 3 truncated normal, 4 gamma, 5 poisson
INIT_FIRST = tl.constexpr(8)  # truncated normal: the first number that lies inside
INIT_COUNT = tl.constexpr(9)  # truncated normal: how many do
TABLE_FIELDS = tl.constexpr(16)

# A table's initial vectors, as doubles.
INIT_A = tl.constexpr(0)
INIT_B = tl.constexpr(1)
INIT_LOW = tl.constexpr(2)
INIT_HIGH = tl.constexpr(3)
INIT_TOP = tl.constexpr(4)  # uniform: the largest value
INIT_FIELDS = tl.constexpr(8)

# Counters of a table.
USED = tl.constexpr(0)  # slots of the index that hold a key, also one that has lost its row
ROWS = tl.constexpr(1)
INSERTED = tl.constexpr(2)
REJECTED = tl.constexpr(3)
DROPPED = tl.constexpr(4)
SKIPPED = tl.constexpr(5)
EVICTED = tl.constexpr(6)
TIER_HITS = tl.constexpr(7)  # distinct rows of training lookups that were on the device
TIER_MISSES = tl.constexpr(8)  # and those that were in host memory
TIER_EXCHANGES = tl.constexpr(9)  # rows that have come to the device
COUNTERS = tl.constexpr(16)

# Counters of an arena.
NEXT_ROW = tl.constexpr(0)  # the first row that was never used
FREE_HEAD = tl.constexpr(1)  # of the queue of free rows
FREE_TAIL = tl.constexpr(2)
FAULTS = tl.constexpr(3)  # wrong offsets that a kernel met
FREE_ROWS = tl.constexpr(4)  # the address of the queue of free rows
FREE_MASK = tl.constexpr(5)  # the size of that queue, a power of two, less one
ARENA_COUNTERS = tl.constexpr(8)

# The head of a batch.
STEP = tl.constexpr(0)
PLAIN_END = tl.constexpr(1)  # the end of the positions of plain features
INVERSE_SCALE = tl.constexpr(2)  # a double: gradients are multiplied by it
SCALE = tl.constexpr(3)  # the address of a float that gradients are divided by, too; 0: none
FOUND_INF = tl.constexpr(4)  # the address of a float: unless it is 0.0, nothing is updated; 0: none
HEAD = tl.constexpr(6)

# Counters of one lookup.
FRESH = tl.constexpr(0)  # new rows
PENDING = tl.constexpr(1)  # positions whose row another program was inserting
MISSING = tl.constexpr(2)  # positions of tables that do not admit every key
UNIQUE = tl.constexpr(3)  # distinct rows
PIECES = tl.constexpr(4)  # of long runs
LONG_RUNS = tl.constexpr(5)
WORK = tl.constexpr(8)


# Numbers that a graph reads from page-locked memory: a kernel starts sooner after it than after a copy.


@triton.jit(do_not_specialize=["count"])
def read_numbers(address, target, count, SIZE: tl.constexpr):
    """Copy int64 numbers from an address of the host."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    origin = address.to(tl.pointer_type(tl.int64)) + at
    tl.store(target + at, tl.load(origin, mask=at < count, volatile=True), mask=at < count)


# Addresses of rows, and their vectors as floats.
#
# Rows have numbers; a chunk of memory holds 2^SHIFT of them:
#
#     row 0 | row 1 | … | hash 0 | hash 1 | … | count, last step, birth, change of 0 | of 1 | …
#
# A row is [vector, padded to 4 bytes | optimizer state, float32], padded to STRIDE bytes. Row 0 is all zeros:
# the vector of keys without a row. A birth is the table's version when the row was inserted, a change the
# version of its last change; a free row has the birth -1.

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
