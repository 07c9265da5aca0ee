"""Which data a run trains on, and what happens when the data of a fit is not the checkpoint's.

A checkpoint has the identity of its data, and whether its fit had reached its end. A fit that finds a
checkpoint compares:

| data of the fit | the checkpoint's fit had ended | it had not |
|---|---|---|
| the same | nothing to do, unless more epochs or steps are requested | continue where it stopped |
| other | train on it: model, rows, optimizers, schedules, step continue, epochs count from 0 | an error |
| other, but trained to its end before | as if it were the same, with a warning | an error |

Data without an identity (a list, a torch DataLoader) is taken as the same, because it cannot be compared;
`data_name` of `fit` gives it one. Data that grows (a Kafka topic) continues at its position in both cases.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from karvan.checkpoint import Checkpoint
from karvan.checkpoint.state_tree import decode
from karvan.data.identity import Identity
from karvan.distributed import Connection

if TYPE_CHECKING:
    from karvan.data import Window, Windows
    from karvan.train.reporting.results import TrainingCounts


# Data that a run has trained to its end: a late retry of yesterday's job must not train it twice.
#
# A checkpoint has a list of them, the newest 1,000. A fit on one of them is the same as one on the data of
# the newest checkpoint: nothing to do, unless more epochs or steps are requested than were trained.


_MOST = 1000


@dataclass(frozen=True)
class FinishedData:
    """How much of some data was trained, and the step at which that ended.

    early: `EarlyStopping` has ended it, so that there is nothing to do for any goal.
    """

    id: str
    label: str
    step: int
    epochs: int
    steps: int
    early: bool = False

    @property
    def amount(self) -> str:
        """How much was trained, as text."""
        if self.early or not self.epochs:
            return f"{self.steps} steps"
        return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"


def with_newest(history: Iterable[FinishedData], newest: FinishedData) -> tuple[FinishedData, ...]:
    """The history with one more at its end, in place of an older one of the same data."""
    return (*(finished for finished in history if finished.id != newest.id), newest)[-_MOST:]


_log = logging.getLogger("karvan.train")


class UnfinishedError(ValueError):
    """The data of a fit is not that of its newest checkpoint, which was not trained to its end."""


def identify(data: Any, name: str | None, connection: Connection) -> Identity | None:
    """The identity of the data of all ranks, by its name if it has one; a collective. None: unknown."""
    ask = getattr(data, "identity", None)
    identity = ask() if callable(ask) else None
    if identity is not None and not isinstance(identity, Identity):
        raise TypeError(
            f"identity() of {type(data).__name__} must give a karvan.data.Identity or None, "
            f"got {type(identity).__name__}."
        )
    if name is not None:
        if not name:
            raise ValueError("data_name must not be empty.")
        identity = Identity.named(name, () if identity is None else identity.files)
    if connection.world_size == 1:
        return identity
    ids = connection.main.gather_json(None if identity is None else identity.id)
    if identity is None or None in ids:
        return None
    if len(set(ids)) == 1:
        return identity
    combined = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]  # every rank has its own files
    return Identity(combined, f"{identity.label} and the data of {len(ids) - 1} more ranks", identity.name)


@dataclass(frozen=True)
class Record:
    """What a checkpoint says about its data."""

    identity: Identity | None
    finished: bool  # whether its fit had reached its end
    goal: str  # how much that fit had to train, as text
    epoch: int
    batches: int
    step: int = 0
    steps: int = 0  # of this data
    early: bool = False  # whether it was `EarlyStopping` that ended it
    past: tuple[FinishedData, ...] = ()  # what the run had trained to its end before this data

    @property
    def history(self) -> tuple[FinishedData, ...]:
        """What the run has trained to its end, this data included if it was."""
        identity = self.identity
        if identity is None or identity.grows or not self.finished:
            return self.past
        newest = FinishedData(identity.id, identity.label, self.step, self.epoch, self.steps, self.early)
        return with_newest(self.past, newest)

    @property
    def left(self) -> str:
        """Where training stopped."""
        trained = f"{self.epoch} epochs and {self.batches} batches of the next one"
        return f"It had trained {trained}{f', of {self.goal}' if self.goal else ''}."


def state_of(
    identity: Identity | None,
    finished: bool,
    goal: str = "",
    early: bool = False,
    past: tuple[FinishedData, ...] = (),
) -> dict[str, Any]:
    """The state of the data for checkpoints; see `Record`."""
    return {
        "identity": None if identity is None else identity.state(),
        "finished": finished,
        "wanted": goal,
        "early": early,
        "past": [dict(vars(finished)) for finished in past],
    }


def record_of(checkpoint: Checkpoint) -> Record | None:
    """What a checkpoint says about its data, without loading it; None if it is not one of training."""
    tree = checkpoint.manifest.state
    if not isinstance(tree, dict) or "trainer" not in tree:
        return None
    counts = decode(tree["trainer"], {})
    data = decode(tree["data"], {}) if "data" in tree else {}
    identity = data.get("identity")
    epoch, batches = int(counts["epoch"]), int(counts["batches"])
    return Record(
        None if identity is None else Identity.from_state(identity),
        bool(data.get("finished", batches == 0)),
        str(data.get("wanted", "")),
        epoch,
        batches,
        int(counts["step"]),
        int(counts["step"]) - int(counts.get("start_step", 0)),
        bool(data.get("early", False)),
        tuple(FinishedData(**finished) for finished in data.get("past", ())),
    )


def is_other(
    record: Record | None, identity: Identity | None, checkpoint: Checkpoint, drop_unfinished: bool
) -> bool:
    """Whether data is not the checkpoint's; an error if the checkpoint's was not trained to its end."""
    saved_identity = None if record is None else record.identity
    if record is None or (None if saved_identity is None else saved_identity.id) == (
        None if identity is None else identity.id
    ):
        return False
    if record.finished:
        return True
    before = "data without an identity" if saved_identity is None else saved_identity.label
    now = "data without an identity" if identity is None else identity.label
    if drop_unfinished:
        _log.warning("The rest of %s is dropped. %s", before, record.left)
        return True
    raise UnfinishedError(
        f"{checkpoint.path} is a checkpoint of other data that was not trained to its end: "
        f"expected {before}, got {now}. {record.left} Call fit with that data first, so that it is finished, "
        "or drop the rest of it with drop_unfinished=True (karvan train --drop-unfinished)."
    )


def drops_rest(checkpoint: Checkpoint, identity: Identity | None, drop_unfinished: bool) -> bool:
    """Whether other data than a checkpoint's may begin, whatever is left of it; an error as by `is_other`."""
    record = record_of(checkpoint)
    if record is None or record.finished or drop_unfinished:
        return True
    is_other(record, identity, checkpoint, drop_unfinished)
    return False


