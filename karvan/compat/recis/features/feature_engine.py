"""`FeatureEngine`: all features of a batch by a `kv.FeatureEngine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from karvan.compat.recis.features.feature import Feature
from karvan.compat.recis.ragged.tensor import to_karvan, to_recis
from karvan.features import FeatureEngine as Engine


class FeatureEngine(nn.Module):
    """Runs the operations of all features, equal ones of many features together.

    A feature with an operation of the program's own is computed by itself.
    """

    def __init__(self, feature_list: Sequence[Feature]) -> None:
        super().__init__()
        self.feature_list = nn.ModuleList(feature_list)
        chained = [each for each in feature_list if all(op.chained for op in each.operations())]
        self._alone = [each for each in feature_list if each not in chained]
        self.engine = Engine([feature.chain() for feature in chained])
        self._renamed = {old: new for each in chained for old, new in each.renamed().items()}

    def forward(self, data: Mapping[str, Any], remain_no_use_data: bool = True) -> dict[str, Any]:
        """The features, and unless told otherwise also the entries whose names no feature has."""
        if not isinstance(data, Mapping):
            raise TypeError(f"FeatureEngine expects a mapping of names, got {type(data).__name__}.")
        made = self.engine({name: to_karvan(entry) for name, entry in data.items()})
        features = {output for each in self.engine.features for output in each.outputs()}
        found = {
            self._renamed.get(name, name): to_recis(entry)
            for name, entry in made.items()
            if remain_no_use_data or name in features
        }
        for feature in self._alone:
            result = feature(data)
            several = isinstance(result, Mapping)
            found |= (
                {f"{feature.name}_{name}": each for name, each in result.items()}
                if several
                else {feature.name: result}
            )
        return found
