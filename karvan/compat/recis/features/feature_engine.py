"""`FeatureEngine`: all features of a batch by a `kv.FeatureEngine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from karvan.compat.recis.features.feature import Feature
from karvan.compat.recis.ragged.tensor import to_karvan, to_recis
from karvan.features import FeatureEngine as Engine


class FeatureEngine(nn.Module):
    """Runs the operations of all features, equal ones of many features together."""

    def __init__(self, feature_list: Sequence[Feature]) -> None:
        super().__init__()
        self.engine = Engine([feature.chain() for feature in feature_list])
        self._renamed = {old: new for each in feature_list for old, new in each.renamed().items()}

    def forward(self, data: Mapping[str, Any], remain_no_use_data: bool = True) -> dict[str, Any]:
        """The features, and unless told otherwise also the entries whose names no feature has."""
        if not isinstance(data, Mapping):
            raise TypeError(f"FeatureEngine expects a mapping of names, got {type(data).__name__}.")
        made = self.engine({name: to_karvan(entry) for name, entry in data.items()})
        features = {output for each in self.engine.features for output in each.outputs()}
        return {
            self._renamed.get(name, name): to_recis(entry)
            for name, entry in made.items()
            if remain_no_use_data or name in features
        }
