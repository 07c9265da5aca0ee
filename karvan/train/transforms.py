"""The transforms of data that training reads: a checkpoint has what they were fitted to.

A model is trained on numbers that its features' statistics have scaled, so it is of use only together with
them. `data.transform` of a Loader tells its transform. One with state is kept in the checkpoints of a fit by
its name, and gets its state back before the first batch is read. The statistics of a checkpoint always win:
tomorrow's data has to be scaled by the numbers that the model knows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from karvan import ranks
from karvan.checkpoint.transforms import KEY, Transform, has_state, name_of
from karvan.features import FeatureEngine
from karvan.ranks import Lane
from karvan.train.gathering import pack

_log = logging.getLogger("karvan.train")


class Transforms:
    """The transforms of some data, by name; those of a checkpoint that the data lacks stay in it."""

    def __init__(self, *data: object) -> None:
        self._found: dict[str, Transform] = {}
        self._saved: dict[str, Any] = {}
        self.use(*data)

    @property
    def found(self) -> tuple[Transform, ...]:
        """Those with state."""
        return tuple(self._found.values())

    def use(self, *data: object) -> None:
        """Find the transforms of more data, and give them what was loaded."""
        for each in data:
            transform = getattr(each, "transform", None)
            if not has_state(transform):
                continue
            name = name_of(transform)
            if self._found.setdefault(name, transform) is not transform:
                raise ValueError(
                    f"Two different transforms have the name '{name}': expected one engine for all data, or "
                    "a name for each, FeatureEngine(…, name=…)."
                )
            self._give(name)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Give the transforms what the state of a checkpoint has for them."""
        self._saved = dict(saved.get(KEY, {}))
        missing = [name for name in self._found if name not in self._saved]
        unused = [name for name in self._saved if name not in self._found]
        if missing and unused:
            raise ValueError(
                f"The checkpoint has statistics of transform '{unused[0]}', but the data has transform "
                f"'{missing[0]}': expected the same name, FeatureEngine(…, name='{unused[0]}')."
            )
        for name in self._found:
            self._give(name)

    def _give(self, name: str) -> None:
        if name not in self._saved:
            return
        transform, state = self._found[name], self._saved.pop(name)
        fitted = not getattr(transform, "unfitted", ())
        if fitted and ranks.current().rank == 0 and pack(transform.state_dict()) != pack(state):
            _log.warning(
                "Transform '%s' had other statistics than the checkpoint, which replaces them.", name
            )
        transform.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        own = {name: transform.state_dict() for name, transform in self._found.items()}
        return {KEY: {**self._saved, **own}}

    def require_fitted(self, model: nn.Module) -> None:
        """Raise if a transform, or an engine of the model, has no statistics yet."""
        for each in (*self._found.values(), *model.modules()):
            if isinstance(each, FeatureEngine):
                each.require_fitted()

    def require_equal(self, lane: Lane, model: nn.Module) -> None:
        """Raise if ranks have other statistics than this one; a collective."""
        if lane.world == 1:
            return
        engines = {
            name: module.state_dict()
            for name, module in model.named_modules()
            if isinstance(module, FeatureEngine)
        }
        digest = hashlib.sha256(pack({**self.state(), "model": engines})).hexdigest()
        gathered = lane.gather_json(digest)
        if others := [rank for rank, each in enumerate(gathered) if each != digest]:
            raise ValueError(
                f"Features of rank {lane.rank} have other statistics than those of rank {others[0]}: "
                "expected fit after kv.connect, on all ranks, which merges them, or those of a checkpoint."
            )
