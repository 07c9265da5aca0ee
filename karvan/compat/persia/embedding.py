"""`persia.embedding`: how rows start, their optimizers, and `EmbeddedModel`, a net with its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from karvan.compat.persia.batches import PersiaTrainingBatch, no_ids, non_ids_of
from karvan.compat.persia.config import EmbeddingConfig, Slots, get_default_embedding_config
from karvan.embedding import EmbeddingEngine
from karvan.embedding.optim.base import SparseOptimizer
from karvan.presets import persia
from karvan.ragged import REFERENCE, Padded
from karvan.train.types import samples_of

__all__ = ["EmbeddingConfig", "get_default_embedding_config"]  # what programs import from here


class Optimizer:
    """An optimizer of rows; `preset` makes Karvan's of its settings, some of which have other names there."""

    preset: ClassVar[Callable[..., SparseOptimizer]]
    renamed: ClassVar[Mapping[str, str]] = {}

    def native(self, weight_bound: float | None) -> SparseOptimizer:
        """Karvan's, without tables; values stay within ±weight_bound."""
        settings = {self.renamed.get(name, name): value for name, value in vars(self).items()}
        return self.preset(None, **settings, weight_bound=weight_bound)

    def apply(self) -> None:
        """Nothing to do: a context gives its optimizer to the tables."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent. momentum and weight_decay count here; PERSIA ignores them."""

    preset = staticmethod(persia.sgd)
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, whose first step is corrected as the first; PERSIA corrects it as the second."""

    preset = staticmethod(persia.adam)
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad that scales by the accumulator before the gradient is added to it."""

    preset = staticmethod(persia.adagrad)
    renamed: ClassVar = {"g_square_momentum": "decay", "vectorwise_shared": "row_wise"}
    lr: float = 1e-2
    initial_accumulator_value: float = persia.INITIAL_ACCUMULATOR
    weight_decay: float = 0.0
    g_square_momentum: float = 1.0
    eps: float = 1e-10
    vectorwise_shared: bool = False


Features = tuple[list[Tensor], list[Tensor]]

# The engine of each net, so that a later context finds the rows that an earlier one has trained.
_engines: WeakKeyDictionary[nn.Module, tuple[EmbeddingConfig, EmbeddingEngine]] = WeakKeyDictionary()


class EmbeddedModel(nn.Module):
    """Ids to vectors, then the net: `net(non_id_tensors, embedding_tensors)`.

    Vectors come in the order of the batch's features. A raw slot gives (samples, sample_fixed_size, dim + 1):
    its last column is 1 where there is an id. called: False for a net that only has the parameters.
    """

    def __init__(self, net: nn.Module, slots: Slots, config: EmbeddingConfig, called: bool = True) -> None:
        super().__init__()
        self.embeddings = _engine_of(net, slots, config)
        self.net = net
        self._features_only = not called
        self._order = list(slots.slots_config)  # of the batch that came last

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """The output of the net; its inputs, within `features_only`."""
        non_ids, vectors = self._features(batch)
        if not self._features_only:
            return self.net(non_ids, vectors)
        if self.training and torch.is_grad_enabled() and not samples_of(batch):
            vectors = [self._with_parameters(vectors[0]), *vectors[1:]]
        return non_ids, vectors

    def _with_parameters(self, empty: Tensor) -> Tensor:
        """A tensor without elements, on which the gradients of the net depend: all of them are zero.

        Trainers that have samples wait for these gradients, but the program's loss for no samples is ignored.
        """
        parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        return (
            empty + torch.stack([parameter.sum() for parameter in parameters]).sum() if parameters else empty
        )

    @contextmanager
    def features_only(self) -> Iterator[None]:
        """Within it, `forward` gives what the net would get."""
        before, self._features_only = self._features_only, True
        try:
            yield
        finally:
            self._features_only = before

    def _features(self, batch: Mapping[str, Any]) -> Features:
        self._order = list(PersiaTrainingBatch(batch).ids or self._order)
        for name in self._order:
            if name not in self.embeddings.features:
                raise KeyError(
                    f"The batch has the feature '{name}', but the embedding configuration has no such "
                    f"slot, only: {', '.join(self.embeddings.features)}."
                )
        absent = [name for name in self.embeddings.features if name not in batch]
        ids = batch  # with samples without ids for slots that it does not have
        if absent and REFERENCE not in batch:
            ids = {**batch, **dict.fromkeys(absent, no_ids(samples_of(batch)))}
        outputs = self.embeddings(ids)
        return non_ids_of(batch), [_shown(outputs[name]) for name in self._order]


def _shown(vectors: Tensor | Padded) -> Tensor:
    if isinstance(vectors, Padded):
        return torch.cat([vectors.values, vectors.mask.unsqueeze(2).to(vectors.values.dtype)], dim=2)
    return vectors


def config_of_rows(net: nn.Module | None) -> EmbeddingConfig | None:
    """How the rows of a net were made by an earlier context; None if it has none."""
    return None if net is None or net not in _engines else replace(_engines[net][0])


def _engine_of(net: nn.Module, slots: Slots, config: EmbeddingConfig) -> EmbeddingEngine:
    if net in _engines:
        former, engine = _engines[net]
        if former != config:
            raise ValueError(f"The rows of this model were made with {former}, got {config}.")
        return engine
    engine = EmbeddingEngine(slots.tables(config))
    _engines[net] = replace(config), engine  # a program may change its own afterwards
    return engine
