"""Where kernels find things: fields of the descriptors and counters that the host writes for them.

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
