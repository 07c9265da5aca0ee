"""Datasets of windows: not supported under RecIS's names."""

from karvan.compat.unsupported import missing_names

_INSTEAD = "train on windows by kv.data.Windows and one fit of a kv.Trainer for each."
__getattr__ = missing_names(
    "recis.io.window_io",
    dict.fromkeys(
        ("make_odps_window_io", "make_odps_combo_window_io", "make_lake_stream_window_io"), _INSTEAD
    ),
)
