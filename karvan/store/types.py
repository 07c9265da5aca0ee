"""Types of the store protocol: tables, features, rules, rows, lookups and gradients of distinct keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.native import RULES, _native

Keys: TypeAlias = NDArray[np.int64]
Vectors: TypeAlias = NDArray[np.float32]
Counts: TypeAlias = NDArray[np.uint32]
PerTable: TypeAlias = Mapping[str, int]  # a number for each table
_MODES = ("pooled", "padded", "cells")
_COMBINERS = ("sum", "mean", "sqrtn", "mean_by_count", "mean_by_density")
_LIMITED = ("lru", "lfu")  # policies whose number is a number of rows


@dataclass(frozen=True)
class TableSpec:
    """A table, in the terms of the native core."""

    name: str
    dim: int
    dtype: str
    init: tuple[str, float, float, float, float]
    admit: tuple[str, float, int]
    evict: tuple[str, float, int]
    seed: int
    shards: int

    def share(self, holder: int, holders: int) -> TableSpec:
        """The spec for one of several holders, whose policy allows its part of the rows, at least one."""
        kind, value, every = self.evict
        if kind not in _LIMITED:
            return self
        part = int(value) * (holder + 1) // holders - int(value) * holder // holders
        return replace(self, evict=(kind, float(max(1, part)), every))

    @property
    def most_rows(self) -> int | None:
        """How many rows its policy allows; None if that depends on their use."""
        kind, value, _ = self.evict
        return int(value) if kind in _LIMITED else None

    def initial_vectors(self, keys: Keys) -> Vectors:
        """The vectors with which the rows of these keys start, before rounding to `dtype`."""
        vectors = np.empty((len(keys), self.dim), dtype=np.float32)
        _native.initialise(*self.init, self.seed, self.name, np.ascontiguousarray(keys), vectors)
        return vectors


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """A feature, as the model declares it.

    mode: "pooled", a vector for each sample; "padded", equally many for each; "cells", a vector for each id.
    combiner: of a pooled feature, "sum", "mean", "sqrtn", "mean_by_count" or "mean_by_density".
    stack: how many keys an id has.
    """

    name: str
    table: str
    _: KW_ONLY
    dim: int
    mode: str = "pooled"
    combiner: str = "sum"
    stack: int = 1

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"{self.title} expected a mode of {', '.join(_MODES)}, got '{self.mode}'.")
        if self.combiner not in _COMBINERS:
            raise ValueError(
                f"{self.title} expected a combiner of {', '.join(_COMBINERS)}, got '{self.combiner}'."
            )
        if self.dim < 1 or self.stack < 1:
            raise ValueError(
                f"{self.title} expected a dim and a stack of at least 1, "
                f"got dim {self.dim} and stack {self.stack}."
            )

    @property
    def title(self) -> str:
        """How errors begin."""
        return f"Feature '{self.name}' of table '{self.table}':"

    def native(self) -> _native.FeatureSpec:
        """The same for the native core."""
        return _native.FeatureSpec(
            self.name, self.table, dim=self.dim, mode=self.mode, combiner=self.combiner, stack=self.stack
        )


@dataclass(slots=True)
class Rule:
    """The rule of an optimizer and its numbers for one step.

    The page "Add a sparse optimizer" has the formulas.

    Args:
        kind: The name of the rule, such as "sgd" or "adam"; the page lists them.
        lr: The learning rate.
        beta1: The decay of m or a, the momentum, or the beta of "ftrl".
        beta2: The decay of v.
        eps: Is added to roots.
        weight_decay: Its product with the vector is added to the gradient.
        shrink: Multiplies the vector before the update of "adamw".
        alpha: The learning rate after the correction of moments.
        l1: The L1 limit of "ftrl".
        l2: The L2 limit of "ftrl".
        accumulate_last: Whether "adagrad" adds the gradient after the update.
        clip_value: The largest absolute value of an element of a gradient; 0 for no limit.
        clip_norm: The largest L2 norm of a gradient; 0 for no limit.
        bound: The largest absolute value of an element of a vector; 0 for no limit.

    Raises:
        ValueError: The kind is unknown.

    Example:
        >>> kv.optim.Rule("sgd", lr=0.1).kind
        'sgd'
    """

    kind: str
    lr: float = 0.01
    beta1: float = 0.0  # momentum, nesterov, adam: the factor; adagrad: decay of the accumulator; ftrl: beta
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0  # times the vector is added to the gradient
    shrink: float = 1.0  # adamw, amsgrad: the vector is multiplied by this first
    alpha: float = 0.0  # adam: the learning rate, corrected for the bias of the moments
    l1: float = 0.0
    l2: float = 0.0
    accumulate_last: bool = False
    clip_value: float = 0.0  # 0: none, as for the next two
    clip_norm: float = 0.0
    bound: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in RULES:
            raise ValueError(f"Unknown rule '{self.kind}': expected one of {', '.join(RULES)}.")

    def native(self) -> _native.Rule:
        """Return the rule for the native core, which computes with float32.

        Returns:
            The native rule.
        """
        rule = _native.Rule(self.kind)
        for name in RULE_NUMBERS:
            setattr(rule, name, getattr(self, name))
        return rule


Rules: TypeAlias = Mapping[str, Rule]  # by table
RULE_NUMBERS = tuple(field.name for field in fields(Rule) if field.name != "kind")


@dataclass(frozen=True, slots=True)
class LookupContext:
    """The circumstances of a lookup: whether it trains, in which step, and at what time in seconds."""

    training: bool
    step: int = 0
    now: float = 0.0


class Rows(NamedTuple):
    """Rows with all they have, in the order of their keys' hashes: what snapshots hold and loads take."""

    keys: Keys
    vectors: Vectors
    state: Vectors
    counts: Counts
    last_steps: Counts


