"""Columns that join feature columns of TensorFlow: not supported."""

from karvan.compat.unsupported import missing_names

_INSTEAD = "it joins feature columns of TensorFlow: use layers.ConcatenateWithOffset, or kv.Feature.concat."

__getattr__ = missing_names(
    "elasticdl_preprocessing.feature_column.feature_column",
    dict.fromkeys(("concatenated_categorical_column", "ConcatenatedCategoricalColumn"), _INSTEAD),
)
