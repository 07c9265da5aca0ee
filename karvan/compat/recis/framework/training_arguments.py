"""`TrainingArguments`: how a Trainer trains, and what that is in Karvan's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from karvan.checkpoint import Checkpoints
from karvan.compat.unsupported import require_default

_WINDOWS = "train on windows by kv.data.Windows and one fit for each."
_SAVES = "Karvan saves every save_steps steps and at the end."
_REFUSED: dict[str, tuple[Any, str]] = {
    "save_every_n_windows": (1, _WINDOWS),
    "save_every_n_epochs": (None, _SAVES),
    "save_end": (True, _SAVES),
    "load_update_steps": (None, "load other checkpoints by model_bank before training."),
    "load_update_windows": (1, _WINDOWS),
    "load_update_epochs": (None, "load other checkpoints by model_bank before training."),
    "params_not_save": (None, "a checkpoint has the whole model."),
    "save_filter_fn": (None, "a checkpoint has the whole model."),
    "saver_option": (None, "give output_dir and max_to_keep."),
    "ckpt_save_arg": (None, "give save_steps."),
    "ckpt_load_arg": (None, "a fit continues from its newest checkpoint."),
    "window_iter": (None, _WINDOWS),
    "eval_mos_report_uri": (None, "use kv.loggers."),
    "prefetch": (None, "batches are always prepared in advance."),
}


@dataclass
class TrainingArguments:
    """Settings of a Trainer.

    Steps are batches, as in RecIS. train_steps limits those of each epoch, and all of them are made; a single
    epoch that is limited can be continued by a larger limit. With gradient_accumulation_steps save_steps, and
    train_steps of a single epoch, are rounded up to whole steps of the optimizers. A run that is started
    again with the same output_dir continues.
    """

    gradient_accumulation_steps: int = 1
    output_dir: str = "output_dir"
    model_bank: Sequence[Any] | None = None
    log_steps: int = 100
    train_steps: int | None = None
    train_epoch: int | None = 1
    eval_steps: int | None = None
    save_steps: int | None = 1000
    max_to_keep: int = 5
    save_concurrency_per_rank: int = 4
    save_every_n_windows: int = 1
    save_every_n_epochs: int | None = None
    save_end: bool | None = True
    load_update_steps: int | None = None
    load_update_windows: int | None = 1
    load_update_epochs: int | None = None
    params_not_save: Sequence[str] | None = None
    save_filter_fn: Any = None
    saver_option: Any = None
    ckpt_save_arg: Any = None
    ckpt_load_arg: Any = None
    mixed_precision: str | None = None
    window_iter: int | None = None
    eval_mos_report_uri: str | None = None
    prefetch: Any = None

    def __post_init__(self) -> None:
        for name, (default, instead) in _REFUSED.items():
            require_default(f"TrainingArguments {name}", getattr(self, name), default, instead)
        for name in ("gradient_accumulation_steps", "train_epoch", "train_steps", "save_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"TrainingArguments expects {name} of at least 1, got {value}.")
        if self.mixed_precision not in (None, "bf16", "fp16"):
            raise ValueError(f"mixed_precision expects 'bf16' or 'fp16', got {self.mixed_precision!r}.")

    def optimizer_steps(self, batches: int | None) -> int | None:
        """How many steps of optimizers so many batches make, rounded up."""
        return None if batches is None else -(-batches // self.gradient_accumulation_steps)

    def checkpoints(self) -> Checkpoints:
        """Where checkpoints are saved."""
        return Checkpoints(
            self.output_dir, keep_last=self.max_to_keep, writers=self.save_concurrency_per_rank
        )
