"""Datasets of MaxCompute: not supported under RecIS's names."""

from karvan.compat.unsupported import missing_names

__getattr__ = missing_names(
    "recis.io.odps_dataset",
    {"OdpsDataset": "read the table by kv.data.read('odps://project/tables/name', …)."},
)
