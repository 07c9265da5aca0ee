"""Hooks of a Trainer."""

from karvan.compat.recis.hooks.filter_hook import HashTableFilterHook
from karvan.compat.recis.hooks.hook import Hook
from karvan.compat.recis.hooks.logger_hook import LoggerHook
from karvan.compat.recis.hooks.profiler_hook import ProfilerHook
from karvan.compat.unsupported import missing_names

__all__ = ["HashTableFilterHook", "Hook", "LoggerHook", "ProfilerHook"]

__getattr__ = missing_names(
    "recis.hooks",
    {
        "ClipGradNormHook": "Karvan clips dense gradients by Trainer(clip_norm=…) and those of each row by "
        "kv.optim.Adam(clip_norm=…).",
        "MetricReportHook": "use kv.loggers, such as TensorBoardLogger.",
        "MLTrackerHook": "use kv.loggers, such as TensorBoardLogger.",
        "TraceToOdpsHook": "write predictions by kv.train.write_predictions.",
    },
)
