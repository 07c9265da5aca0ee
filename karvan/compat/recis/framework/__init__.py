"""Training, over `kv.Trainer`."""

from karvan.compat.recis.framework.trainer import Trainer, TrainingArguments

__all__ = ["Trainer", "TrainingArguments"]
