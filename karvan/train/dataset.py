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

A model is trained on numbers that its features' statistics have scaled, so it is useful only together with
them. `data.transform` of a Loader is its transform. One with state is saved in the checkpoints of a fit under
its name, and restored before the first batch is read. The statistics of a checkpoint take precedence:
tomorrow's data has to be scaled by the numbers that the model was trained with.

Data that other processes transform, such as a job's loaders, has `transform_states()` instead, which gives
the states by name. They are saved in checkpoints as well, but cannot be replaced by this process: if they
differ from those of the checkpoint, or of a transform of the same name in this process, it is an error.

The kinds of the columns are saved beside them (see `karvan/data/columns/kinds.py`): a column that was text
when the model was trained, and is read as numbers from other files, is an error.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from karvan import distributed
from karvan.checkpoint import Checkpoint
from karvan.checkpoint.checkpoint import COLUMNS, KEY, Transform, has_state, name_of
from karvan.checkpoint.state_tree import decode, pack
from karvan.data.columns.kinds import ColumnKind, require_equal
from karvan.data.identity import Identity
from karvan.distributed import CollectiveChannel, Connection
from karvan.features import FeatureEngine

if TYPE_CHECKING:
    from karvan.data.streams import Window, Windows
    from karvan.train.results import TrainingCounts


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
    if record is None or (record.identity and record.identity.id) == (identity and identity.id):
        return False
    if record.finished:
        return True
    before, now = (
        "data without an identity" if it is None else it.label for it in (record.identity, identity)
    )
    if drop_unfinished:
        _log.warning("The rest of %s is dropped. %s", before, record.left)
        return True
    raise UnfinishedError(
        f"{checkpoint.path} is a checkpoint of other data that was not trained to its end: "
        f"expected {before}, got {now}. {record.left} Call fit with that data first, so that it is finished, "
        "or drop the rest of it with drop_unfinished=True (karvan train --drop-unfinished)."
    )


def begin_data(counts: TrainingCounts, before: FinishedData | None = None) -> None:
    """Count epochs and steps of other data from here, or from what was trained before; the step continues."""
    counts.epoch = 0 if before is None else before.epochs
    counts.batches = 0
    counts.start_step = counts.step - (0 if before is None else before.steps)


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


# The transforms of training data.


def replace_statistics(transform: Transform, state: Mapping[str, Any]) -> None:
    """Load the statistics of a checkpoint into a transform, with a warning if it was fitted to others."""
    if not getattr(transform, "unfitted", ()):
        if _equal(transform.state_dict(), state):
            return
        if distributed.current().rank == 0:
            _log.warning(
                "Transform '%s' had other statistics than the checkpoint, which replaces them.",
                name_of(transform),
            )
    transform.load_state_dict(state)


def _columns_of(saved: Mapping[str, Any]) -> dict[str, ColumnKind]:
    return {name: ColumnKind(*kind) for name, kind in saved.get(COLUMNS, {}).items()}


