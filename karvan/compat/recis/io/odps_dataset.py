"""MaxCompute: not supported."""

from karvan.compat.unsupported import missing_names

__getattr__ = missing_names(
    "recis.io.odps_dataset", {"OdpsDataset": "export the table to ORC files, and use OrcDataset."}
)
