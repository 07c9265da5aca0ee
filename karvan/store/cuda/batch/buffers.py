"""`LookupBuffers`: the memory that a lookup works in, from its keys to the update of its rows.

Launches take all they need from it. A graph of them can therefore be replayed for another batch of the same
shape, once the batch's descriptors are in its buffers (`graphs.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.batch.batch_ids import GroupLayout, GroupShape
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.runs import PIECE, SPAN
from karvan.store.cuda.rows.arena import RowSpace
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.transfers import Staging

_BLOCK = fields.BLOCK.value
_FIELDS = fields.FEATURE_FIELDS.value
_HEAD = fields.HEAD.value


class LookupBuffers:
    """The memory of one lookup, from its keys to the update of its rows."""

    def __init__(self, memory: TableMemory, arena: RowSpace, shape: GroupShape) -> None:
        self.memory = memory
        self.arena = arena
        self.shape = shape
        size = shape.positions * _BLOCK
        training = size if shape.training else 1
        self.mapped = shape.features > shape.plain_features
        self.most_pieces = size // (int(PIECE.value) // 2) + 1
        self.spans = -(-size // int(SPAN.value))
        device = memory.device
        ints = launch.Workspace(
            torch.int32,
            device,
            rows=size,
            feature_of=size // _BLOCK,
            work=fields.WORK.value,
            fresh=training,
            fresh_tables=training,
            pending=training,
            out_rows=size if self.mapped else 1,
            starts=size + 1,
            run_rows=size + 1,
            run_pieces=size + 1,
            long_runs=self.most_pieces,
            piece_starts=self.most_pieces,
            piece_ends=self.most_pieces,
            span_runs=self.spans,
        )
        self.rows, self.feature_of, self.work = ints["rows"], ints["feature_of"], ints["work"]
        self.fresh, self.fresh_tables, self.pending = ints["fresh"], ints["fresh_tables"], ints["pending"]
        self.out_rows, self.starts, self.run_rows = ints["out_rows"], ints["starts"], ints["run_rows"]
        self.run_pieces, self.span_runs = ints["run_pieces"], ints["span_runs"]
        self.long_runs = ints["long_runs"]
        self.piece_starts, self.piece_ends = ints["piece_starts"], ints["piece_ends"]
        self.order = torch.empty(0, dtype=torch.int64, device=device)
        self.factors = torch.empty(size if self.mapped else 1, dtype=torch.float32, device=device)
        tables = len(memory.tables) * fields.TABLE_FIELDS.value
        longs = launch.Workspace(
            torch.int64, device, places=training, sent=_HEAD + tables + shape.features * _FIELDS
        )
        self.places, sent = longs["places"], longs["sent"]
        self.sent = sent
        self.head, self.tables, self.features = sent, sent[_HEAD:], sent[_HEAD + tables :]
        self.others = self.features[shape.plain_features * _FIELDS :]
        self.shared = [ints.memory, longs.memory]
        self.staging: Staging | None = None  # of a graph, which copies `sent` itself
        self.missing: Tensor | None = None  # positions of tables that do not admit every key
        self.uses: Tensor | None = None  # of each position; None: one

    def load(self, layout: GroupLayout, descriptors: NDArray[np.int64], step: int) -> None:
        """Send a batch to the device."""
        staging = self.staging
        numbers = np.empty(self.sent.numel(), np.int64) if staging is None else staging.numbers()
        numbers[fields.STEP.value] = step
        numbers[fields.PLAIN_END.value] = layout.plain_end
        tables = self.memory.descriptors()
        end = _HEAD + tables.size
        numbers[_HEAD:end] = tables.reshape(-1)
        numbers[end : end + descriptors.size] = descriptors.reshape(-1)
        if staging is None:
            self.memory.uploads.send_to(self.sent, numbers)
