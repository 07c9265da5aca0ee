"""The backward: gradients summed by row (see `runs`), and the optimizers' rules, in one kernel.

The rules are those of csrc/kernels/apply.inc. A row whose gradient is not finite stays as it is.
"""

import triton
import triton.language as tl

from karvan.native import RULES
from karvan.store.cuda.kernels.fields import (
    BLOCK,
    COUNTERS,
    FEATURE_FIELDS,
    FOUND_INF,
    LONG_RUNS,
    SKIPPED,
    SLOT,
    TABLE,
    UNIQUE,
    floats,
    hash_pointer,
    read_vector,
    row_address,
    write_rounded,
)
from karvan.store.cuda.kernels.find import rounding_noise
from karvan.store.cuda.kernels.runs import PIECE, head_number, sum_of_pieces, sum_positions
from karvan.store.types import RULE_NUMBERS

_KIND = {name: tl.constexpr(number) for number, name in enumerate(RULES)}
SGD, MOMENTUM, NESTEROV = _KIND["sgd"], _KIND["momentum"], _KIND["nesterov"]
ADAGRAD, ADAGRAD_ROW = _KIND["adagrad"], _KIND["adagrad_row"]
ADAM, ADAMW, AMSGRAD = _KIND["adam"], _KIND["adamw"], _KIND["amsgrad"]
FTRL = _KIND["ftrl"]

# A rule in memory: its kind, then its numbers.
KIND = tl.constexpr(0)
_PLACE = {name: tl.constexpr(1 + place) for place, name in enumerate(RULE_NUMBERS)}
LR, BETA1, BETA2, EPS = _PLACE["lr"], _PLACE["beta1"], _PLACE["beta2"], _PLACE["eps"]
WEIGHT_DECAY, SHRINK, ALPHA = _PLACE["weight_decay"], _PLACE["shrink"], _PLACE["alpha"]
L1, L2, ACCUMULATE_LAST = _PLACE["l1"], _PLACE["l2"], _PLACE["accumulate_last"]
CLIP_VALUE, CLIP_NORM, BOUND = _PLACE["clip_value"], _PLACE["clip_norm"], _PLACE["bound"]
RULE_FIELDS = tl.constexpr(16)


@triton.jit
def read_state(
    address,
    column,
    mask,
    DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    STATE: tl.constexpr,
    ROW_STATE: tl.constexpr,
):
    """The optimizer state at `address`, in three parts; a part that the rule does not have is 0.

    STATE, ROW_STATE: the floats that the rule has for each column, and for the row.

    It is read before gradients are summed, so that the memory serves both at the same time.
    """
    first = tl.zeros(mask.shape, tl.float32)
    second = tl.zeros(mask.shape, tl.float32)
    third = tl.zeros(mask.shape, tl.float32)
    tl.static_assert((STATE <= 3) & (ROW_STATE <= 1) & (STATE * ROW_STATE == 0), "state of another shape")
    if ROW_STATE == 1:
        alive = tl.max(mask.to(tl.int32), axis=1)[:, None] > 0
        first = tl.load(address.to(tl.pointer_type(tl.float32)), mask=alive, other=0.0) + first
    if STATE >= 1:
        pointer = floats(address, column, 16 if VECTOR % 16 == 0 else 4)
        first = tl.load(pointer, mask=mask, other=0.0)
    if STATE >= 2:
        pointer = floats(address + 4 * DIM, column, 16 if (VECTOR + 4 * DIM) % 16 == 0 else 4)
        second = tl.load(pointer, mask=mask, other=0.0)
    if STATE >= 3:
        pointer = floats(address + 8 * DIM, column, 16 if (VECTOR + 8 * DIM) % 16 == 0 else 4)
        third = tl.load(pointer, mask=mask, other=0.0)
    return first, second, third


