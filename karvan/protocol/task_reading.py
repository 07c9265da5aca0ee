"""The calls of a loader that reads leased tasks; `cluster/task_reading/service.py` has the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.batches import BATCH, NAME, check_batch
from karvan.protocol.loader import STATISTICS
from karvan.protocol.values import NUMBER
from karvan.protocol.work import PART_PATH, SEED, TASK
from karvan.wire.message import Array
from karvan.wire.schema.calls import Call, DescribedArrays, table_of
from karvan.wire.schema.kinds import (
    Boolean,
    Fields,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Plain,
    Text,
    TupleOf,
    Variant,
)

_DIGEST = Text(64)
_INDEX = Integer(0, 2**20)

TASK_READING_HELLO = Fields({"loader": _INDEX})

_WAITING = Fields({"wait": Boolean()})
_DESCRIPTION = Fields(
    {
        "parts": ListOf(TupleOf(PART_PATH, NUMBER)),
        "records_per_task": Integer(1),
        "seed": SEED,
        "batch_size": Integer(1),
        "identity": MapOf(Plain()),
        "digest": _DIGEST,
    }
)
_BATCH = Fields({"batch": BATCH, "records": Integer(1), "samples": Integer(0, 2**48), "digest": _DIGEST})
_FAILURE = Fields(
    {"failed": Text(20_000), "task": Nullable(NUMBER), "kind": OneOf("damaged", "temporary", "failed")}
)


def _check_answer(answer: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    check_batch(answer if "batch" in answer else {"batch": {}}, arrays)


TASK_READING_CALLS = table_of(
    Call("describe", answer=Variant("wait", _WAITING, _DESCRIPTION)),
    STATISTICS,
    Call(
        "read_batch",
        Fields(
            {"tasks": ListOf(Fields({"task": TASK, "ends": Boolean()}), 2**17, 1)},
            {"ids": ListOf(NAME, 2**16), "to": Fields({"worker": _INDEX, "name": Text(200)})},
        ),
        answer=Variant("wait", _WAITING, Variant("failed", _FAILURE, _BATCH)),
        answers=[DescribedArrays()],
        answer_rule=_check_answer,
    ),
    Call("stop_reading"),
)
