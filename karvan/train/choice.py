"""`make_fit`, `make_predictions`: alone or among fixed ranks, or among trainers that come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from karvan.activity import TRAINERS, activity
from karvan.data.kafka import KafkaReader
from karvan.data.leased_data import LeasedData, SharedData
from karvan.data.streams import Stream
from karvan.data.task_records import BatchError, blaming, named_error
from karvan.data.work_client import WorkClient
from karvan.distributed.elastic import ElasticGroup
from karvan.job.environment import JobEnvironment
from karvan.ragged import Batch
from karvan.train.assembly import TrainerParts
from karvan.train.async_fit import AsyncFit
from karvan.train.elastic_fit import ElasticFit
from karvan.train.evaluation import Predictor
from karvan.train.feed import FedBatch, LeasedFeed
from karvan.train.fit import Begin, Fit
from karvan.train.leased_work import LeasedFit, WorkSettings
from karvan.train.optimizer_step import engines_of
from karvan.train.stopping import Goal, is_terminated
from karvan.train.types import PredictedRecords, Prediction
from karvan.wire import Security

_log = logging.getLogger("karvan.train")

_IDLE = 0.05  # seconds between two questions for a batch, while others work on the last records


@dataclass(eq=False)
class LeasedPrediction:
    """One prediction of the program.

    Every record is predicted by one trainer. What it yields is acknowledged when its caller asks for the next
    prediction, or when the iterator ends. If a trainer dies before, another one predicts the same batch:
    batches never have records of two tasks, so they are the same whoever predicts them.

    Nobody leaves before all records are acknowledged, because those of another trainer may come back.
    Trainers agree on nothing else, and wait for nobody, with one exception: one that was started again is in
    a fit that the others have finished, and gets the state of training from them between two of their
    batches.
    """

    trainer: TrainerParts
    group: ElasticGroup
    data: SharedData
    client: WorkClient
    host: ElasticFit | None  # the last fit of the program, whose state those who come later need

    def __post_init__(self) -> None:
        self.group.calls.last += 1
        self._number = self.group.calls.last
        self._plan = self.data.prediction_plan()
        batches = [-(-records // self.data.batch_size) for _, records in self.data.parts if records]
        self._before = [0, *accumulate(batches)]  # batches, by the place of a part
        self._predicted = False

    def predictions(self, columns: Iterable[str]) -> Generator[Prediction, None, None]:
        """Those of this trainer, until all trainers have predicted all records."""
        calls = self.group.calls
        if is_terminated():
            _log.warning("SIGTERM has ended the training of this program, so it predicts nothing more.")
            return
        if calls.predicts:
            raise RuntimeError(
                "Expected one prediction at a time, got another one while the last is not finished: iterate "
                "over it to its end, or close() it."
            )
        calls.predicts = True
        try:
            if self._number >= calls.passed:
                self._begin()
                yield from self._predict(self.trainer.evaluator.predictor(columns))
        finally:
            calls.predicts = False
            self.client.close()

    def _begin(self) -> None:
        parts, size = self.data.parts, self._plan.records_per_task
        while not self.client.begin_prediction(self._number, parts, size):
            self._welcome()
            with activity.waiting(TRAINERS):
                time.sleep(_IDLE)

    def _welcome(self) -> None:
        """Meet those who wait for this trainer in an earlier call."""
        if self.host is not None:
            self.host.welcome(self._number)

    def _predict(self, predictor: Predictor) -> Generator[Prediction, None, None]:
        loader = self.data.lease_prediction(self.client, self._number)
        place = partial(self.trainer.setup.runs.placement.place, training=False)
        feed = LeasedFeed(loader, place, self.trainer.setup.runs.prefetch)
        try:
            while not feed.ended:
                self._welcome()
                with self._naming():
                    batch = feed.take(lambda: self.group.waiting)
                if batch is None:
                    with activity.waiting(TRAINERS):
                        time.sleep(_IDLE)
                    continue
                yield self._prediction(predictor, batch)
                if self.client.acknowledge(batch.done):
                    _log.warning(
                        "This trainer did not answer for too long, so others were given records of its "
                        "prediction."
                    )
        finally:
            feed.close()
        predictor.end()

    def _prediction(self, predictor: Predictor, batch: FedBatch) -> Prediction:
        with self._naming(), blaming(batch.records):
            output = predictor.output(batch.batch)
        self._predicted = True
        (records,) = batch.records
        task, count = records.lease.task, len(records.places)
        start = task.first + int(records.places[0])
        number = self._before[self._plan.place_of(task.number)] + start // self.data.batch_size
        return predictor.prediction(batch.batch, output).of(PredictedRecords(number, task.path, start, count))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """An error of a batch names the record that raises it."""
        try:
            yield
        except BatchError as failed:
            raise self._named(failed) from failed.__cause__

    def _named(self, failed: BatchError) -> BaseException:
        """The error of a batch, with the record that raises it; as it is if every record raises one."""
        error = failed.__cause__
        assert error is not None

        def check(batch: Batch) -> None:
            self.trainer.evaluator.predictor(()).output(
                self.trainer.setup.runs.placement.place(batch, training=False)
            )

        bad = self.data.search(in_order=True).find(failed.records, [check])
        if bad.every and not self._predicted:
            return error
        return named_error(error, failed.records, bad.record)


def make_fit(trainer: TrainerParts, data: Iterable[Any], goal: Goal, begin: Begin) -> Fit:
    """The fit for the connection of a Trainer; an error if it cannot train this data in this way."""
    connection = trainer.connection
    if connection.group is None:
        return Fit(trainer, data, goal, begin)
    leased = require_leased(data)
    require_evaluable(goal.eval_data, "eval_data")
    if engines_of(trainer.model) and connection.servers is None:
        raise ValueError(
            "With sharding: dynamic, trainers come and go, and rows that are sharded over them would go "
            'with them: keep rows on parameter servers, kv.connect("remote"), or use sharding: static.'
        )
    if trainer.setup.runs.precision.always_checks:
        raise ValueError(
            "precision fp16 needs a loss scale that all trainers share, but with sharding: dynamic "
            "trainers come and go: expected fp32 or bf16."
        )
    if trainer.setup.passes.count != 1:
        raise ValueError(
            "gradient_accumulation_steps needs a fixed number of trainers, but with sharding: dynamic "
            "they come and go: expected 1."
        )
    communication = trainer.setup.communication
    if communication.dense_reduce != "mean" or communication.average_every != 1:
        raise ValueError(
            "dense_reduce and average_every need a fixed number of trainers, but with sharding: dynamic "
            "they come and go: expected neither."
        )
    job = JobEnvironment.read()
    client = _connect(connection.group)
    limits = {"most_tries": job.max_task_tries, "skip_bad_records": job.skip_bad_records}
    work = WorkSettings(job.global_batches, **{name: n for name, n in limits.items() if n is not None})
    fit = LeasedFit(trainer, connection.group, leased, client, work)
    if not connection.settings.mode.dense_on_servers:
        return ElasticFit(fit, goal, begin)
    if job.global_batches is not None:
        raise ValueError(
            f"global_batches={job.global_batches} makes steps of all trainers together, but in mode async "
            "each trains on its own: expected none, or mode sync."
        )
    return AsyncFit(fit, goal, begin)


def make_predictions(
    trainer: TrainerParts, data: Iterable[Any], columns: Iterable[str], host: ElasticFit | None
) -> Iterator[Prediction]:
    """Predictions under the connection of a Trainer; host: its last fit that others may need."""
    group = trainer.connection.group
    if group is None or group.calls.in_fit:  # by a callback, which may want all of them
        return trainer.evaluator.predict(data, columns)
    require_evaluable(data, "data to predict")
    if not isinstance(data, SharedData):
        return trainer.evaluator.predict(data, columns)
    return LeasedPrediction(trainer, group, data, _connect(group), host).predictions(columns)


def _connect(group: ElasticGroup) -> WorkClient:
    return WorkClient(JobEnvironment.read().master, group.client.process, Security.from_environment())


def require_leased(data: object) -> LeasedData:
    """The data; a TypeError if it has no records that can be leased."""
    if isinstance(data, LeasedData):
        return data
    endless = ""
    if isinstance(data, KafkaReader | Stream):
        endless = (
            " A stream has no end, and several trainers cannot share its records. Lease ranges of "
            "offsets of Kafka topics instead: kv.data.read(kv.data.KafkaSource(…, since=…, until=…), "
            "batch_size)."
        )
    raise TypeError(
        "With sharding: dynamic, trainers lease their data: expected kv.data.read(…) or "
        f"kv.data.from_loaders() after kv.connect, got {type(data).__name__}.{endless}"
    )


def require_evaluable(data: object, name: str) -> None:
    """A TypeError if data for evaluations or predictions is read by loaders, before anything is trained."""
    if isinstance(data, LeasedData) and not isinstance(data, SharedData):
        raise TypeError(
            "The loaders of a job with sharding: dynamic read the training data: expected "
            f"kv.data.read(…) as {name}, got {type(data).__name__}."
        )
