"""One optimizer step: the gradients of some batches averaged, clipped, looked at, and applied or left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from karvan import _native
from karvan.counts import check_integers
from karvan.embedding import EmbeddingEngine
from karvan.embedding.optim.base import SparseOptimizer
from karvan.train.dense.here import DenseHere
from karvan.train.dense.policies import Outcome
from karvan.train.precision import Precision


@dataclass(frozen=True)
class UpdateSettings:
    """How gradients become steps.

    accumulate: batches whose mean gradient makes a step. clip_value limits each element of the dense
    gradients, then clip_norm the L2 norm of all of them together; sparse optimizers have their own limits.
    skip_nonfinite leaves out a step, dense and sparse, if any gradient has an infinity or a NaN.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    skip_nonfinite: bool = True

    def __post_init__(self) -> None:
        check_integers(accumulate=self.accumulate)
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}.")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0 or None, got {value}.")


class Update:
    """Applies gradients by a dense and a sparse optimizer, both or none; either may be missing."""

    def __init__(
        self,
        dense: torch.optim.Optimizer | None,
        sparse: SparseOptimizer | None,
        settings: UpdateSettings,
        precision: Precision,
        stepping: DenseHere | None = None,
    ) -> None:
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        if dense is not None:
            self.optimizers["dense"] = dense
        if sparse is not None:
            self.optimizers["sparse"] = sparse
        if not self.optimizers:
            raise ValueError("Training needs a dense_optimizer or a sparse_optimizer, got neither.")
        self._dense = dense
        self._sparse = sparse
        self._settings = settings
        self._precision = precision
        self._stepping = stepping or DenseHere(dense)
        self._checks = settings.skip_nonfinite or precision.always_checks

    def forget(self) -> None:
        """Drop gradients that wait."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def backward(self, loss: Tensor, divisor: float) -> None:
        """Add the gradients of one of a step's batches, divided by their number or what stands for it."""
        torch.autograd.backward(self._precision.scale(loss if divisor == 1 else loss / divisor))

    def apply(self) -> bool | None:
        """Make the step, unless gradients are not finite; whether it was made, None if servers reject it.

        Whatever becomes of it, the gradients are gone: rows have those of steps that were taken only.
        """
        sparse_finite = not self._checks or self._sparse is None or self._sparse.gradients_finite()
        self._precision.unscale(self._dense, sparse_finite)
        finite = sparse_finite and (not self._checks or all_finite(self._gradients()))
        outcome: Outcome = "not finite"
        if finite:
            self._clip()
            outcome = self._stepping.step()
        if outcome == "accepted" and self._sparse is not None:
            self._sparse.step()
        self._precision.update()
        self.forget()
        return None if outcome == "rejected" else outcome == "accepted"

    def pass_over(self) -> bool:
        """A step without anything to learn from: schedules go on, as those of other trainers do."""
        self.forget()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return True

    def _parameters(self) -> list[Tensor]:
        groups = [] if self._dense is None else self._dense.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _clip(self) -> None:
        if self._settings.clip_value is not None:
            clip_grad_value_(self._parameters(), self._settings.clip_value)
        if self._settings.clip_norm is not None:
            clip_grad_norm_(self._parameters(), self._settings.clip_norm)


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether no element is an infinity or a NaN."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if all(g.is_cpu and g.dtype is torch.float32 and g.is_contiguous() for g in dense):
        return _native.all_finite([g.data_ptr() for g in dense], [g.numel() for g in dense])
    largest = get_total_norm(dense, math.inf)  # the largest magnitude: unlike a sum, it cannot overflow
    return bool(torch.isfinite(largest))


DenseOptimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_dense(optimizer: DenseOptimizer | None, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer itself, or what a callable makes of the model's parameters."""
    if isinstance(optimizer, SparseOptimizer):
        raise TypeError(f"{type(optimizer).__name__} of kv.optim is for rows: give it as sparse_optimizer.")
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    made: Any = optimizer(model.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "dense_optimizer must be a torch optimizer, or a function that makes one of parameters, "
            f"but it made {type(made).__name__}."
        )
    return made


def make_sparse(optimizer: SparseOptimizer | None, model: nn.Module) -> SparseOptimizer | None:
    """The optimizer, attached to all tables of the model unless it is attached already."""
    if optimizer is not None and not isinstance(optimizer, SparseOptimizer):
        raise TypeError(f"sparse_optimizer must be one of kv.optim, got {type(optimizer).__name__}.")
    if optimizer is not None and not optimizer.attached:
        optimizer.attach(model)
    return optimizer


def engines_of(model: nn.Module) -> list[EmbeddingEngine]:
    """The engines in a model, each once."""
    return [module for module in model.modules() if isinstance(module, EmbeddingEngine)]
