"""`make_fit`, `make_predictions`: alone or among fixed ranks, or among trainers that come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.leased_data import LeasedData
from karvan.data.leasing.shared_data import SharedData
from karvan.data.streaming.kafka import KafkaReader
from karvan.data.streaming.prefetch_stream import Stream
from karvan.distributed.elastic import ElasticGroup
from karvan.job.environment import JobEnvironment
from karvan.train.callbacks import TrainerView
from karvan.train.elastic.async_fit import AsyncFit
from karvan.train.elastic.elastic_fit import ElasticFit
from karvan.train.elastic.leased_prediction import FitHost, LeasedPrediction
from karvan.train.elastic.leased_work import WorkSettings
from karvan.train.fit import Begin, Fit
from karvan.train.step.optimizer_step import engines_of
from karvan.train.stopping import Goal
from karvan.train.trainer_parts import TrainerParts
from karvan.train.types import Prediction
from karvan.wire import Security


def make_fit(trainer: TrainerView, parts: TrainerParts, data: Iterable[Any], goal: Goal, begin: Begin) -> Fit:
    """The fit for the connection of a Trainer; an error if it cannot train this data in this way."""
    connection = parts.connection
    if connection.group is None:
        return Fit(trainer, parts, data, goal, begin)
    leased = require_leased(data)
    require_evaluable(goal.eval_data, "eval_data")
    if engines_of(parts.model) and connection.servers is None:
        raise ValueError(
            "With sharding: dynamic, trainers come and go, and rows that are sharded over them would go "
            'with them: keep rows on parameter servers, kv.connect("remote"), or use sharding: static.'
        )
    if parts.setup.runs.precision.always_checks:
        raise ValueError(
            "precision fp16 needs a loss scale that all trainers share, but with sharding: dynamic "
            "trainers come and go: expected fp32 or bf16."
        )
    if parts.setup.passes.count != 1:
        raise ValueError(
            "gradient_accumulation_steps needs a fixed number of trainers, but with sharding: dynamic "
            "they come and go: expected 1."
        )
    communication = parts.setup.communication
    if communication.dense_reduce != "mean" or communication.average_every != 1:
        raise ValueError(
            "dense_reduce and average_every need a fixed number of trainers, but with sharding: dynamic "
            "they come and go: expected neither."
        )
    job = JobEnvironment.read()
    client = _connect(connection.group)
    given = {"most_tries": job.max_task_tries, "skip_bad_records": job.skip_bad_records}
    work = WorkSettings(job.global_batches, **{name: n for name, n in given.items() if n is not None})
    if not connection.settings.mode.dense_on_servers:
        return ElasticFit(trainer, parts, leased, goal, begin, client, work)
    if job.global_batches is not None:
        raise ValueError(
            f"global_batches={job.global_batches} makes steps of all trainers together, but in mode async "
            "each trains on its own: expected none, or mode sync."
        )
    return AsyncFit(trainer, parts, leased, goal, begin, client, work)


def make_predictions(
    parts: TrainerParts, data: Iterable[Any], columns: Iterable[str], host: FitHost
) -> Iterator[Prediction]:
    """Predictions under the connection of a Trainer; host: its last fit that others may need."""
    group = parts.connection.group
    if group is None or group.calls.in_fit:  # by a callback, which may want all of them
        return parts.evaluator.predict(data, columns)
    require_evaluable(data, "data to predict")
    if not isinstance(data, SharedData):
        return parts.evaluator.predict(data, columns)
    return LeasedPrediction(parts, group, data, _connect(group), host).predictions(columns)


def host_of(fit: Fit, before: FitHost) -> FitHost:
    """The fit that has the state of training from now on; before: the one that had it."""
    return fit if isinstance(fit, ElasticFit) and fit.begun else before


def _connect(group: ElasticGroup) -> WorkClient:
    return WorkClient(JobEnvironment.read().master, group.process, Security.from_environment())


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
