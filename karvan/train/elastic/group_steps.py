"""`GroupSteps`: the steps that a trainer makes together with those of its round.

It takes this trainer's batches, computes their gradients once, however often trainers have to agree anew, and
reports the records of committed steps to the master.

A batch that raises an error is no batch of the step: its bad record is reported (`bad_records.py`), all that
is leased and not trained returns to the master, and the trainer takes part in the step without a batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.record_search import BatchError, blaming
from karvan.data.leasing.shared_data import SharedData
from karvan.distributed.elastic.group import ElasticGroup
from karvan.train.elastic.acknowledgements import Acknowledgements
from karvan.train.elastic.bad_records import BadRecords
from karvan.train.elastic.joint_step import Agreement, Contribution, JointStep, StepBatch
from karvan.train.elastic.leased_feed import TakenBatch
from karvan.train.elastic.step_batches import BatchDealer, LeasedSteps, PlannedSteps
from karvan.train.feed.batch_source import FedBatch
from karvan.train.losses import named
from karvan.train.reporting.results import Losses
from karvan.train.state.randomness import seed_random
from karvan.train.step.optimizer_step import engines_of
from karvan.train.trainer_parts import TrainerParts


@dataclass(frozen=True)
class WorkSettings:
    """How the records of a job are trained: as its job.yaml says.

    of_step: how many batches a step has, whoever computes them; None: as many as there are trainers.
    """

    of_step: int | None = None
    most_tries: int = 3
    skip_bad_records: int = 0


class GroupSteps:
    """The steps of one fit; stopped: why to take no more batches, if so."""

    def __init__(
        self,
        parts: TrainerParts,
        group: ElasticGroup,
        data: SharedData,
        client: WorkClient,
        work: WorkSettings,
        stopped: Callable[[], object],
    ) -> None:
        self._parts = parts
        self._group = group
        self._client = client
        self._of_step = of_step = work.of_step
        self._stopped = stopped
        self._placement = parts.setup.runs.placement
        self._engines = engines_of(parts.model)
        self.seed = torch.initial_seed()  # of the generators of batches, where steps have fixed batches
        client.open(data.spec(work.most_tries, work.skip_bad_records))
        self._bad_records = BadRecords(parts, data)
        self.records = Acknowledgements(client)
        self._joint = JointStep(group, parts.setup.update, parts.connection.servers)
        place = partial(self._placement.place, training=True)
        prefetch = parts.setup.runs.prefetch
        self._batches: BatchDealer = (
            LeasedSteps(data, client, group, parts.counts, place, prefetch)
            if of_step is None
            else PlannedSteps(data, group, parts.counts, place, prefetch, of_step)
        )
        self._computed: dict[int, StepBatch] = {}  # batches of the step in progress, by number

    def agree(self, *, save: bool) -> dict[str, Any]:
        """Make the next step with all others, except for its effects; a collective. Gives an `Agreement`.

        save: whether this trainer says that a checkpoint is due.
        """
        step = self._parts.counts.step + 1
        self._joint.begin(step)
        plan = self._batches.plan()
        mine = plan.mine(self._group.rank)
        for _, number in mine:
            if number not in self._computed:
                self._computed[number] = self._compute(number)
        self._joint.keep([number for _, number in mine])
        stop = self._parts.stop_request.reason
        contribution = Contribution(
            member=self._group.member,
            batches=[asdict(replace(self._computed[number], place=place)) for place, number in mine],
            ended=self._batches.ended,
            stop=None if stop == "terminate" else stop,
            save=save,
            regroup=self._group.rank == 0 and self._group.regroup_wanted,
            leaves=stop == "terminate",
            confirmed=self.records.confirmed,
        )
        return self._joint.agree(step, contribution, plan).as_json()

    def apply(self, result: Mapping[str, Any]) -> tuple[Agreement, bool]:
        """The effects of a step that is committed: what was agreed on, and whether it was taken."""
        agreement = Agreement.from_json(result)
        taken = self._joint.apply(agreement)
        self._computed = {}
        if self._of_step is not None:
            seed_random(self.seed, -1, self._parts.counts.step)
        elif agreement.samples:
            self.records.add(agreement.step, agreement.records, report=self._group.rank == 0)
        if self._group.rank != 0:
            self.records.forget(max(each.confirmed for each in agreement.contributions))
        return agreement, taken

    def missed(self) -> dict[str, Any] | None:
        """The agreement of a step that servers have committed, and no trainer that is left."""
        return self._joint.missed(self._parts.counts.step + 1)

    def regrouped(self) -> None:
        """Another round has begun."""
        self._batches.regrouped()

    def settle(self) -> None:
        """What trainers that are gone have done is known: report it, and drop what they have not; rank 0."""
        self.records.flush()
        self._joint.abandon(self._group.gone)
        self._group.settle()

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
                "The checkpoint is in the middle of an epoch whose records were divided in another way: "
                f"expected sharding: dynamic and global_batches: {self._of_step or 'none'}, got "
                f"{'sharding: static' if position is None else position['global_batches'] or 'none'}. "
                "Finish the epoch with the settings it began with."
            )
        if position is not None:
            self.seed = position["seed"]
        ledger: str | None = None
        if self._of_step is None:
            ledger = None if position is None else position["ledger"]
        self._client.restore_position(ledger)

    def leave(self) -> None:
        """Return the records that were leased and not trained: the others continue without this trainer."""
        self._close_batches()
        self.records.flush()  # all that may not be reported: what is returned must not have been trained
        self._client.close()

    def close(self) -> None:
        """End the threads, and disconnect. Leases stay until the others have settled what was trained."""
        self._close_batches()
        self.records.close()
        self._client.disconnect()

    def _close_batches(self) -> None:
        self._batches.close()
        self._placement.forget()

    def _compute(self, number: int) -> StepBatch:
        """The gradients of one of this trainer's batches, if it has one that raises no error."""
        try:
            taken = self._batches.take(number, self._stopped)
            if taken is None:
                computed = StepBatch(0)
            else:
                with blaming(taken.records):
                    computed = self._gradients(number, taken)
        except BatchError as failed:
            self._set_aside(failed)
            computed = StepBatch(0)
        return self._joint.add(number, computed)

    def _set_aside(self, failed: BatchError) -> None:
        """Report a batch that raised an error, and return all records that are not trained."""
        self._parts.setup.update.forget()
        self._close_batches()
        found = self._bad_records.find(failed)
        if self._of_step is not None:  # every step has fixed batches, so none can be left out
            raise self._bad_records.fatal(failed, found) from failed.__cause__
        self.records.flush()  # what is returned must not have been trained
        self._bad_records.report(self._client, failed, found)
        self._client.give_back_all()

    def _gradients(self, number: int, taken: TakenBatch) -> StepBatch:
        """Compute the gradients of a batch."""
        parts, routine = self._parts, self._parts.setup.routine
        for engine in self._engines:
            engine.step = parts.counts.step  # that of all trainers
        if self._of_step is not None:  # generators belong to the batch, not to the trainer
            seed_random(self.seed, parts.counts.epoch, number)
        samples, losses = taken.samples, Losses()
        for made in routine.begin([FedBatch(taken.batch, None, samples, samples)]).passes():
            self._placement.receive(made.batch)
            routine.forward(made, made.batch, parts.loss)
            routine.backward(made, 1.0 / samples)
            if made.losses is not None and made.loss is not None:
                for metric in parts.metrics.values():
                    metric.update(made.output, made.batch)
                losses.add(named(made.losses, made.loss), 1.0)
        self._bad_records.computed = True
        done = {} if self._of_step is not None else taken.done
        return StepBatch(
            place=0,
            samples=samples,
            records={str(token): count for token, count in done.items()},
            losses={name: float(loss) for name, loss in losses.means().items()},
        )