def trained_before(record: Record | None, identity: Identity | None) -> FinishedData | None:
    """How a run has trained data before that of its newest checkpoint; a warning if it has."""
    if record is None or identity is None or identity.grows:
        return None
    before = next((finished for finished in record.history if finished.id == identity.id), None)
    if before is not None:
        _log.warning(
            "This data (%s) was trained before: %s, up to step %d. Nothing of that is trained again.",
            before.label,
            before.amount,
            before.step,
        )
    return before


def begin_data(counts: TrainingCounts, before: FinishedData | None = None) -> None:
    """Count epochs and steps of other data from here, or from what was trained before; the step continues."""
    counts.epoch = 0 if before is None else before.epochs
    counts.batches = 0
    counts.start_step = counts.step - (0 if before is None else before.steps)


def announcement(
    checkpoint: Checkpoint,
    record: Record | None,
    identity: Identity | None,
    other: bool,
    before: FinishedData | None = None,
) -> str:
    """The line that says where a fit starts."""
    if before is not None:
        return (
            f"Continuing from {checkpoint.path} with data that was trained before "
            f"({before.amount}, up to step {before.step}): {before.label}."
        )
    if not other or identity is None:
        return f"Resuming from {checkpoint.path}."
    saved_identity = None if record is None else record.identity
    shared = 0 if saved_identity is None else len(set(saved_identity.files) & set(identity.files))
    again = f" {shared} of its {len(identity.files)} files were trained on before." if shared else ""
    return f"Resuming from {checkpoint.path} with new data: {identity.label}.{again}"


def nothing_to_do(data: Any, identity: Identity | None, goal: str, before: FinishedData | None = None) -> str:
    """The line that says why a fit trains nothing; a warning if that may not be intended."""
    if identity is None:
        _log.warning(
            "%s has no identity, so Karvan takes it for the data of the checkpoint. That was trained to "
            "its end: nothing to do. For new data, give it a name: fit(data, data_name=…).",
            type(data).__name__,
        )
    label = "this data" if identity is None else f"this data ({identity.label})"
    if before is not None:
        more = "" if before.early else "larger epochs or max_steps, or "
        return (
            f"The run has trained {before.amount} of {label} already, up to step {before.step}: "
            f"nothing to do. To train it again, call fit with {more}a new data_name."
        )
    return f"The run has trained {goal} of {label} already."


def warn_nothing_new(identity: Identity | None, connection: Connection) -> None:
    """Say that data that grows had no records after those that were trained."""
    if identity is not None and connection.rank == 0:
        _log.warning("%s: no new messages, so nothing more is trained.", identity.label)


def remaining(newest: Checkpoint | None, windows: Windows) -> Iterator[Window]:
    """The windows after those that a run has trained on, starting with one that it has not finished."""
    record = None if newest is None else record_of(newest)
    name = None if record is None or record.identity is None else record.identity.name
    if newest is not None and name is not None:
        state: Mapping[str, Any] = newest.manifest.state
        finished = record is None or record.finished
        windows.load_state_dict(
            {"window": name, "position": None if finished else decode(state["position"], {})}
        )
    yield from windows
