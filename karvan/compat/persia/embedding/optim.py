"""`persia.embedding.optim`: optimizers of rows; a context makes Karvan's of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from karvan.embedding.optim.base import SparseOptimizer
from karvan.presets import persia


class Optimizer(ABC):
    """An optimizer of rows."""

    @abstractmethod
    def native(self, weight_bound: float | None) -> SparseOptimizer:
        """Karvan's, without tables; values stay within ±weight_bound."""

    def apply(self) -> None:  # noqa: B027
        """Nothing to do: a context gives its optimizer to the tables."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent. momentum and weight_decay count here; PERSIA ignores them."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    @override
    def native(self, weight_bound: float | None) -> SparseOptimizer:
        return persia.sgd(
            None,
            self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            weight_bound=weight_bound,
        )


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, whose first step is corrected as the first; PERSIA corrects it as the second."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8

    @override
    def native(self, weight_bound: float | None) -> SparseOptimizer:
        return persia.adam(
            None,
            self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            weight_bound=weight_bound,
        )


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad that scales by the accumulator before the gradient is added to it."""

    lr: float = 1e-2
    initial_accumulator_value: float = persia.INITIAL_ACCUMULATOR
    weight_decay: float = 0.0
    g_square_momentum: float = 1.0
    eps: float = 1e-10
    vectorwise_shared: bool = False

    @override
    def native(self, weight_bound: float | None) -> SparseOptimizer:
        return persia.adagrad(
            None,
            self.lr,
            eps=self.eps,
            initial_accumulator_value=self.initial_accumulator_value,
            weight_decay=self.weight_decay,
            decay=self.g_square_momentum,
            row_wise=self.vectorwise_shared,
            weight_bound=weight_bound,
        )
