"""Datasets, over `kv.data.read`."""

from karvan.compat.recis.io.odps_dataset import OdpsDataset
from karvan.compat.recis.io.orc_dataset import OrcDataset
from karvan.compat.unsupported import missing_names

__all__ = ["OdpsDataset", "OrcDataset"]

_WINDOWS = "train on windows by kv.data.Windows and one fit of a kv.Trainer for each."
__getattr__ = missing_names(
    "recis.io",
    {
        "LakeStreamDataset": "read its files by kv.data.read, or a topic of Kafka.",
        **dict.fromkeys(("make_odps_window_io", "make_lake_stream_window_io"), _WINDOWS),
    },
)
