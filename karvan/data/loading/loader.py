"""`Loader`: batches of a source, prefetched on threads, from a position that can be saved and restored.

Each rank has a share of the records of every epoch (see `rank_shares.py`) and hands it out in order. So what
it has handed out is the start of its share: the same number of ranks continues with exactly the batches that
would have followed, and any other number divides the remaining records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch

from karvan import distributed
from karvan.activity import activity
from karvan.argument_checks import check_counts, check_integers
from karvan.data.columns.kinds import ColumnKind, kinds_of
from karvan.data.columns.missing_values import ValueChecks
from karvan.data.identity import Identity, files_of, identity_of
from karvan.data.loading.batch_steps import BatchSteps, Decode, Transform
from karvan.data.loading.pipeline import Closed, Pipeline, ReadOutcome, make_delivery
from karvan.data.loading.position import Division, Position, RankPosition, check_settings, state_of
from karvan.data.loading.rank_shares import Shares, jobs_of, share_records, skip
from karvan.data.loading.read_jobs import ReadJob
from karvan.data.loading.shuffle import ShufflePlan
from karvan.data.loading.splits import MOST_RECORDS_PER_SPLIT, check_rank
from karvan.data.retry import RETRY_SECONDS, Patience, RetryingSource, check_retry_seconds, retrying
from karvan.data.source import Source
from karvan.devices import Check, data_device
from karvan.ragged import Batch

_log = logging.getLogger("karvan.data")


class Loader:
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
        self._delivery = make_delivery(data_device(device))
        check_counts(1, batch_size=batch_size, epochs=epochs, steps_per_epoch=steps_per_epoch)
        check_counts(1, workers=workers, prefetch=prefetch, split_records=split_records)
        check_integers(seed=seed, rank=rank, world_size=world_size)
        connection = distributed.current()
        rank = connection.rank if rank is None else int(rank)
        world_size = connection.world_size if world_size is None else int(world_size)
        check_rank(rank, world_size)
        self._source = source
        self._steps = BatchSteps(decode, transform)
        self._checks = ValueChecks(decode, transform)
        self._retry_seconds = check_retry_seconds(retry_seconds)
        self._retrying: RetryingSource | None = None  # of the current iteration
        self._plan = ShufflePlan(
            retrying(source.parts, Patience(retry_seconds)),
            shuffle=shuffle,
            seed=seed,
            split_records=split_records,
            group_records=getattr(source, "group_records", None),
        )
        self._earlier: tuple[Division, ...] = ()
        self._shares = Shares(self._plan, (), rank, world_size)
        self._position = RankPosition()
        self._pipeline: Pipeline | None = None
        self._batch_size = int(batch_size)
        self._epochs = None if epochs is None else int(epochs)
        self._steps_per_epoch = None if steps_per_epoch is None else int(steps_per_epoch)
        self._drop_remainder = drop_remainder
        self._rank = rank
        self._world_size = world_size
        self._workers = workers
        self._prefetch = prefetch
        self._until = self._epochs
        self._finished = False
        self._begun: dict[str, Any] | None = None  # where the iteration began that has not ended
        self._epoch = 0
        self._warned = False
        self._identity: Identity | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        if self._steps_per_epoch is None:
            return self._epoch
        return max(0, self._position.steps - 1) // self._steps_per_epoch

    def __len__(self) -> int:
        """How many batches a complete iteration gives on this rank, whatever the position is."""
        if self._epochs is None:
            raise TypeError("A Loader with epochs=None gives batches without end, so it has no len().")
        return self._epochs * (self._steps_per_epoch or self._batches(self._epoch_records))

    def __bool__(self) -> bool:
        return True  # not its len(), which may be 0, or not exist

    @property
    def batches_left(self) -> int | None:
        """How many batches the current iteration still gives on this rank; None without end."""
        if self._until is None:
            return None
        if self._steps_per_epoch is not None:
            return max(0, self._until * self._steps_per_epoch - self._position.steps)
        whole = max(self._shares.first_whole_epoch, self._position.epoch + 1)  # it and all after it are equal
        unfinished = [
            self._shares.records(epoch) for epoch in range(self._position.epoch, min(whole, self._until))
        ]
        if unfinished:
            unfinished[0] -= self._position.records
        later = max(0, self._until - whole) * self._batches(self._epoch_records)
        return sum(map(self._batches, unfinished)) + later

    def __repr__(self) -> str:
        shuffle = f"shuffle={self._plan.shuffle}, " if self._plan.shuffle else ""
        batches = "endless" if self._epochs is None else f"{len(self)} batches"
        return (
            f"Loader({type(self._source).__name__}, {self._plan.records} records, parts={self._plan.parts}, "
            f"batch_size={self._batch_size}, {shuffle}{batches}, rank {self._rank} of {self._world_size}, "
            f"at epoch {self._position.epoch}, {self._position.records} of "
            f"{self._shares.records(self._position.epoch)} records)"
        )

    @property
    def _epoch_records(self) -> int:
        """This rank's share of an epoch of which nothing has been handed out."""
        return share_records(self._plan.records, self._rank, self._world_size)

    def _batches(self, records: int) -> int:
        return records // self._batch_size if self._drop_remainder else -(-records // self._batch_size)

    @property
    def transform(self) -> Transform | None:
        """The transform of batches; a Trainer saves its state in checkpoints."""
        return self._steps.transform

    @property
    def device(self) -> torch.device:
        """Where batches arrive."""
        return torch.device("cpu") if self._delivery is None else self._delivery.device

    def single_pass(self, *, transformed: bool = True) -> Loader:
        """Return a loader of the same records once, on the CPU, in the order of the source.

        Args:
            transformed: Whether batches are transformed. `FeatureEngine.fit` needs batches from before the
                transform.

        Returns:
            The loader, with a position of its own.
        """
        return Loader(
            self._source,
            self._steps.decode,
            self._batch_size,
            rank=self._rank,
            world_size=self._world_size,
            workers=self._workers,
            prefetch=self._prefetch,
            transform=self.transform if transformed else None,
            retry_seconds=self._retry_seconds,
        )

    def __iter__(self) -> Iterator[Batch]:
        self._steps.require_fitted()
        self.close()
        if self._finished and self._until is not None and self._epochs is not None:
            self._until += self._epochs
        self._finished = False
        self._begun = self.state_dict()
        self._warn_if_empty()
        self._retrying = RetryingSource(self._source, self._retry_seconds)
        pipeline = self._pipeline = Pipeline(
            self._checks.over(self._retrying),
            self._jobs(self._shares, self._position),
            self._steps,
            batch_size=self._batch_size,
            drop_remainder=self._drop_remainder,
            workers=self._workers,
            prefetch=self._prefetch,
            buffer=min(self._plan.split_records, MOST_RECORDS_PER_SPLIT),
            most_batches=None if self._steps_per_epoch is None else self.batches_left,
            delivery=self._delivery,
        )
        try:
            while (outcome := pipeline.next()).batch is not None:
                self._count(outcome)
                activity.advance()
                yield outcome.batch
            self._count(outcome)
            self._finished, self._begun = True, None
            if self._steps_per_epoch is None and self._until is not None:
                self._position = self._position._replace(
                    epoch=self._until, records=0
                )  # the share may be empty
        except Closed:
            message = "This iteration has ended: the loader was closed, moved or iterated again."
            raise RuntimeError(message) from None
        finally:
            pipeline.close()

    def _count(self, outcome: ReadOutcome) -> None:
        for receipt in outcome.receipts:
            self._position = self._position.after(receipt)
            self._epoch = receipt.epoch
        if outcome.batch is not None:
            self._position = self._position._replace(steps=self._position.steps + 1)

    def require_values(
        self, labels: Sequence[str], weights: Sequence[str] = ()
    ) -> AbstractContextManager[Any]:
        """Make a missing value of some columns, or NaN, a `DataError` that names file and record.

        A Trainer calls this for the labels and weights of its loss. Columns that the transform creates are
        not checked. It is valid from the next iteration on.

        Args:
            labels: The columns of labels.
            weights: The columns of weights.

        Returns:
            A context that ends it.
        """
        return self._checks.require(labels, weights)

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
        if self._retrying is not None:
            self._retrying.close()
            self._retrying = None
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, for JSON: exactly after the batches handed out so far.

        Resuming on another number of ranks requires the [`merge`][karvan.data.merge] of all ranks' positions.

        Returns:
            The position.
        """
        now = Division(self._world_size, {self._rank: self._position})
        return state_of(self._plan.settings(), self._until, self._earlier, now)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Args:
            state: This rank's own position, or a merged one of all ranks.

        Raises:
            ValueError: The position is of other data, or of another order.
        """
        check_settings(state, self._plan.settings(), "the one to load")
        earlier, position = Position.from_state(state).of_rank(self._rank, self._world_size)
        self.close()
        self._earlier, self._position = earlier, position
        self._shares = Shares(self._plan, earlier, self._rank, self._world_size)
        self._until = (
            None if None in (self._epochs, state["until"]) else max(self._epochs or 0, state["until"])
        )
        self._finished, self._begun = False, None
        self._epoch = position.epoch

    def restart(self) -> None:
        """Go back to where an iteration began that was left early, unless a position was loaded since.

        A Trainer does this at its first step, and before evaluations and predictions. So
        `next(iter(loader))`, to look at a batch, does not take records from them.
        """
        if self._begun is not None:
            self.load_state_dict(self._begun)

    def start_epoch(self, epoch: int) -> None:
        """Go to the start of an iteration: its batches are those of an uninterrupted training.

        With `steps_per_epoch` the data starts at its first record.

        Args:
            epoch: The number of the iteration, from 0.
        """
        self.close()
        first = epoch * (self._epochs or 1)
        if self._steps_per_epoch is None:
            position = RankPosition(first, 0, epoch * len(self) if self._epochs else 0)
        else:
            position = RankPosition(0, 0, first * self._steps_per_epoch)
        self._earlier, self._position = (), position
        self._shares = Shares(self._plan, (), self._rank, self._world_size)
        self._until = None if self._epochs is None else first + self._epochs
        self._finished, self._begun = False, None
        self._epoch = position.epoch

    def identity(self) -> Identity:
        """Return what distinguishes this data from other data; the same on all ranks, whatever the order.

        Returns:
            The identity.
        """
        if self._identity is None:
            self._identity = retrying(lambda: identity_of(self._source), Patience(self._retry_seconds))
        return self._identity

    def column_kinds(self) -> dict[str, ColumnKind]:
        """Return the kinds of the columns that are read.

        Returns:
            The kinds by name.
        """
        return retrying(lambda: kinds_of(self._source, self._steps.decode), Patience(self._retry_seconds))

    def call_data(self, name: str) -> None:
        """Give the data a name, which is its identity from now on.

        Args:
            name: The name.
        """
        self._identity = Identity.named(name, files_of(self._source))

    def _jobs(self, shares: Shares, position: RankPosition) -> Iterator[ReadJob]:
        """The remaining jobs of this rank; runs on the threads."""
        endless = self._until is None or self._steps_per_epoch is not None
        if endless and not self._batches(self._epoch_records):
            raise ValueError(
                f"Rank {self._rank} of {self._world_size} must get at least one batch of "
                f"{self._batch_size} from an epoch, but gets {self._epoch_records} records. Use more "
                "data, fewer ranks, or a smaller batch_size."
            )
        for epoch in count(position.epoch) if endless else range(position.epoch, self._until or 0):
            handed_out = position.records if epoch == position.epoch else 0
            yield from jobs_of(self._plan, epoch, skip(shares.pieces(epoch), handed_out))

    def _warn_if_empty(self) -> None:
        """Warn once why this rank gets no batch, if there is data."""
        records = self._epoch_records
        if self._warned or not self._plan.records or self._batches(records):
            return
        self._warned = True
        if records:
            why = (
                f"it has {records} of {self._plan.records} records, and drop_remainder drops them, because "
                f"they are fewer than batch_size={self._batch_size}"
            )
        else:
            why = f"there are only {self._plan.records} records, and each of the first ranks has one"
            if self._plan.records == 1:
                why = "there is only 1 record, and the first rank has it"
        _log.warning("Rank %d of %d gets no batches: %s.", self._rank, self._world_size, why)
