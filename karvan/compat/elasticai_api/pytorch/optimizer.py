"""`DistributedOptimizer`: the optimizer of a loop with a controller, which averages the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from karvan.compat.elasticai_api.pytorch.controller import require_group
from karvan.compat.unsupported import UsageError
from karvan.distributed import current


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    backward_passes_per_step: int = 1,
    global_batch_num_per_step: int | None = None,
    fixed_global_batch_size: bool = False,
    **options: Any,
) -> torch.optim.Optimizer:
    """The optimizer itself: the controller averages its gradients over the workers that are there."""
    require_group()
    if fixed_global_batch_size and current().group is not None:
        raise UsageError(
            "DistributedOptimizer has steps of one batch of each worker, got fixed_global_batch_size=True: "
            "use the global_accumulation_steps of kv.Trainer."
        )
    if backward_passes_per_step != 1 or (global_batch_num_per_step or 1) != 1 or options:
        raise UsageError(
            "DistributedOptimizer expects steps of one batch, got options of others: use the "
            "gradient_accumulation_steps of kv.Trainer."
        )
    if named_parameters is not None:
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if own != {id(parameter) for _, parameter in named_parameters}:
            raise UsageError(
                "DistributedOptimizer expects the named parameters of its optimizer, got others."
            )
    return optimizer
