"""`BadRecords`: what a trainer of an elastic job does about a batch that raises an error.

It finds the record that raises it, and tells the master, which has the task tried again, skips the record, or
fails the job. The trainer continues with other batches.

The search computes the forward and the loss of parts of the batch, without gradients. It changes neither
buffers nor random generators, counts nothing in metrics, and creates no rows: keys that tables do not have
are zeros in it. The batch itself was looked up before it raised, as any other: rows of its keys may exist
since, and stay as they were initialized until a batch trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.dataset import named_error, report
from karvan.data.leasing.leased_data import LeasedData
from karvan.data.leasing.record_search import BatchError, SearchResult
from karvan.ragged import Batch
from karvan.train.checks.label_values import check_of
from karvan.train.evaluation import evaluating
from karvan.train.state.randomness import same_random_state_afterwards
from karvan.train.trainer_parts import TrainerParts

_HINT = ". Correct it, or set skip_bad_records in job.yaml, so that such records are skipped."


class BadRecords:
    """The batches of one fit that raise errors."""

    def __init__(self, parts: TrainerParts, data: LeasedData) -> None:
        self._parts = parts
        self._data = data
        self._check_labels = check_of(parts.loss)
        self.computed = False  # whether a batch of this trainer has raised nothing

    def find(self, failed: BatchError) -> SearchResult:
        """The record that raises the error of a batch.

        If all records raise one, and no batch of this trainer was better, the program is wrong: its own error
        is raised.
        """
        error = failed.__cause__
        assert error is not None
        modes: list[Callable[[], AbstractContextManager[None]]] = [
            nullcontext,  # the mode in which it has raised
            lambda: evaluating(self._parts.model),  # some modules need more than one sample while they train
        ]
        with same_random_state_afterwards(), _same_buffers_afterwards(self._parts.model):
            found = self._data.search().find(failed.records, [self._check_in(mode) for mode in modes])
        self._parts.setup.runs.placement.forget()
        if found.every and not self.computed:
            raise error from error.__cause__
        return found

    def report(self, client: WorkClient, failed: BatchError, found: SearchResult) -> None:
        """Tell the master, after the records of all committed steps were acknowledged."""
        error = failed.__cause__
        assert error is not None
        report(client, error, failed.records, found.record, _HINT)

    def fatal(self, failed: BatchError, found: SearchResult) -> Exception:
        """The error that ends a job whose batches cannot do without the record."""
        error = failed.__cause__
        assert error is not None
        return named_error(error, failed.records, found.record)

    def _check_in(self, mode: Callable[[], AbstractContextManager[None]]) -> Callable[[Batch], None]:
        parts, runs = self._parts, self._parts.setup.runs

        def check(batch: Batch) -> None:
            placed = runs.placement.place(batch)
            self._check_labels(placed)
            runs.placement.receive(placed)
            with mode(), torch.no_grad():
                parts.loss(runs.infer(placed), placed)

        return check


@contextmanager
def _same_buffers_afterwards(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, whether they were written to or replaced."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                buffer.copy_(values)
                setattr(module, name, buffer)
