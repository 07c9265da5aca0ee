"""`Loader`: batches of a source, read ahead on threads, from a position that can be saved and restored.

Block number b of an epoch (see `shuffle.py`) belongs to rank b modulo world. Each rank hands out its blocks
in order, so what it has handed out is always the start of its share: the same number of ranks goes on with
the very batches that would have come, and any other number shares what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

from karvan import ranks
from karvan.data.pipeline import Closed, Outcome, Pipeline
from karvan.data.position import VERSION, Position, check_settings
from karvan.data.reading import Job
from karvan.data.shuffle import Block, Plan
from karvan.data.source import Source
from karvan.data.splits import MOST_RECORDS_PER_SPLIT, check_rank, of_rank
from karvan.data.steps import Decode, Steps, Transform
from karvan.ragged import Batch


class Loader:
    """Iterates over the batches of this rank, from its position to the end of the last epoch.

    Leaving an iteration early keeps the position, and the next one goes on there; after a finished one,
    the next gives another `epochs` epochs. Batches have `batch_size` rows and do not span epochs, so the last
    one of an epoch may be smaller; `drop_remainder` leaves it out, and its records count as handed out.

    `epochs` is how often every record comes, None for endlessly. With `steps_per_epoch`, an epoch is instead
    that many batches on every rank, however large the data is: it goes on where the last epoch stopped, and
    starts again at its end. Ranks have equal numbers of steps then, as synchronous training needs.

    `shuffle` is the number of records that are shuffled at a time, 0 for the order of the source. `workers`
    threads read, as many decode large pieces, from which batches are cut, and as many run `transform` on each
    batch. A `decode` or `transform` that is row-wise (see `steps.py`), as a `Decoder` and a `FeatureEngine`
    are, is run on the large pieces instead, which is much faster. For each worker a block that waits and one
    that is being read are held, next to the one that batches are cut from; of batches that are transformed
    one by one, at most `prefetch`. Batches of a piece share its memory: copy what is to be kept for long.

    `rank` and `world` are those of the program (see `kv.connect`) unless given; `batch_size` is of each rank.
    Data is divided by splits of `split_records`; a source whose records are decoded in groups says their
    usual size by an attribute `group_records`.
    """

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
        world: int | None = None,
        workers: int = 2,
        prefetch: int = 4,
        transform: Transform | None = None,
        split_records: int | None = None,
    ) -> None:
        at_least_one = {
            "batch_size": batch_size,
            "epochs": epochs,
            "steps_per_epoch": steps_per_epoch,
            "workers": workers,
            "prefetch": prefetch,
        }
        for name, value in at_least_one.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}.")
        here = ranks.current()
        rank, world = here.rank if rank is None else rank, here.world if world is None else world
        check_rank(rank, world)
        self._source = source
        self._steps = Steps(decode, transform)
        self._plan = Plan(
            source.parts(),
            shuffle=shuffle,
            seed=seed,
            split_records=split_records,
            group_records=getattr(source, "group_records", None),
        )
        self._position = Position()
        self._pipeline: Pipeline | None = None
        self._batch_size = batch_size
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._drop_remainder = drop_remainder
        self._rank = rank
        self._world = world
        self._workers = workers
        self._prefetch = prefetch
        self._until = epochs
        self._finished = False
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        if self._steps_per_epoch is None:
            return self._epoch
        return max(0, self._position.steps - 1) // self._steps_per_epoch

    @property
    def transform(self) -> Transform | None:
        """What is done to batches, as it was given; a Trainer keeps its state in checkpoints."""
        return self._steps.transform

    def single_pass(self, *, transformed: bool = True) -> Loader:
        """The same records once, in the order of the source, by a loader with a position of its own.

        Without `transformed` as they are before the transform, which is what `FeatureEngine.fit` takes.
        """
        return Loader(
            self._source,
            self._steps.decode,
            self._batch_size,
            rank=self._rank,
            world=self._world,
            workers=self._workers,
            prefetch=self._prefetch,
            transform=self.transform if transformed else None,
        )

    def __iter__(self) -> Iterator[Batch]:
        self._steps.require_fitted()
        self.close()
        if self._finished and self._until is not None and self._epochs is not None:
            self._until += self._epochs
        self._finished = False
        pipeline = self._pipeline = Pipeline(
            self._source,
            self._jobs(self._position),
            self._steps,
            batch_size=self._batch_size,
            drop_remainder=self._drop_remainder,
            workers=self._workers,
            prefetch=self._prefetch,
            buffer=min(self._plan.split_records, MOST_RECORDS_PER_SPLIT),
            most_batches=self._steps_left(),
        )
        try:
            while (outcome := pipeline.next()).batch is not None:
                self._count(outcome)
                yield outcome.batch
            self._count(outcome)
            self._finished = True
        except Closed:
            message = "This iteration has ended: the loader was closed, moved or iterated anew."
            raise RuntimeError(message) from None
        finally:
            pipeline.close()

    def _count(self, outcome: Outcome) -> None:
        for receipt in outcome.receipts:
            self._position.add(receipt)
        self._position.steps += outcome.batch is not None
        if outcome.receipts and outcome.receipts[-1].epoch != self._epoch:
            self._epoch = outcome.receipts[-1].epoch
            self._forget_complete_epochs()

    def close(self) -> None:
        """End the current iteration and its threads; the position stays."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is, JSON-able: all batches handed out so far are behind it, and nothing else is.

        Resuming on another number of ranks takes the `merge` of all ranks' positions.
        """
        self._forget_complete_epochs()
        return {
            "version": VERSION,
            "settings": self._plan.settings(),
            "world": self._world,
            "ranks": [self._rank],
            "until": self._until,
            "position": self._position.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: this rank's own, or a merged one of all ranks of any number."""
        check_settings(state, self._plan.settings(), "the one to load")
        of, world = state["ranks"], state["world"]
        own = world == self._world and self._rank in of
        if len(of) != world and not own:
            raise ValueError(
                f"Rank {self._rank} of {self._world} needs its own position or the merged one of all ranks, "
                f"but received that of ranks {of} of {world}."
            )
        self.close()
        self._position = Position.from_state(state["position"])
        self._until = (
            None if None in (self._epochs, state["until"]) else max(self._epochs or 0, state["until"])
        )
        self._finished = False
        self._forget_complete_epochs()
        self._epoch = self._position.epoch

    def _forget_complete_epochs(self) -> None:
        epoch = self._position.epoch
        while self._position.progress(epoch).done and self._position.is_complete(
            epoch, len(self._plan.blocks(epoch))
        ):
            epoch += 1
        self._position.advance(epoch)

    def _steps_left(self) -> int | None:
        if self._steps_per_epoch is None or self._until is None:
            return None
        return max(0, self._until * self._steps_per_epoch - self._position.steps)

    def _jobs(self, position: Position) -> Iterator[Job]:
        """What is left for this rank; runs on the threads, so on a copy of the position."""
        position = Position.from_state(position.state())
        endless = self._until is None or self._steps_per_epoch is not None
        for epoch in count(position.epoch) if endless else range(position.epoch, self._until or 0):
            share = of_rank(self._plan.blocks(epoch), self._rank, self._world)
            progress = position.progress(epoch)
            todo = [block for block in share if block.number not in progress.done]
            if endless and len(todo) == len(share) and not self._gives_a_batch(todo):
                raise ValueError(
                    f"Rank {self._rank} of {self._world} must get at least one batch of {self._batch_size} "
                    f"from an epoch, but gets {sum(block.records for block in todo)} records. "
                    "There must be more data, or split_records, batch_size or shuffle must be smaller."
                )
            for block in todo:
                order = partial(self._plan.order, epoch, block) if self._plan.shuffle else None
                skip = progress.partial.get(block.number, 0)
                last = block is todo[-1]
                yield Job(epoch, block.number, block.splits, block.records, skip, order, last)

    def _gives_a_batch(self, blocks: list[Block]) -> bool:
        return sum(block.records for block in blocks) >= (self._batch_size if self._drop_remainder else 1)
