"""Initial vectors of new rows: csrc/table/init.h, version 1, in the same order of operations.

Compiled without fused multiply-adds, all of it gives the CPU's bits.
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    FREE_HEAD,
    FREE_TAIL,
    FRESH,
    INIT,
    INIT_A,
    INIT_B,
    INIT_COUNT,
    INIT_FIELDS,
    INIT_FIRST,
    INIT_HIGH,
    INIT_LOW,
    INIT_TOP,
    PENDING,
    STREAM,
    TABLE_FIELDS,
    floats,
    hash_pointer,
    row_address,
    write_nearest,
)
from karvan.store.cuda.kernels.find import draw, mix

UNIFORM = tl.constexpr(1)
NORMAL = tl.constexpr(2)
TRUNCATED = tl.constexpr(3)
GAMMA = tl.constexpr(4)
POISSON = tl.constexpr(5)
_GAMMA_ATTEMPTS = tl.constexpr(16)
_POISSON_MOST = tl.constexpr(2000)
_SQRT_HALF = tl.constexpr(0x3FE6A09E667F3BCD)  # the bits of sqrt(1/2)


@triton.jit
def natural_log(u):
    """The natural logarithm of positive doubles, to about 1e-15."""
    bits = u.to(tl.int64, bitcast=True)
    exponent = (bits - _SQRT_HALF) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1) / (m + 1)
    square = s * s
    total = tl.full(u.shape, 1.0, tl.float64) / 19
    for step in tl.static_range(8):
        total = total * square + tl.full(u.shape, 1.0, tl.float64) / (17 - 2 * step)
    total = total * square + 1.0
    return exponent.to(tl.float64) * 0.693147180559945309417 + 2 * s * total


@triton.jit
def natural_exp(x):
    """e to the power of doubles that are not positive, to about 1e-13; 0 below -700."""
    near = tl.maximum(x, -700.0)
    n = (0.5 - near / 0.693147180559945309417).to(tl.int64)
    r = near + n.to(tl.float64) * 0.693147180559945309417
    total = tl.full(x.shape, 1.0, tl.float64)
    for below in tl.static_range(14):
        total = total * r / (14 - below) + 1.0
    scale = ((1023 - n) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < -700.0, 0.0, total * scale)


@triton.jit
def _unit(x):
    return (x.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gamma_value(shape, stream, wanted):
    """Values of gamma distributions where they are wanted, each from its stream of draws, an int64."""
    d = tl.where(shape < 1, shape + 1, shape) - tl.full(shape.shape, 1.0, tl.float64) / 3
    c = 1.0 / tl.sqrt(9 * d)
    value = d + tl.zeros(stream.shape, tl.float64)
    waiting = wanted
    attempt = 1
    while (attempt <= _GAMMA_ATTEMPTS) & (tl.max(tl.max(waiting.to(tl.int32), axis=1), axis=0) > 0):
        both = draw(stream, tl.zeros_like(stream) + attempt)
        z = quantile((both & 0xFFFFFFFF).to(tl.uint32))
        root = 1 + c * z
        v = tl.where(root > 0, root * root * root, 1.0)
        limit = 0.5 * z * z + d - d * v + d * natural_log(v)
        accepted = waiting & (root > 0) & (natural_log(_unit(both >> 32)) < limit)
        value = tl.where(accepted, d * v, value)
        waiting = waiting & ~accepted
        attempt += 1
    u = _unit(draw(stream, tl.zeros_like(stream)) & 0xFFFFFFFF)
    return tl.where(shape < 1, value * natural_exp(natural_log(u) / shape), value)


@triton.jit
def poisson_value(rate, x, wanted):
    """Values of Poisson distributions where they are wanted, x uint32."""
    u = _unit(x)
    probability = natural_exp(-rate) + tl.zeros(x.shape, tl.float64)
    total = probability
    value = tl.zeros(x.shape, tl.float64)
    waiting = wanted & (u > total)
    k = 0
    while (k < _POISSON_MOST) & (tl.max(tl.max(waiting.to(tl.int32), axis=1), axis=0) > 0):
        k += 1
        number = tl.zeros(x.shape, tl.float64) + k
        probability = probability * rate / number
        total = total + probability
        value = tl.where(waiting, number, value)
        waiting = waiting & (u > total)
    return value


@triton.jit
def quantile(x):
    """The normal quantile at (x + 0.5) / 2^32, x uint32: algorithm AS 241, PPND16 (Wichura, 1988)."""
    q = ((x ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    r = 0.180625 - q * q
    above = r * 2509.0809287301226727 + 33430.575583588128105
    above = above * r + 67265.770927008700853
    above = above * r + 45921.953931549871457
    above = above * r + 13731.693765509461125
    above = above * r + 1971.5909503065514427
    above = above * r + 133.14166789178437745
    above = above * r + 3.3871328727963666080
    below = r * 5226.4952788528545610 + 28729.085735721942674
    below = below * r + 39307.895800092710610
    below = below * r + 21213.794301586595867
    below = below * r + 5394.1960214247511077
    below = below * r + 687.18700749205790830
    below = below * r + 42.313330701600911252
    below = below * r + 1.0
    central = q * above / below
    distance = tl.abs(q)
    r = tl.sqrt(-natural_log(0.5 - distance)) - 1.6
    above = r * 7.74545014278341407640e-4 + 0.0227238449892691845833
    above = above * r + 0.241780725177450611770
    above = above * r + 1.27045825245236838258
    above = above * r + 3.64784832476320460504
    above = above * r + 5.76949722146069140550
    above = above * r + 4.63033784615654529590
    above = above * r + 1.42343711074968357734
    below = r * 1.05075007164441684324e-9 + 5.47593808499534494600e-4
    below = below * r + 0.0151986665636164571966
    below = below * r + 0.148103976427480074590
    below = below * r + 0.689767334985100004550
    below = below * r + 1.67638483018380384940
    below = below * r + 2.05319162663775882187
    below = below * r + 1.0
    tail = above / below
    tail = tl.where(q < 0, -tail, tail)
    return tl.where(distance > 0.425, tail, central)


@triton.jit
def initial_vector(tables, inits, table, hashes, column, LEVEL: tl.constexpr):
    """The initial values of rows (n,) of tables (n,) at columns (c,), as float32 (n, c).

    LEVEL: 0 if no table has more than uniform values, 1 if some have normal ones, 2 for all kinds.
    """
    of_table = tables + table * TABLE_FIELDS
    of_init = inits + table * INIT_FIELDS
    kind = tl.load(of_table + INIT)[:, None]
    a = tl.load(of_init + INIT_A)[:, None]
    b = tl.load(of_init + INIT_B)[:, None]
    state = mix(hashes ^ tl.load(of_table + STREAM))
    drawn = draw(state[:, None], (column >> 1)[None, :].to(tl.int64))
    x = tl.where((column & 1)[None, :] == 1, drawn >> 32, drawn & 0xFFFFFFFF).to(tl.uint32)
    low = a.to(tl.float32)
    width = b.to(tl.float32) - low
    u = (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    top = tl.load(of_init + INIT_TOP)[:, None].to(tl.float32)
    value = tl.where(kind == UNIFORM, tl.minimum(low + width * u, top), low)
    if LEVEL > 1:
        least = tl.load(of_init + INIT_LOW)[:, None].to(tl.float32)
        most = tl.load(of_init + INIT_HIGH)[:, None].to(tl.float32)
        is_gamma = tl.broadcast_to(kind == GAMMA, x.shape)
        stream = draw(state[:, None], column[None, :].to(tl.int64)).to(tl.int64, bitcast=True)
        drawn_gamma = (b * gamma_value(tl.where(kind == GAMMA, a, 1.0), stream, is_gamma)).to(tl.float32)
        value = tl.where(is_gamma, tl.minimum(tl.maximum(drawn_gamma, least), most), value)
        is_poisson = tl.broadcast_to(kind == POISSON, x.shape)
        counted = poisson_value(tl.where(kind == POISSON, a, 0.0), x, is_poisson).to(tl.float32)
        value = tl.where(is_poisson, tl.minimum(tl.maximum(counted, least), most), value)
    if LEVEL > 0:
        first = tl.load(of_table + INIT_FIRST)[:, None]
        count = tl.load(of_table + INIT_COUNT)[:, None].to(tl.uint64)
        inside = first + ((x.to(tl.uint64) * count) >> 32).to(tl.int64)
        x = tl.where(kind == TRUNCATED, inside, x.to(tl.int64)).to(tl.uint32)
        normal = (a + b * quantile(x)).to(tl.float32)
        least = tl.load(of_init + INIT_LOW)[:, None].to(tl.float32)
        most = tl.load(of_init + INIT_HIGH)[:, None].to(tl.float32)
        value = tl.where(kind == NORMAL, normal, value)
        value = tl.where(kind == TRUNCATED, tl.minimum(tl.maximum(normal, least), most), value)
    return value


@triton.jit
def finish_inserts(
    tables,
    inits,
    states,
    arena,
    chunks,
    work,
    rows,
    fresh_rows,
    fresh_tables,
    pending,
    pending_places,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    TYPE: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """Fill new rows, and give positions the rows that other programs were inserting for them."""
    program = tl.program_id(0)
    if program == 0:  # programs took more than there was in the queue
        tail = tl.load(arena + FREE_TAIL)
        tl.store(arena + FREE_HEAD, tl.minimum(tl.load(arena + FREE_HEAD), tail))
    column = tl.arange(0, COLUMNS)
    count = tl.load(work + FRESH)
    for start in range(program * GROUP, count, tl.num_programs(0) * GROUP):
        number = start + tl.arange(0, GROUP)
        valid = number < count
        row = tl.load(fresh_rows + number, mask=valid, other=0)
        table = tl.load(fresh_tables + number, mask=valid, other=0)
        hashes = tl.load(hash_pointer(chunks, row, SHIFT, STRIDE))
        value = initial_vector(tables, inits, table, hashes, column, LEVEL)
        address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
        mask = valid[:, None] & (column < DIM)[None, :]
        write_nearest(address, column[None, :], value, mask, TYPE)
        if STATE > 0:
            field = tl.arange(0, STATES)
            mask = valid[:, None] & (field < STATE)[None, :]
            initial = tl.load(states + table[:, None] * STATE + field[None, :], mask=mask, other=0.0)
            tl.store(
                floats(address + VECTOR, field[None, :], 16 if VECTOR % 16 == 0 else 4), initial, mask=mask
            )
    waiting = tl.load(work + PENDING)
    for start in range(program * 128, waiting, tl.num_programs(0) * 128):
        number = start + tl.arange(0, 128)
        valid = number < waiting
        position = tl.load(pending + number, mask=valid, other=0)
        place = tl.load(pending_places + number, mask=valid, other=0).to(tl.pointer_type(tl.int64))
        tl.store(rows + position, tl.load(place, mask=valid, other=0).to(tl.int32), mask=valid)
