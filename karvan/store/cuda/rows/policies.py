"""Eviction on the device: which rows a table's policy removes; csrc/table/evict.cpp has the same rules.

A table with a capacity must evict after a lookup that has brought more rows than that, which the host cannot
know at once. It looks before the next call that meets the table's rows (`settle`), mostly the update: by then
the model is queued behind the lookup, so the device is busy while the host waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.store.cuda.rows import contents
from karvan.store.cuda.rows.contents import RowFields
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.rows.tables import DeviceTable

_SIGN = -(1 << 63)
_LARGE = 65536  # a capacity from which a sixteenth is removed at once


def maintain(memory: TableMemory, table: DeviceTable, step: int, now: float) -> None:
    """What the policy asks for after the training lookup of a step."""
    kind, value, every = table.spec.evict
    if kind in ("lru", "lfu"):
        if memory.rows_bound(table) > value:
            memory.request_numbers()
            memory.overdue[table] = None
    elif kind == "ttl":
        time = table.advance_time(now)
        if step % every == 0:
            _evict_expired(memory, table, time)
        clock = table.clock
        while len(clock) > 1 and clock[1][1] <= time - value:
            clock.pop(0)
        if len(clock) > 1 and time - clock[-2][1] < value / 64:
            clock[-1] = (step, time)
        else:
            clock.append((step, time))
    elif kind != "never" and step % every == 0:
        evict(memory, table, step, now)


def settle(memory: TableMemory) -> None:
    """Evict rows beyond capacities; waits for the last lookup, not for what is queued behind it."""
    if not memory.overdue:
        return
    memory.learn_requested()
    for table in list(memory.overdue):
        del memory.overdue[table]
        _evict_beyond(memory, table)


def evict(memory: TableMemory, table: DeviceTable, step: int, now: float) -> int:
    """Apply the policy now."""
    kind, value, _ = table.spec.evict
    if kind in ("lru", "lfu"):
        memory.learn_now()
        return _evict_beyond(memory, table)
    if kind == "age":
        if step <= value:
            return 0
        noted = contents.list_rows(memory, table)
        return _erase_where(memory, table, noted, _unsigned(noted.lasts) < step - int(value))
    if kind == "ttl":
        return _evict_expired(memory, table, table.advance_time(now))
    if kind == "norm":
        noted = contents.list_rows(memory, table)
        vectors = contents.read_vectors(memory, table, noted.rows)
        limit = float(torch.tensor(value, dtype=torch.float32)) ** 2
        return _erase_where(memory, table, noted, vectors.double().square().sum(1) < limit)
    return 0


def _evict_beyond(memory: TableMemory, table: DeviceTable) -> int:
    """Remove the rows beyond the capacity of a table, whose number is known."""
    kind, value, _ = table.spec.evict
    capacity, present = int(value), memory.rows_bound(table)
    if present <= capacity:
        return 0
    spare = capacity // 16 if capacity >= _LARGE else 0
    return _evict_least(memory, table, present - capacity + spare, kind == "lfu")


def _evict_expired(memory: TableMemory, table: DeviceTable, time: float) -> int:
    seconds = table.spec.evict[1]
    expired = max((step + 1 for step, noted in table.clock if noted <= time - seconds), default=0)
    if not expired:
        return 0
    noted = contents.list_rows(memory, table)
    return _erase_where(memory, table, noted, _unsigned(noted.lasts) < expired)


def _evict_least(memory: TableMemory, table: DeviceTable, count: int, by_uses: bool) -> int:
    """Remove the rows with the least (last use, uses) or (uses, last use), then hash."""
    noted = contents.list_rows(memory, table)  # in the order of hashes, which a stable sort keeps
    count = min(count, noted.rows.numel())
    first, second = (noted.counts, noted.lasts) if by_uses else (noted.lasts, noted.counts)
    rank = ((_unsigned(first) << 32) | _unsigned(second)) ^ _SIGN
    least = torch.sort(rank, stable=True).indices[:count]
    return contents.erase_hashes(memory, table, noted.hashes[least].contiguous())


def _erase_where(memory: TableMemory, table: DeviceTable, noted: RowFields, chosen: Tensor) -> int:
    return contents.erase_hashes(memory, table, noted.hashes[chosen])


def _unsigned(numbers: Tensor) -> Tensor:
    return numbers.long() & 0xFFFFFFFF
