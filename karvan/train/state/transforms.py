"""The transforms of training data: saved in checkpoints with what they were fitted to.

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
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from karvan import distributed
from karvan.checkpoint.checkpoint import COLUMNS, KEY, Transform, has_state, name_of
from karvan.checkpoint.state_tree import pack
from karvan.data.columns.kinds import ColumnKind, require_equal
from karvan.distributed import CollectiveChannel
from karvan.features import FeatureEngine

_log = logging.getLogger("karvan.train")


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
        self._saved: dict[str, Any] = {}
        self._loaded = False
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
        self._saved, self._loaded = dict(saved.get(KEY, {})), True
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
        if not self._loaded:
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
        return {KEY: {**self._saved, **self._streamed, **states}, **self._column_state()}

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
