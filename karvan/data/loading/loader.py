"""`Loader`: batches of a source, prefetched on threads, from a position that can be saved and restored.

Each rank has a share of the records of every epoch (see `rank_shares.py`) and hands it out in order. So what
it has handed out is the start of its share: the same number of ranks continues with exactly the batches that
would have followed, and any other number divides the remaining records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from karvan import distributed
from karvan.argument_checks import check_integers
from karvan.data.loading.batch_steps import Decode, Transform
from karvan.data.loading.pipeline import Closed, Pipeline, make_delivery
from karvan.data.loading.rank_shares import SharePlan
from karvan.data.loading.settings import ReadSettings, SourceData
from karvan.data.loading.shuffle import check_rank
from karvan.data.retry import RETRY_SECONDS
from karvan.data.source import Source
from karvan.devices import Check, data_device
from karvan.ragged import Batch


class Loader(SourceData):
    """Iterate over the batches of this rank; `kv.data.read` makes one.

    An iteration that is left early retains the position, and the next one continues there. `len()` is the
    number of batches of a complete iteration. Batches do not span epochs, so the last one of an epoch may be
    smaller. The shares of ranks are equal to within one record. Batches may share memory: copy what must be
    held for long.

    Threads read pieces, decode them and run `transform`. A `decode` or `transform` that works row by row, as
    a `Decoder` and a `FeatureEngine` do, runs on large pieces, which is much faster.

    Args:
        source: What to read.
        decode: A function that makes a batch of a record batch, such as a `Decoder`.
        batch_size: How many samples make a batch, of each rank.
        shuffle: How many records are shuffled at a time; 0 for the order of the source.
        seed: The seed of the order.
        epochs: How often one iteration gives every record; None for endlessly.
        steps_per_epoch: How many batches are an epoch, however large the data is. It continues where the last
            epoch stopped, and starts again at the end of the data.
        drop_remainder: Whether to skip the last, smaller batch of an epoch. Its records count as handed out.
        rank: Which share of the data is read; by default that of `kv.connect`.
        world_size: How many shares there are; by default that of `kv.connect`.
        workers: How many threads read, decode and transform.
        prefetch: How many batches are prepared in advance.
        transform: A function of batches, such as a `kv.FeatureEngine`. It runs on the CPU.
        split_records: How many records make a split, by which data is divided.
        retry_seconds: How long an unreachable source is tried again before its error is raised.
        device: Where batches arrive. With "cuda" they are copied to the GPU beside the computation.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> loader = kv.data.Loader(
        ...     kv.data.open_frame({"user": [7, 8, 9]}),
        ...     kv.data.Decoder([kv.data.Fixed("user")]),
        ...     batch_size=2,
        ... )
        >>> len(loader), loader.batches_left
        (2, 2)
    """

    # For each worker, memory holds a block that waits and one that is being read, besides the one that
    # batches are cut from, and at most `prefetch` batches that are transformed one by one. On a GPU, the
    # caller's stream waits for the copy of a batch, but the caller does not.

    def __init__(
        self,
        source: Source,
        decode: Decode,
        batch_size: int,
        *,
        shuffle: int = 0,
        seed: int = 0,
        epochs: int | None = 1,
        steps_per_epoch: int | None = None,
        drop_remainder: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        workers: int = 2,
        prefetch: int = 4,
        transform: Transform | None = None,
        split_records: int | None = None,
        retry_seconds: float = RETRY_SECONDS,
        device: torch.device | str | None = None,
    ) -> None:
        settings = ReadSettings(
            source,
            decode,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            drop_remainder=drop_remainder,
            workers=workers,
            prefetch=prefetch,
            transform=transform,
            split_records=split_records,
            retry_seconds=retry_seconds,
            device=data_device(device),
        )
        super().__init__(settings)
        check_integers(rank=rank, world_size=world_size)
        connection = distributed.current()
        rank = connection.rank if rank is None else int(rank)
        world_size = connection.world_size if world_size is None else int(world_size)
        check_rank(rank, world_size)
        self._plan = SharePlan(settings, rank, world_size)
        self._delivery = make_delivery(settings.device)
        self._pipeline: Pipeline | None = None  # of the current iteration

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        return self._plan.epoch

    def __len__(self) -> int:
        """How many batches a complete iteration gives on this rank, whatever the position is."""
        epochs, steps = self._settings.epochs, self._settings.steps_per_epoch
        if epochs is None:
            raise TypeError("A Loader with epochs=None gives batches without end, so it has no len().")
        return epochs * (steps or self._plan.batches(self._plan.epoch_records))

    def __bool__(self) -> bool:
        return True  # not its len(), which may be 0, or not exist

    @property
    def batches_left(self) -> int | None:
        """How many batches the current iteration still gives on this rank; None without end."""
        return self._plan.batches_left

    def __repr__(self) -> str:
        plan, order, settings = self._plan, self._plan.order, self._settings
        shuffle = f"shuffle={order.shuffle}, " if order.shuffle else ""
        batches = "endless" if settings.epochs is None else f"{len(self)} batches"
        return (
            f"Loader({type(settings.source).__name__}, {order.records} records, parts={order.parts}, "
            f"batch_size={settings.batch_size}, {shuffle}{batches}, rank {plan.rank} of {plan.world_size}, "
            f"at epoch {plan.position.epoch}, {plan.position.records} of {plan.share} records)"
        )

    def single_pass(self, *, transformed: bool = True) -> Loader:
        """Return a loader of the same records once, on the CPU, in the order of the source.

        Args:
            transformed: Whether batches are transformed. `FeatureEngine.fit` needs batches from before the
                transform.

        Returns:
            The loader, with a position of its own.
        """
        settings = self._settings
        once = ReadSettings(
            settings.source,
            settings.decode,
            settings.batch_size,
            workers=settings.workers,
            prefetch=settings.prefetch,
            transform=settings.transform if transformed else None,
            retry_seconds=settings.retry_seconds,
        )
        return Loader(**once.arguments(), rank=self._plan.rank, world_size=self._plan.world_size)

    def __iter__(self) -> Iterator[Batch]:
        self._settings.steps.require_fitted()
        self.close()
        self._plan.begin()
        pipeline = Pipeline(self._settings, self._plan, checks=self._checks, delivery=self._delivery)
        self._pipeline = pipeline
        try:
            yield from pipeline
        except Closed:
            message = "This iteration has ended: the loader was closed, moved or iterated again."
            raise RuntimeError(message) from None
        finally:
            pipeline.end_threads()

    def check_batches(self, check: Check) -> AbstractContextManager[None]:
        """Return a context in which each batch is checked before it goes to a GPU.

        Args:
            check: A function of a batch that may raise.

        Returns:
            The context.
        """
        return nullcontext() if self._delivery is None else self._delivery.check(check)

    def close(self) -> None:
        """End the current iteration and its threads.

        The position stays.
        """
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, for JSON: exactly after the batches handed out so far.

        Resuming on another number of ranks requires the [`merge`][karvan.data.merge] of all ranks' positions.

        Returns:
            The position.
        """
        return self._plan.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Args:
            state: This rank's own position, or a merged one of all ranks.

        Raises:
            ValueError: The position is of other data, or of another order.
        """
        self._plan.load_state(state)
        self.close()

    def restart(self) -> None:
        """Go back to where an iteration began that was left early, unless a position was loaded since.

        A Trainer does this at its first step, and before evaluations and predictions. So
        `next(iter(loader))`, to look at a batch, does not take records from them.
        """
        if self._plan.restart():
            self.close()

    def start_epoch(self, epoch: int) -> None:
        """Go to the start of an iteration: its batches are those of an uninterrupted training.

        With `steps_per_epoch` the data starts at its first record.

        Args:
            epoch: The number of the iteration, from 0.
        """
        self.close()
        self._plan.start(epoch, len(self) if self._settings.epochs else 0)
