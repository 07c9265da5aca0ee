"""`MetricReportHook`: how often a `kv.Trainer` reports its speed and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from karvan.compat.recis.hooks.trainer_option import TrainerOption
from karvan.compat.unsupported import require_default

_FLOPS = "Karvan counts no operations: use ProfilerHook."


@dataclass
class ReportArguments:
    """interval_step: steps between two reports."""

    interval_step: int = 100
    tflops_peak: float | None = -1
    compute_precision: Any = None
    eval_flops_ratio: float = 1 / 3
    min_peak_coverage: float = 0.99

    def __post_init__(self) -> None:
        if not isinstance(self.interval_step, int) or self.interval_step < 1:
            raise ValueError(
                f"ReportArguments expects interval_step of at least 1, got {self.interval_step}."
            )
        for name in ("tflops_peak", "compute_precision", "eval_flops_ratio", "min_peak_coverage"):
            default = type(self).__dataclass_fields__[name].default
            require_default(f"ReportArguments {name}", getattr(self, name), default, _FLOPS)


class MetricReportHook(TrainerOption):
    """`log_every` of a `kv.Trainer`: samples a second and the rows of tables are in history.jsonl.

    That file is in output_dir; a Trainer writes it without this hook, too. The numbers are
    those of the Trainer's own model and precision.
    """

    def __init__(
        self,
        model: nn.Module,
        report_args: ReportArguments | None = None,
        mixed_precision: str | None = None,
        flops_state: Any = None,
    ) -> None:
        require_default("flops_state", flops_state, None, _FLOPS)
        self.model, self.args = model, report_args or ReportArguments()
        self.mixed_precision = mixed_precision

    @override
    def options(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        return {"log_every": self.args.interval_step}