@triton.jit
def apply_rule(
    rule,
    vector,
    states,
    gradient,
    address,
    column,
    mask,
    DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    RULE: tl.constexpr,
    LIMITS: tl.constexpr,
):
    """The new vectors of rows (n, columns) by the numbers `rule` (n, 1); writes their state at `address`.

    states: what `read_state` returned.
    """
    first, second, third = states
    state = floats(address, column, 16 if VECTOR % 16 == 0 else 4)
    second_state = floats(address + 4 * DIM, column, 16 if (VECTOR + 4 * DIM) % 16 == 0 else 4)
    lr = tl.load(rule + LR)
    if LIMITS:
        clip = tl.load(rule + CLIP_VALUE)
        gradient = tl.where(clip > 0, tl.minimum(tl.maximum(gradient, -clip), clip), gradient)
        most = tl.load(rule + CLIP_NORM)
        norm = tl.sqrt_rn(tl.sum(tl.where(mask, gradient * gradient, 0.0), axis=1))[:, None]
        shrinks = (most > 0) & (norm > most)
        gradient = tl.where(shrinks, gradient * tl.div_rn(most, tl.where(shrinks, norm, 1.0)), gradient)
        gradient = gradient + vector * tl.load(rule + WEIGHT_DECAY)
    if RULE == SGD:
        fresh = vector - gradient * lr
    elif (RULE == MOMENTUM) | (RULE == NESTEROV):
        factor = tl.load(rule + BETA1)
        buffer = first * factor + gradient
        tl.store(state, buffer, mask=mask)
        if RULE == NESTEROV:
            buffer = gradient + buffer * factor
        fresh = vector - buffer * lr
    elif RULE == ADAGRAD:
        after = first * tl.load(rule + BETA1) + gradient * gradient
        tl.store(state, after, mask=mask)
        used = tl.where(tl.load(rule + ACCUMULATE_LAST) != 0, first, after)
        fresh = vector - tl.div_rn(gradient * lr, tl.sqrt_rn(used) + tl.load(rule + EPS))
    elif RULE == ADAGRAD_ROW:
        mean = tl.sum(tl.where(mask, gradient * gradient, 0.0), axis=1)[:, None] / DIM
        after = first * tl.load(rule + BETA1) + mean
        pointer = address.to(tl.pointer_type(tl.float32)) + tl.zeros_like(column)
        tl.store(pointer, after, mask=mask & (column == 0))
        used = tl.where(tl.load(rule + ACCUMULATE_LAST) != 0, first, after)
        fresh = vector - tl.div_rn(gradient * lr, tl.sqrt_rn(used) + tl.load(rule + EPS))
    elif (RULE == ADAM) | (RULE == ADAMW) | (RULE == AMSGRAD):
        if RULE != ADAM:
            vector = vector * tl.load(rule + SHRINK)
        beta1 = tl.load(rule + BETA1)
        beta2 = tl.load(rule + BETA2)
        m = first * beta1 + gradient * (1.0 - beta1)
        v = second * beta2 + gradient * gradient * (1.0 - beta2)
        tl.store(state, m, mask=mask)
        tl.store(second_state, v, mask=mask)
        if RULE == AMSGRAD:
            v = tl.maximum(third, v)
            third_state = floats(address + 8 * DIM, column, 16 if (VECTOR + 8 * DIM) % 16 == 0 else 4)
            tl.store(third_state, v, mask=mask)
        fresh = vector - tl.div_rn(m * tl.load(rule + ALPHA), tl.sqrt_rn(v) + tl.load(rule + EPS))
    elif RULE == FTRL:
        after = second + gradient * gradient
        rate = tl.broadcast_to(lr, gradient.shape)
        sigma = tl.div_rn(tl.sqrt_rn(after) - tl.sqrt_rn(second), rate)
        z = first + gradient - sigma * vector
        tl.store(state, z, mask=mask)
        tl.store(second_state, after, mask=mask)
        l1 = tl.load(rule + L1)
        excess = tl.maximum(z - l1, 0.0) + tl.minimum(z + l1, 0.0)
        divisor = tl.div_rn(tl.sqrt_rn(after) + tl.load(rule + BETA1), rate) + tl.load(rule + L2)
        fresh = -tl.div_rn(excess, tl.where(mask, divisor, 1.0))
    else:
        tl.static_assert(False, "a rule has no formula on the GPU")
    if LIMITS:
        bound = tl.load(rule + BOUND)
        fresh = tl.where(bound > 0, tl.minimum(tl.maximum(fresh, -bound), bound), fresh)
    return fresh


