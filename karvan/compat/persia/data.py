"""`persia.data`: batches from the job's loaders, or of this process, for the context that is entered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from karvan import distributed
from karvan.argument_checks import check_counts
from karvan.cluster.loader_stream.stream import LoadedBatch, from_loaders
from karvan.compat.persia.bridge.batch_layout import PersiaTrainingBatch, local_batch
from karvan.compat.persia.bridge.connection import wait_for_roles
from karvan.compat.persia.bridge.contexts import PREFETCH, EmbeddingCtx, cnt_ctx
from karvan.compat.persia.bridge.unsupported import Tuning, warn_of_tuning
from karvan.compat.persia.embedding.data import PersiaBatch
from karvan.job.roles import Role


class IterableDatasetBase:
    """Batches for a DataLoader; buffer_size: how many are requested from loaders in advance."""

    def __init__(self, buffer_size: int) -> None:
        check_counts(1, buffer_size=buffer_size)
        self.buffer_size = buffer_size


class IterableDataset(IterableDatasetBase):
    """Batches that this process makes: a subclass has `__iter__`, which gives `PersiaBatch`es."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        """One epoch."""
        raise NotImplementedError(f"{type(self).__name__} expects an __iter__ that gives PersiaBatches.")


class StreamingDataset(IterableDatasetBase):
    """Batches that the job's loaders send; one iteration is one epoch, which ends when all loaders have."""


class DataLoader:
    """The batches of a dataset for the context that is entered, with lookups that run in advance.

    timeout_ms: how long a lost loader is waited for. reproducible: batches come in the order of their
    numbers; otherwise as they are ready. embedding_staleness: how many batches may be between a lookup and
    its gradient, 1 for synchronous training; None: as the job says.
    """

    def __init__(
        self,
        dataset: IterableDatasetBase,
        forward_buffer_size: int = PREFETCH,
        timeout_ms: int = 600_000,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | None = None,
    ) -> None:
        check_counts(
            1,
            forward_buffer_size=forward_buffer_size,
            timeout_ms=timeout_ms,
            embedding_staleness=embedding_staleness,
        )
        if not isinstance(dataset, IterableDatasetBase):
            raise TypeError(
                f"DataLoader expects a StreamingDataset or an IterableDataset, got {type(dataset).__name__}."
            )
        warn_of_tuning(
            Tuning(
                "num_workers", num_workers, 10, "lookups run on the cores that there are (KARVAN_THREADS)."
            )
        )
        self.dataset = dataset
        context = _context()
        self._ordered = reproducible
        self._timeout = timeout_ms / 1000
        self._data: Any = None
        context.open(embedding_staleness, forward_buffer_size)
        if forward_buffer_size != PREFETCH:
            warn_of_tuning(
                Tuning(
                    "forward_buffer_size",
                    forward_buffer_size,
                    context.prefetch,
                    f"this context prepares {context.prefetch} batches in advance since its first use.",
                )
            )
        _check_staleness(embedding_staleness)

    def __iter__(self) -> Iterator[PersiaTrainingBatch]:
        context = _context()
        if self._data is None:
            self._data = self._make_data(context)
        return context.batches(self._data)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # where the dataset has a length

    def _make_data(self, context: EmbeddingCtx) -> Any:
        if isinstance(self.dataset, IterableDataset):
            return _LocalBatches(self.dataset)
        workers = distributed.current().workers
        wait_for_roles(Role.LOADER)
        return context.stream(
            from_loaders(
                ordered=self._ordered,
                prefetch=self.dataset.buffer_size,
                timeout=self._timeout,
                ids=None if workers is None else list(context.slots.slots_config),
            )
        )


# Names of the first generation, one of them as its code spells it.
StreamDataset = StreamingDataset
Dataloader = Dataloder = DataLoader


class _LocalBatches:
    """The batches of a dataset of this process; each iteration is an epoch."""

    def __init__(self, dataset: IterableDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[LoadedBatch]:
        return map(local_batch, self._dataset)


def _context() -> EmbeddingCtx:
    context = cnt_ctx()
    if not isinstance(context, EmbeddingCtx):
        raise RuntimeError("DataLoader expects to be inside of `with TrainCtx(…)` or `with eval_ctx(…)`.")
    return context


def _check_staleness(staleness: int | None) -> None:
    connection = distributed.current()
    if staleness is not None and connection.servers is not None and connection.settings.staleness > staleness:
        raise RuntimeError(
            f"The context was connected with staleness {connection.settings.staleness} before this "
            f"DataLoader asked for {staleness}: expected the DataLoader first in its context."
        )
