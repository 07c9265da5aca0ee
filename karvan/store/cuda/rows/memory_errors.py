"""What to say when the GPU or the machine has no more memory: which tables there are, and how large."""

from __future__ import annotations

from types import TracebackType

import torch

from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.tier.host_memory import HostMemoryError


class MemoryReport:
    """Within it, an error of a full GPU or machine names the tables and their sizes."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, torch.OutOfMemoryError):
            return
        memory = self._memory
        sizes = sorted(
            ((memory.bytes(table), table.spec.name, table) for table in memory.tables.values()), reverse=True
        )
        listed = ", ".join(
            f"{name} ({size / 2**30:.2f} GiB, {memory.rows_bound(table):,} rows)"
            for size, name, table in sizes[:10]
        )
        more = f" and {len(sizes) - 10} more" if len(sizes) > 10 else ""
        if isinstance(error, HostMemoryError):
            raise HostMemoryError(
                f"There is no memory left on the machine for rows beyond device_memory: {error}. Tables: "
                f"{listed}{more}. Limit tables by evict=kv.eviction.LRU(…), or train on several machines "
                'with kv.connect("sharded", device="cuda").'
            ) from error
        free, total = torch.cuda.mem_get_info(memory.device)
        advice = 'give rows less of it by kv.connect("cuda", device_memory="…")'
        if memory.budget is None:
            advice = (
                'keep the rows that are used least in the memory of the machine by kv.connect("cuda", '
                'device_memory="…"), or some tables by Table(device="cpu")'
            )
        raise torch.OutOfMemoryError(
            f"There is no memory left on {memory.device} for more rows: {free / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB are free. Tables: {listed}{more}. Limit tables by "
            f'evict=kv.eviction.LRU(…), {advice}, or train on several GPUs with kv.connect("sharded").'
        ) from error
