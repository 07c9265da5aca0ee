"""`make_fit`: a fit alone or among fixed ranks, or one of trainers that come and go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.leased_data import LeasedData
from karvan.data.leasing.shared_data import SharedData
from karvan.data.streaming.kafka import KafkaReader
from karvan.data.streaming.prefetch_stream import Stream
from karvan.job.environment import JobEnvironment
from karvan.train.elastic.async_fit import AsyncFit
from karvan.train.elastic.elastic_fit import ElasticFit
from karvan.train.elastic.leased_work import WorkSettings
from karvan.train.fit import Begin, Fit
from karvan.train.step.optimizer_step import engines_of
from karvan.train.stopping.goal import Goal
from karvan.train.trainer_parts import TrainerParts
from karvan.train.trainer_view import TrainerView
from karvan.wire import Security


def make_fit(trainer: TrainerView, parts: TrainerParts, data: Iterable[Any], goal: Goal, begin: Begin) -> Fit:
    """The fit for the connection of a Trainer; an error if it cannot train this data in this way."""
    connection = parts.connection
    if connection.group is None:
        return Fit(trainer, parts, data, goal, begin)
    leased = require_leased(data)
    require_evaluable(goal.eval_data)
    if engines_of(parts.model) and connection.servers is None:
        raise ValueError(
            "Rows that are sharded over trainers die with them, but trainers of a job with sharding: dynamic "
            'come and go: keep them on parameter servers, kv.connect("remote"), or use sharding: static.'
        )
    if parts.setup.runs.precision.always_checks:
        raise ValueError(
            "precision fp16 scales the loss by what every trainer has seen, but trainers of a job with "
            "sharding: dynamic come and go: expected fp32 or bf16."
        )
    if parts.setup.passes.count != 1:
        raise ValueError(
            "gradient_accumulation_steps is for fixed numbers of trainers, but those of a job with sharding: "
            "dynamic come and go: expected 1."
        )
    communication = parts.setup.communication
    if communication.dense_reduce != "mean" or communication.average_every != 1:
        raise ValueError(
            "dense_reduce and average_every are for fixed numbers of trainers, but those of a job with "
            "sharding: dynamic come and go: expected neither."
        )
    job = JobEnvironment.read()
    client = WorkClient(job.master, connection.group.process, Security.from_environment())
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


def require_leased(data: object) -> LeasedData:
    """The data; a TypeError if it has no records that can be leased."""
    if isinstance(data, LeasedData):
        return data
    endless = ""
    if isinstance(data, KafkaReader | Stream):
        endless = (
            " A stream has no end, and no records that several trainers could share: lease ranges of offsets "
            "of Kafka topics, kv.data.read(kv.data.KafkaSource(…, since=…, until=…), batch_size)."
        )
    raise TypeError(
        "A job with sharding: dynamic trains on data that its trainers lease, kv.data.read(…) or "
        f"kv.data.from_loaders() after kv.connect, got {type(data).__name__}.{endless}"
    )


def require_evaluable(data: object) -> None:
    """A TypeError if data for evaluations can only be leased, before anything is trained."""
    if isinstance(data, LeasedData) and not isinstance(data, SharedData):
        raise TypeError(
            "The loaders of a job with sharding: dynamic read what is trained: expected kv.data.read(…) as "
            f"eval_data, got {type(data).__name__}."
        )
