"""Features and their operations, over `kv.Feature`."""

from karvan.compat.recis.features import op
from karvan.compat.recis.features.feature import Feature
from karvan.compat.recis.features.feature_engine import FeatureEngine
from karvan.compat.recis.features.op import (
    Bucketize,
    FeatureCross,
    Hash,
    IDMultiHash,
    Mod,
    SelectField,
    SelectFields,
    SequenceTruncate,
)

__all__ = [
    "Bucketize",
    "Feature",
    "FeatureCross",
    "FeatureEngine",
    "Hash",
    "IDMultiHash",
    "Mod",
    "SelectField",
    "SelectFields",
    "SequenceTruncate",
]

__getattr__ = op.__getattr__
