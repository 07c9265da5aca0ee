"""`LeasedWork`: the records of a fit at the master, as one of its trainers sees them.

It has the position of the data in checkpoints, what is done about a batch that raises an error, and what is
left to do when a trainer leaves or ends. `FitSteps` are the steps that train these records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.leased_data import LeasedData
from karvan.data.leasing.record_search import BatchError
from karvan.train.elastic.acknowledgements import Acknowledgements
from karvan.train.elastic.bad_records import BadRecords
from karvan.train.elastic.step_batches import BatchDealer
from karvan.train.trainer_parts import TrainerParts


@dataclass(frozen=True)
class WorkSettings:
    """How the records of a job are trained: as its job.yaml says.

    of_step: how many batches a step has, whoever computes them; None: as many as there are trainers.
    """

    of_step: int | None = None
    most_tries: int = 3
    skip_bad_records: int = 0


class LeasedWork:
    """The work of one fit."""

    def __init__(
        self,
        parts: TrainerParts,
        data: LeasedData,
        client: WorkClient,
        batches: BatchDealer,
        work: WorkSettings,
    ) -> None:
        self._parts = parts
        self._client = client
        self._batches = batches
        self._of_step = work.of_step
        self.seed = torch.initial_seed()  # of the generators of batches, where steps have fixed batches
        self.bad = BadRecords(parts, data)
        self.records = Acknowledgements(client)
        self._closed = False

    def set_aside(self, failed: BatchError) -> None:
        """Report a batch that raised an error, and return all records that are not trained."""
        self._parts.setup.update.forget()
        self._close_batches()
        found = self.bad.find(failed)
        if self._of_step is not None:  # every step has fixed batches, so none can be left out
            raise self.bad.fatal(failed, found) from failed.__cause__
        self.records.flush()  # what is returned must not have been trained
        self.bad.report(self._client, failed, found)
        self._client.give_back_all()

    def position(self) -> dict[str, Any]:
        """What a checkpoint has of the data's position."""
        self.records.flush()  # the position has the records of this step
        ledger = None if self._of_step is not None else self._client.take_position()
        return {"global_batches": self._of_step, "seed": self.seed, "ledger": ledger}

    def export(self) -> AbstractContextManager[None]:
        """While this trainer makes the final checkpoint, which is a task of the job like others."""
        self._close_batches()
        return self._client.export()

    def bad_records(self) -> int:
        """How many records the job has skipped."""
        if self._of_step is not None:
            return 0
        skipped: int = json.loads(self._client.take_position())["position"]["bad_records"]
        return skipped

    def restore(self, position: Mapping[str, Any] | None) -> None:
        """Return to the position of a checkpoint; None: to the beginning of an epoch."""
        batches = self._parts.counts.batches
        if batches and (position is None or position["global_batches"] != self._of_step):
            raise ValueError(
                "The checkpoint is in the middle of an epoch, and its records were divided in another "
                f"way: expected sharding: dynamic and global_batches: {self._of_step or 'none'}, got "
                f"{'sharding: static' if position is None else position['global_batches'] or 'none'}. "
                "Finish the epoch with the settings it began with."
            )
        if position is not None:
            self.seed = position["seed"]
        ledger: str | None = None
        if self._of_step is None:
            ledger = None if position is None else position["ledger"]
        self._client.restore_position(ledger)

    def acknowledge(self, done: Mapping[int, int]) -> None:
        """Report records that a trainer which is gone has trained; after the fit the master knows them."""
        if not self._closed:
            self._client.acknowledge(done)

    def leave(self) -> None:
        """Return the records that were leased and not trained: the others continue without this trainer."""
        self._close_batches()
        self.records.flush()  # all that may not be reported: what is returned must not have been trained
        self._client.close()

    def close(self) -> None:
        """End the threads, and disconnect. Leases stay until the others have settled what was trained."""
        self._closed = True
        self._close_batches()
        self.records.close()
        self._client.disconnect()

    def _close_batches(self) -> None:
        self._batches.close()
        self._parts.setup.runs.placement.forget()


class FitSteps(Protocol):
    """How trainers of a group make steps: together (`GroupSteps`), or each on its own (`OwnSteps`)."""

    work: LeasedWork

    def agree(self, *, save: bool) -> dict[str, Any]:
        """Make a step or meet; a collective. save: this trainer says that a checkpoint is due."""

    def missed(self) -> dict[str, Any] | None:
        """What `agree` gave to trainers that are gone, and to no other."""

    def regrouped(self) -> None:
        """Another round has begun."""

    def settle(self) -> None:
        """It is settled what trainers that are gone have done; rank 0."""
