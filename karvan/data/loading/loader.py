"""`Loader`: batches of a source, prefetched on threads, from a position that can be saved and restored.

Each rank has a share of the records of every epoch (see `rank_shares.py`) and hands it out in order. So what
it has handed out is the start of its share: the same number of ranks continues with exactly the batches that
would have followed, and any other number divides the remaining records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count as counted
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from karvan import distributed
from karvan.argument_checks import check_integers
from karvan.data.loading.pipeline import (
    Closed,
    Order,
    Pipeline,
    ReadJob,
    ReadOutcome,
    ReadPlan,
    make_delivery,
)
from karvan.data.loading.rank_shares import (
    MOST_RECORDS_PER_SPLIT,
    Block,
    Division,
    Piece,
    Position,
    RankPosition,
    Shares,
    ShufflePlan,
    check_rank,
    check_settings,
    count,
    share_records,
    skip,
    state_of,
)
from karvan.data.loading.settings import Decode, ReadSettings, SourceData, Transform
from karvan.data.retry import RETRY_SECONDS
from karvan.data.source import Source, Split
from karvan.devices import Check, data_device
from karvan.ragged import Batch

_log = logging.getLogger("karvan.data")

# From the pieces of a rank's share to jobs for threads.


def jobs_of(plan: ShufflePlan, epoch: int, pieces: Sequence[Piece]) -> Iterator[ReadJob]:
    """The jobs that hand out these pieces of an epoch, in order. Pieces of one block are read together."""
    blocks = plan.blocks(epoch)
    end = count(pieces)
    for number, group in groupby(pieces, key=itemgetter(0)):
        block, ranges = blocks[number], list(group)
        if plan.shuffle:
            records = count(ranges)
            end -= records
            order = partial(_order, plan, epoch, block, ranges)
            yield ReadJob(epoch, block.splits, records, order, last=not end)
            continue
        (split,) = block.splits  # of data that is not shuffled, a part of a block can be read by itself
        for _, first, stop in ranges:
            end -= stop - first
            part = Split(split.path, split.first + first, stop - first)
            yield ReadJob(epoch, (part,), part.count, last=not end)


def _order(plan: ShufflePlan, epoch: int, block: Block, ranges: Sequence[Piece]) -> Order:
    order = plan.order(epoch, block)
    return np.concatenate([order[first:end] for _, first, end in ranges])


# The plan of a loader of fixed shares.


class SharePlan(ReadPlan):
    """The share of a rank in every epoch, and the position in it: exactly after the batches handed out."""

    def __init__(self, settings: ReadSettings, rank: int, world_size: int) -> None:
        self._settings = settings
        self.order = ShufflePlan(
            settings.parts(),
            shuffle=settings.shuffle,
            seed=settings.seed,
            split_records=settings.split_records,
            group_records=settings.group_records,
        )
        self.buffer = min(self.order.split_records, MOST_RECORDS_PER_SPLIT)
        self.rank = rank
        self.world_size = world_size
        self._go_to((), RankPosition(), settings.epochs)
        self._warned = False

    def _go_to(self, earlier: tuple[Division, ...], position: RankPosition, until: int | None) -> None:
        self._earlier = earlier
        self._shares = Shares(self.order, earlier, self.rank, self.world_size)
        self.position = position
        self._until = until
        self._finished = False
        self._begun: dict[str, Any] | None = None  # where the iteration began that has not ended
        self._last_epoch = position.epoch

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        steps = self._settings.steps_per_epoch
        return self._last_epoch if steps is None else max(0, self.position.steps - 1) // steps

    @property
    def epoch_records(self) -> int:
        """This rank's share of an epoch of which nothing has been handed out."""
        return share_records(self.order.records, self.rank, self.world_size)

    @property
    def share(self) -> int:
        """How many records the share of the current epoch has."""
        return self._shares.records(self.position.epoch)

    def batches(self, records: int) -> int:
        """How many batches some records of an epoch make."""
        size = self._settings.batch_size
        return records // size if self._settings.drop_remainder else -(-records // size)

    @property
    def batches_left(self) -> int | None:
        """How many batches the current iteration still gives; None without end."""
        if self._until is None:
            return None
        if self._settings.steps_per_epoch is not None:
            return max(0, self._until * self._settings.steps_per_epoch - self.position.steps)
        whole = max(self._shares.first_whole_epoch, self.position.epoch + 1)  # it and all after it are equal
        unfinished = [
            self._shares.records(epoch) for epoch in range(self.position.epoch, min(whole, self._until))
        ]
        if unfinished:
            unfinished[0] -= self.position.records
        later = max(0, self._until - whole) * self.batches(self.epoch_records)
        return sum(map(self.batches, unfinished)) + later

    @property
    @override
    def most_batches(self) -> int | None:
        return None if self._settings.steps_per_epoch is None else self.batches_left

    def begin(self) -> None:
        """An iteration begins, or continues one that was left early."""
        if self._finished and self._until is not None and self._settings.epochs is not None:
            self._until += self._settings.epochs
        self._finished = False
        self._begun = self.state()
        self._warn_if_empty()

    @override
    def jobs(self) -> Iterator[ReadJob]:
        return self._remaining(self._shares, self.position)

    def _remaining(self, shares: Shares, position: RankPosition) -> Iterator[ReadJob]:
        """The remaining jobs of this rank; runs on the threads."""
        endless = self._until is None or self._settings.steps_per_epoch is not None
        if endless and not self.batches(self.epoch_records):
            raise ValueError(
                f"Rank {self.rank} of {self.world_size} must get at least one batch of "
                f"{self._settings.batch_size} from an epoch, but gets {self.epoch_records} records. Use more "
                "data, fewer ranks, or a smaller batch_size."
            )
        for epoch in counted(position.epoch) if endless else range(position.epoch, self._until or 0):
            handed_out = position.records if epoch == position.epoch else 0
            yield from jobs_of(self.order, epoch, skip(shares.pieces(epoch), handed_out))

    @override
    def handed_out(self, outcome: ReadOutcome) -> None:
        for receipt in outcome.receipts:
            self.position = self.position.after(receipt)
            self._last_epoch = receipt.epoch
        if outcome.batch is not None:
            self.position = self.position._replace(steps=self.position.steps + 1)
            return
        self._finished, self._begun = True, None
        if self._settings.steps_per_epoch is None and self._until is not None:  # the share may be empty
            self.position = self.position._replace(epoch=self._until, records=0)

    def state(self) -> dict[str, Any]:
        """The position of this rank, for JSON."""
        now = Division(self.world_size, {self.rank: self.position})
        return state_of(self.order.settings(), self._until, self._earlier, now)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position, of this rank or a merged one of all ranks."""
        check_settings(state, self.order.settings(), "the one to load")
        epochs, until = self._settings.epochs, state["until"]
        until = None if epochs is None or until is None else max(epochs, until)
        self._go_to(*Position.from_state(state).of_rank(self.rank, self.world_size), until)

    def restart(self) -> bool:
        """Go back to where an iteration began that was left early; whether there was one."""
        begun = self._begun
        if begun is not None:
            self.load_state(begun)
        return begun is not None

    def start(self, iteration: int, batches: int) -> None:
        """Go to the start of an iteration, each of which has so many batches."""
        epochs, steps = self._settings.epochs, self._settings.steps_per_epoch
        first = iteration * (epochs or 1)
        position = RankPosition(first, 0, iteration * batches)
        if steps is not None:
            position = RankPosition(0, 0, first * steps)
        self._go_to((), position, None if epochs is None else first + epochs)

    def _warn_if_empty(self) -> None:
        """Warn once why this rank gets no batch, if there is data."""
        records = self.epoch_records
        if self._warned or not self.order.records or self.batches(records):
            return
        self._warned = True
        if records:
            why = (
                f"it has {records} of {self.order.records} records, and drop_remainder drops them, because "
                f"they are fewer than batch_size={self._settings.batch_size}"
            )
        else:
            why = f"there are only {self.order.records} records, and each of the first ranks has one"
            if self.order.records == 1:
                why = "there is only 1 record, and the first rank has it"
        _log.warning("Rank %d of %d gets no batches: %s.", self.rank, self.world_size, why)


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
