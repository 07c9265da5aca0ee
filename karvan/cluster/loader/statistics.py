"""Statistics of loaders' fitted transforms: equal in all loaders, and saved by trainers.

A loader transforms batches in its own process, but the trainers' model is useful only together with the
statistics of that transform.

    trainer                                          loader
    statistics(whole)                                once its program has started: a digest for each
                                                       transform, by name, and with `whole` the states as
                                                       well; "wait" after a second

A trainer asks one loader for the states and the others for digests, before it trains. Loaders that differ are
an error. Each batch has a digest of the statistics that made it, so a loader that is replaced by one with
other statistics is an error too. Where the job names a folder of checkpoints, a loader takes the statistics
of the newest checkpoint: those of its own fit are used only until there is one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from karvan.checkpoint import CheckpointError
from karvan.checkpoint.checkpoint import COLUMNS, KEY, has_state, name_of
from karvan.checkpoint.recovery import resume
from karvan.checkpoint.state_tree import pack, unpack
from karvan.data.columns.kinds import ColumnKind
from karvan.features import FeatureEngine
from karvan.job.checkpoint_url import local_path
from karvan.protocol.loader import Statistics
from karvan.train.state.transforms import replace_statistics
from karvan.wire import Message


class LoaderStatistics:
    """The states of a loader's transforms, ready to be sent."""

    def __init__(self, packed: Mapping[str, bytes] | None = None) -> None:
        self._packed = dict(packed or {})
        self.digests = {name: hashlib.sha256(state).hexdigest()[:16] for name, state in self._packed.items()}
        self.digest = digest_of(self.digests)

    @classmethod
    def of(
        cls, transforms: Iterable[object], columns: Mapping[str, ColumnKind] | None = None
    ) -> LoaderStatistics:
        """Of the transforms that have statistics, and of the kinds of columns.

        An engine that was not fitted is an error.
        """
        packed: dict[str, bytes] = {}
        if columns:
            packed[COLUMNS] = pack({name: list(kind) for name, kind in columns.items()})
        for transform in transforms:
            if not has_state(transform):
                continue
            if isinstance(transform, FeatureEngine):
                transform.require_fitted()
            name, state = name_of(transform), pack(transform.state_dict())
            if packed.setdefault(name, state) != state:
                raise ValueError(
                    f"Two transforms with different statistics have the name '{name}': expected one engine, "
                    "or a name for each, FeatureEngine(…, name=…)."
                )
        return cls(packed)

    def message(self, whole: bool) -> Message[Statistics]:
        """The answer to a trainer."""
        states = [np.frombuffer(state, np.uint8) for state in self._packed.values()] if whole else []
        return Message(Statistics(statistics=self.digests), states)


def digest_of(digests: Mapping[str, str]) -> str:
    """One digest for all transforms; empty if there are none."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16] if digests else ""


def ask_loaders(
    ask: Callable[[int, bool], Message[Statistics]], loaders: Sequence[int]
) -> tuple[dict[str, Any], str]:
    """The states of the loaders' transforms by name, and their digest; an error if loaders differ.

    ask: calls `statistics` of a loader, with `whole`.
    """
    answers = [ask(loader, loader == loaders[0]) for loader in loaders]
    first = answers[0].head.statistics
    for loader, answer in zip(loaders, answers, strict=True):
        other = answer.head.statistics
        if other != first:
            differ = {name for name in {*first, *other} if first.get(name) != other.get(name)}
            names = sorted(differ - {COLUMNS})
            if not names:
                raise ValueError(
                    f"loader {loaders[0]} and loader {loader} read columns of other names or types: expected "
                    "the same columns in all loaders, from files that all of them see. Declare their types."
                )
            raise ValueError(
                f"loader {loaders[0]} and loader {loader} have different statistics of transform "
                f"'{names[0]}': expected the same in all loaders. In every loader program, fit the engine to "
                "all of the data, engine.fit(kv.data.read(…)), since data.read(…) of a LoaderContext is only "
                "the share of one loader; or take the statistics of a checkpoint, "
                "kv.checkpoint.find(folder).load_transforms(engine)."
            )
    arrays = zip(first, answers[0].arrays, strict=True)
    return {name: unpack(array.tobytes()) for name, array in arrays}, digest_of(first)


class SavedStatistics:
    """The statistics of the newest checkpoint of a job's folder, read on first use."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._states: dict[str, Any] | None = {} if not folder else None

    def give(self, transform: object) -> None:
        """Load what was saved under a transform's name into it, if anything."""
        if not has_state(transform):
            return
        if self._states is None:
            self._states = self._read()
        name = name_of(transform)
        if name in self._states:
            try:
                replace_statistics(transform, self._states[name])
            except (ValueError, RuntimeError) as error:
                assert self._path is not None
                raise CheckpointError(self._path, f"its transform '{name}' is another: {error}") from error

    def _read(self) -> dict[str, Any]:
        # Trainers rename damaged checkpoints when they resume.
        statistics_ = resume(
            local_path(self._folder), lambda checkpoint: dict(checkpoint.state().get(KEY, {})), rename=False
        )
        if statistics_ is None:
            return {}
        self._path = statistics_[0].path
        return statistics_[1]
