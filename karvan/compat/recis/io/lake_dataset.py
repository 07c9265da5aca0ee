"""Lake tables and streams: not supported."""

from karvan.compat.unsupported import missing_names

_INSTEAD = "read its files by kv.data.read, or a topic of Kafka."
__getattr__ = missing_names("recis.io.lake_dataset", {"LakeDataset": _INSTEAD, "LakeStreamDataset": _INSTEAD})
