"""Savers of a Trainer: not supported, since it has its own."""

from karvan.compat.unsupported import missing_names

_INSTEAD = "give TrainingArguments output_dir, save_steps, max_to_keep and model_bank."
__getattr__ = missing_names(
    "recis.framework.checkpoint_manager",
    dict.fromkeys(("CheckpointManager", "ExtraFields", "Saver", "SaverOptions"), _INSTEAD),
)
