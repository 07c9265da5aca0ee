"""`DistributedOptimizer`: the optimizer of a loop with a controller, which averages the gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from karvan.argument_checks import check_counts
from karvan.compat.elasticai_api.pytorch.controller import GLOBAL_BATCHES, require_group
from karvan.compat.unsupported import UsageError, require_default


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    global_batch_num_per_step: int | None = None,
    fixed_global_batch_size: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer itself: the controller averages its gradients over the workers that are there.

    fixed_global_batch_size: a step has global_batch_num_per_step batches, by default WORKER_NUM, however
    many workers there are; `step()` returns without a step until they are computed. backward_passes_per_step
    and gradient_predivide_factor are for communication, and change no result.
    """
    require_group()
    require_default("compression", compression, None, "gradients are sent as float32: leave it out.")
    require_default("op", op, None, "gradients are averaged: leave it out.")
    workers = int(os.environ.get("WORKER_NUM") or 1)
    batches = workers if global_batch_num_per_step is None else global_batch_num_per_step
    check_counts(1, backward_passes_per_step=backward_passes_per_step, global_batch_num_per_step=batches)
    if fixed_global_batch_size:
        if batches < workers:
            raise UsageError(
                f"A step needs a batch of every worker: expected global_batch_num_per_step of at least "
                f"{workers}, the number of workers, got {batches}."
            )
        setattr(optimizer, GLOBAL_BATCHES, batches)
    if named_parameters is not None:
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if own != {id(parameter) for _, parameter in named_parameters}:
            raise UsageError(
                "DistributedOptimizer expects the named parameters of its optimizer, got others."
            )
    return optimizer
