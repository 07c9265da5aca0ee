"""What to say when the GPU has no more memory: which tables there are, and how large they are."""

from __future__ import annotations

from types import TracebackType

import torch

from karvan.store.cuda.rows.table_memory import TableMemory


class MemoryReport:
    """Within it, an error of a full GPU names the tables and their sizes."""

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
        free, total = torch.cuda.mem_get_info(memory.device)
        raise torch.OutOfMemoryError(
            f"There is no memory left on {memory.device} for more rows: {free / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB are free. Tables: {listed}{more}. Limit tables by "
            'evict=kv.eviction.LRU(…), keep some in the memory of the machine with Table(device="cpu"), or '
            'train on several GPUs with kv.connect("sharded").'
        ) from error