@triton.jit
def update_rows(
    work,
    order,
    features,
    feature_of,
    out_rows,
    factors,
    starts,
    run_rows,
    run_pieces,
    long_runs,
    partial,
    rules,
    steps,
    counters,
    chunks,
    head,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    TYPE: tl.constexpr,
    RULE: tl.constexpr,
    STATE: tl.constexpr,
    ROW_STATE: tl.constexpr,
    LIMITS: tl.constexpr,
    SAME: tl.constexpr,
    LONG: tl.constexpr,
):
    """Update the row of each short run by its positions, or that of each LONG run by its pieces.

    SAME: all tables have the rule 0, otherwise each slot has its own.
    """
    count = tl.load(work + (LONG_RUNS if LONG else UNIQUE))
    count = tl.where(head_number(head, FOUND_INF, 0.0) == 0.0, count, 0)
    reads = (order, features, feature_of, out_rows, factors)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    for start in range(tl.program_id(0) * GROUP, count, tl.num_programs(0) * GROUP):
        number = start + tl.arange(0, GROUP)
        valid = number < count
        if LONG:
            number = tl.load(long_runs + number, mask=valid, other=0)
        row = tl.load(run_rows + number, mask=valid, other=0)
        first = tl.load(starts + number, mask=valid, other=0)
        size = tl.load(starts + number + 1, mask=valid, other=0) - first
        valid = valid & (row > 0)
        if not LONG:
            valid = valid & (size <= PIECE)
        address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
        slot = tl.zeros_like(row)
        if not SAME:
            position = tl.load(order + first, mask=valid, other=0)
            feature = tl.load(feature_of + position // BLOCK, mask=valid, other=0)
            slot = tl.load(features + feature * FEATURE_FIELDS + SLOT, mask=valid, other=0).to(tl.int32)
            valid = valid & (tl.load(rules + slot * RULE_FIELDS + KIND) == RULE)
        rule = (rules + slot * RULE_FIELDS)[:, None]
        mask = valid[:, None] & inside
        vector = read_vector(address, column[None, :], mask, TYPE)
        states = read_state(address + VECTOR, column[None, :], mask, DIM, VECTOR, STATE, ROW_STATE)
        size = tl.where(valid, size, 0)
        if LONG:
            gradient = sum_of_pieces(partial, run_pieces, number, size, column, DIM, TOGETHER)
        else:
            gradient = sum_positions(reads, first, size, column, head, DIM, TOGETHER, MAPPED, ALIGNED)
        wrong = tl.max(tl.where(gradient * 0.0 == 0.0, 0, 1), axis=1) > 0
        bad = valid & wrong
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            position = tl.load(order + first, mask=bad, other=0)
            feature = tl.load(feature_of + position // BLOCK, mask=bad, other=0)
            table = tl.load(features + feature * FEATURE_FIELDS + TABLE, mask=bad, other=0)
            tl.atomic_add(counters + table * COUNTERS + SKIPPED, tl.full(table.shape, 1, tl.int64), mask=bad)
        valid = valid & ~wrong
        mask = valid[:, None] & inside
        place, at = address + VECTOR, column[None, :]
        fresh = apply_rule(rule, vector, states, gradient, place, at, mask, DIM, VECTOR, RULE, LIMITS)
        if TYPE == 0:
            write_rounded(address, column[None, :], fresh, 0, mask, TYPE)
        else:
            hashes = tl.load(hash_pointer(chunks, row, SHIFT, STRIDE))
            noise = rounding_noise(hashes[:, None], tl.load(steps + slot)[:, None], column[None, :])
            write_rounded(address, column[None, :], fresh, noise, mask, TYPE)
