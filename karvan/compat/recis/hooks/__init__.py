"""Hooks of a Trainer."""

from karvan.compat.recis.hooks.clip_grad_norm_hook import ClipGradNormHook
from karvan.compat.recis.hooks.filter_hook import HashTableFilterHook
from karvan.compat.recis.hooks.hook import Hook
from karvan.compat.recis.hooks.logger_hook import LoggerHook
from karvan.compat.recis.hooks.monitor_report_hook import MetricReportHook
from karvan.compat.recis.hooks.profiler_hook import ProfilerHook
from karvan.compat.unsupported import missing_names

__all__ = [
    "ClipGradNormHook",
    "HashTableFilterHook",
    "Hook",
    "LoggerHook",
    "MetricReportHook",
    "ProfilerHook",
]

__getattr__ = missing_names(
    "recis.hooks",
    {
        **dict.fromkeys(("MLTrackerHook", "add_to_ml_tracker"), "use kv.loggers, such as TensorBoardLogger."),
        **dict.fromkeys(
            ("TraceToOdpsHook", "TraceToOdpsHookV1", "TraceToOdpsHookV2", "add_to_trace"),
            "write predictions by kv.train.write_predictions.",
        ),
    },
)
