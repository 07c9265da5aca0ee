"""Features and their operations, over `kv.Feature`."""

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
from karvan.compat.unsupported import missing_names

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

__getattr__ = missing_names("recis.features", {"Mask": "filter values by an operation of your own, an _OP."})