def _equal(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return pack(state) == pack(other)


class Transforms:
    """The transforms of some data, by name; those of a checkpoint that the data lacks are saved again.

    `columns` are the kinds of the columns of the data, and those that the model was trained with before.
    """

    def __init__(self, *data: object, columns: Mapping[str, ColumnKind] | None = None) -> None:
        self.columns: dict[str, ColumnKind] = dict(columns or {})
        self._found: dict[str, Transform] = {}
        self._streamed: dict[str, Any] = {}  # states of transforms in other processes
        self._asked: list[object] = []  # data that has been asked for such states
        self._saved: dict[str, Any] | None = None  # those of the checkpoint that was loaded
        self.use(*data)

    @property
    def found(self) -> tuple[Transform, ...]:
        """The transforms with state."""
        return tuple(self._found.values())

    def use(self, *data: object) -> None:
        """Find the transforms of more data, and load their statistics into them."""
        for part in data:
            transform = getattr(part, "transform", None)
            if has_state(transform):
                self._add(name_of(transform), transform)
            column_kinds = getattr(part, "column_kinds", None)
            if callable(column_kinds):
                self._add_columns(column_kinds())
        for part in data:
            transform_states = getattr(part, "transform_states", None)
            if callable(transform_states) and all(part is not transform_ for transform_ in self._asked):
                self._add_states(transform_states())
                self._asked.append(part)

    def _add_columns(self, kinds: Mapping[str, ColumnKind]) -> None:
        require_equal(self.columns, kinds)
        self.columns = {**kinds, **self.columns}

    def _add(self, name: str, transform: Transform) -> None:
        if name not in self._found:
            self._found[name] = transform
            self._give(name)
        elif self._found[name] is not transform:
            raise ValueError(
                f"Two different transforms have the name '{name}': expected one engine for all data, or "
                "a name for each, FeatureEngine(…, name=…)."
            )

    def _add_states(self, states: Mapping[str, Any]) -> None:
        self._add_columns(_columns_of(states))
        for name, state in states.items():
            if name == COLUMNS:
                continue
            if name not in self._streamed:
                self._streamed[name] = state
                self._give(name)
            elif not _equal(self._streamed[name], state):
                raise ValueError(
                    f"Two streams have different statistics of transform '{name}': expected the same, or a "
                    "name for each, FeatureEngine(…, name=…)."
                )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the statistics in the state of a checkpoint into the transforms, and compare the columns."""
        self.require_columns(saved)
        self._saved = dict(saved.get(KEY, {}))
        names = {**self._found, **self._streamed}
        missing = [name for name in names if name not in self._saved]
        unused = [name for name in self._saved if name not in names]
        if missing and unused:
            raise ValueError(
                f"The checkpoint has statistics of transform '{unused[0]}', but the data has transform "
                f"'{missing[0]}': expected the same name, FeatureEngine(…, name='{unused[0]}')."
            )
        for name in names:
            self._give(name)

    def require_columns(self, saved: Mapping[str, Any], only: Collection[str] | None = None) -> None:
        """Raise a DataError unless all columns, or some, have the kinds in the state of a checkpoint."""
        trained = {name: kind for name, kind in _columns_of(saved).items() if only is None or name in only}
        require_equal(trained, self.columns)
        self.columns = {**self.columns, **trained}

    def _give(self, name: str) -> None:
        """Load the statistics of one name; those of other processes must be equal."""
        if self._saved is None:
            return
        if name not in self._saved:
            self._warn_of_unknown(name)
            return
        state = self._saved[name]
        if name in self._streamed and not _equal(self._streamed[name], state):
            raise ValueError(
                f"The loaders' transform '{name}' has other statistics than the model's checkpoint: "
                "expected the same. Name the trainers' folder of checkpoints in the job (checkpoints), "
                "so that data.read(…, transform=…) of the loader program loads them, or have that "
                "program call kv.checkpoint.find(folder).load_transforms(engine) after fit."
            )
        if name in self._found:
            replace_statistics(self._found[name], state)

    def _warn_of_unknown(self, name: str) -> None:
        fitted = name in self._streamed or not getattr(self._found[name], "unfitted", ())
        if fitted and distributed.current().rank == 0:
            _log.warning(
                "The checkpoint has no statistics of transform '%s': the model may have been trained "
                "with other statistics than the data has now. Checkpoints saved from now on have them.",
                name,
            )

    def match_loaders(self) -> None:
        """Load the loaders' statistics into transforms of the same names that have none.

        A transform that was fitted to other statistics is an error.
        """
        for name, state in self._streamed.items():
            transform = self._found.get(name)
            if transform is None:
                continue
            if getattr(transform, "unfitted", ()):
                transform.load_state_dict(state)
            elif not _equal(transform.state_dict(), state):
                raise ValueError(
                    f"Transform '{name}' of this process and of the loaders have different statistics: "
                    "expected the same. Do not fit it in this process, so that it takes the loaders' "
                    "statistics, or give it another name: FeatureEngine(…, name=…)."
                )

    def state(self) -> dict[str, Any]:
        """The state for checkpoints."""
        states = {name: transform.state_dict() for name, transform in self._found.items()}
        return {KEY: {**(self._saved or {}), **self._streamed, **states}, **self._column_state()}

    def _column_state(self) -> dict[str, Any]:
        return {COLUMNS: {name: list(kind) for name, kind in self.columns.items()}}

    def require_fitted(self, model: nn.Module) -> None:
        """Raise if a transform, or an engine of the model, has no statistics yet."""
        for part in (*self._found.values(), *model.modules()):
            if isinstance(part, FeatureEngine):
                part.require_fitted()

    def require_equal(self, channel: CollectiveChannel, model: nn.Module) -> None:
        """Raise if ranks have other statistics, or other kinds of columns; a collective."""
        if channel.world_size == 1:
            return
        engines = {
            name: module.state_dict()
            for name, module in model.named_modules()
            if isinstance(module, FeatureEngine)
        }
        for kinds in channel.gather_json(self._column_state()):
            self._add_columns(_columns_of(kinds))
        digest = hashlib.sha256(pack({KEY: self.state()[KEY], "model": engines})).hexdigest()
        gathered = channel.gather_json(digest)
        if others := [rank for rank, rank_digest in enumerate(gathered) if rank_digest != digest]:
            raise ValueError(
                f"Features of rank {channel.rank} and rank {others[0]} have different statistics. Call "
                "fit after kv.connect, on all ranks, which merges them, or load them from a checkpoint."
            )


class RunData:
    """The data that a run trains on: what it is, its transforms, and what the run has trained before it."""

    def __init__(self, transforms: Transforms, connection: Connection, counts: TrainingCounts) -> None:
        self.transforms = transforms
        self.identity: Identity | None = None
        self.past: tuple[FinishedData, ...] = ()  # data that the run has trained to its end before
        self.before: FinishedData | None = None  # how it has trained this data, if that is one of them
        self._connection = connection
        self._counts = counts

    @property
    def grows(self) -> bool:
        """Whether there may be more of the data later, as of a Kafka topic."""
        return self.identity is not None and self.identity.grows

    def identify(self, data: Any, name: str | None) -> None:
        """Find out what the data is; a collective."""
        self.identity = identify(data, name, self._connection)

    def compare(self, checkpoint: Checkpoint, drop_unfinished: bool) -> bool:
        """Whether it is other data than a checkpoint's; warns if the run has trained it before."""
        record, identity = record_of(checkpoint), self.identity
        other = is_other(record, identity, checkpoint, drop_unfinished)
        self.past, self.before = () if record is None else record.past, None
        if other and record is not None:
            self.past = record.history
        if other and identity is not None and not identity.grows:
            self.before = next((past for past in self.past if past.id == identity.id), None)
        if self.before is not None:
            _log.warning(
                "This data (%s) was trained before: %s, up to step %d. Nothing of that is trained again.",
                self.before.label,
                self.before.amount,
                self.before.step,
            )
        return other

    def drops_rest(self, newest: Checkpoint | None, drop_unfinished: bool) -> bool:
        """Whether other data than the newest checkpoint's may begin, whatever is left of that; may raise."""
        record = None if newest is None else record_of(newest)
        if newest is None or record is None or record.finished or drop_unfinished:
            return True
        is_other(record, self.identity, newest, drop_unfinished)
        return False

    def begin(self) -> None:
        """Count epochs and steps of this data from here, or from what was trained of it; `step` continues."""
        begin_data(self._counts, self.before)

    def state(self, finished: bool, goal: str = "", early: bool = False) -> dict[str, Any]:
        """The state of the data for checkpoints; see `Record`."""
        return {
            "identity": None if self.identity is None else self.identity.state(),
            "finished": finished,
            "wanted": goal,
            "early": early,
            "past": [dict(vars(finished)) for finished in self.past],
        }

    def announcement(self, checkpoint: Checkpoint, other: bool) -> str:
        """The line that says where a fit starts."""
        identity, before = self.identity, self.before
        if before is not None:
            return (
                f"Continuing from {checkpoint.path} with data that was trained before "
                f"({before.amount}, up to step {before.step}): {before.label}."
            )
        if not other or identity is None:
            return f"Resuming from {checkpoint.path}."
        record = record_of(checkpoint)
        files = () if record is None or record.identity is None else record.identity.files
        shared = len(set(files) & set(identity.files))
        again = f" {shared} of its {len(identity.files)} files were trained on before." if shared else ""
        return f"Resuming from {checkpoint.path} with new data: {identity.label}.{again}"

    def nothing_to_do(self, data: Any, goal: str) -> str:
        """The line that says why a fit trains nothing; a warning if that may not be intended."""
        if self.identity is None:
            _log.warning(
                "%s has no identity, so Karvan takes it for the data of the checkpoint. That was trained to "
                "its end: nothing to do. For new data, give it a name: fit(data, data_name=…).",
                type(data).__name__,
            )
        label = "this data" if self.identity is None else f"this data ({self.identity.label})"
        if self.before is None:
            return f"The run has trained {goal} of {label} already."
        more = "" if self.before.early else "larger epochs or max_steps, or "
        return (
            f"The run has trained {self.before.amount} of {label} already, up to step {self.before.step}: "
            f"nothing to do. To train it again, call fit with {more}a new data_name."
        )

    def warn_nothing_new(self) -> None:
        """Say that data that grows had no records after those that were trained."""
        if self.identity is not None and self._connection.rank == 0:
            _log.warning("%s: no new messages, so nothing more is trained.", self.identity.label)