class Found(NamedTuple):
    """The result of a lookup of distinct keys: vectors, and the table's version for the push that follows."""

    vectors: Vectors
    version: int


class Push(NamedTuple):
    """Gradients of one lookup's distinct keys, and the table's version at that lookup."""

    keys: Keys
    gradients: Vectors
    version: int


class StalenessStats(NamedTuple):
    """Staleness of training lookups: the number of batches between lookup and applied gradient.

    total: the sum over all lookups so far; most: the largest.
    """

    lookups: int = 0
    total: int = 0
    most: int = 0


class Gradients(Protocol):
    """The gradients of a backward pass, summed by key; each method returns a value for each table's slot."""

    def finite(self) -> list[bool]:
        """Whether a table's gradients have neither infinities nor NaNs; on a GPU, which skips rows, True.

        Those on a GPU have `check_finite`, too, which waits for it and says it of their values.
        """

    def touched(self) -> list[bool]:
        """Whether any key of a table has a gradient."""


@dataclass(eq=False)
class GradientFlags(Gradients):
    """Which tables have gradients, and which of these are finite, by the tables' slots."""

    _finite: list[bool]
    _touched: list[bool]

    @override
    def finite(self) -> list[bool]:
        return self._finite

    @override
    def touched(self) -> list[bool]:
        return self._touched


class LateGradients(GradientFlags):
    """Gradients on a device that can check them, and skip the update by them, while the host continues."""

    def tensors(self, slots: Collection[int]) -> list[Tensor] | None:
        """The gradients of the tables in these slots, to be checked; None if the host has to do that."""
        raise NotImplementedError

    def agree(self, found_inf: Tensor) -> None:
        """Set this float on the device to 1 if it is 1 on any rank; without ranks, nothing happens."""

    def skip_if(self, found_inf: Tensor) -> None:
        """Update nothing unless this float on the device is 0, when the update is computed."""
        raise NotImplementedError


# `Capture`: tables as they were at one moment, read by a save while training continues.


class Capture(ABC):
    """All tables as they were at the call of `Store.capture`; its methods may be called on any thread."""

    versions: Mapping[str, int]  # of the tables at that moment: `since` of the next capture

    @abstractmethod
    def part(self, table: str, part: int) -> Rows:
        """The rows of one part, which is released; the parts of a table are read in ascending order."""

    @abstractmethod
    def erased(self, table: str) -> Keys:
        """The keys that were removed since `since`, including those that were inserted again."""

    @abstractmethod
    def close(self) -> None:
        """Release what has not been read."""
