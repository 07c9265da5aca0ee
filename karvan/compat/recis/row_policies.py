"""How rows begin, which ids get them, and which are removed: initializers and hooks of tables.

The values of a row are a function of the seed of `torch.manual_seed`, the table's name and the id, not of the
order in which ids arrive. So a `generator` is not taken. Fans are those of RecIS, which initialises blocks of
rows: that of `EmbeddingOption(block_size=…)` is the other fan of Xavier and Kaiming.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn.init import calculate_gain
from typing_extensions import override

from karvan.compat.unsupported import UnsupportedError, require_default
from karvan.embedding import init
from karvan.embedding.admission import Admission, Always, ReadOnly
from karvan.embedding.eviction import Eviction, Never
from karvan.presets import recis


@dataclass(frozen=True)
class Initializer(ABC):
    """The distribution of new rows' values."""

    @abstractmethod
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        """Karvan's initialiser for rows of so many values."""


def _no_generator(generator: Any) -> None:
    require_default("generator", generator, None, "call torch.manual_seed before the model is made.")


@dataclass(frozen=True)
class ConstantInitializer(Initializer):
    """Every value the same."""

    init_val: float = 0.0

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        return init.Constant(self.init_val)


@dataclass(frozen=True)
class UniformInitializer(Initializer):
    """Uniform from a to b."""

    a: float = 0.0
    b: float = 1.0
    generator: Any = None

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        _no_generator(self.generator)
        return init.Uniform(self.a, self.b)


@dataclass(frozen=True)
class NormalInitializer(Initializer):
    """Normal."""

    mean: float = 0.0
    std: float = 1.0
    generator: Any = None

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        _no_generator(self.generator)
        return init.Normal(self.mean, self.std)


@dataclass(frozen=True)
class TruncNormalInitializer(Initializer):
    """Normal without the values outside of [a, b], which are values, not standard deviations."""

    mean: float = 0.0
    std: float = 1.0
    a: float = -2.0
    b: float = 2.0
    generator: Any = None

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        _no_generator(self.generator)
        return recis.truncated_normal(self.mean, self.std, self.a, self.b)


@dataclass(frozen=True)
class XavierUniformInitializer(Initializer):
    """Uniform, by the fans of a block."""

    gain: float = 1.0
    generator: Any = None

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        _no_generator(self.generator)
        return recis.xavier_uniform(self.gain, block_size)


@dataclass(frozen=True)
class XavierNormalInitializer(Initializer):
    """Normal, by the fans of a block."""

    gain: float = 1.0
    generator: Any = None

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        _no_generator(self.generator)
        return recis.xavier_normal(self.gain, block_size)


@dataclass(frozen=True)
class _Kaiming(Initializer):
    a: float = 0.0
    mode: str = "fan_in"
    nonlinearity: str = "leaky_relu"
    generator: Any = None

    def _gain(self) -> float:
        _no_generator(self.generator)
        return calculate_gain(self.nonlinearity, self.a)  # type: ignore[arg-type]

    def _fan(self, dim: int, block_size: int) -> int:
        if self.mode not in ("fan_in", "fan_out"):
            raise ValueError(f"{type(self).__name__} expects mode 'fan_in' or 'fan_out', got {self.mode!r}.")
        return dim if self.mode == "fan_in" else block_size


@dataclass(frozen=True)
class KaimingUniformInitializer(_Kaiming):
    """Uniform, by one fan of a block."""

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        return init.KaimingUniform(self._gain(), self._fan(dim, block_size))


@dataclass(frozen=True)
class KaimingNormalInitializer(_Kaiming):
    """Normal, by one fan of a block; RecIS 1.0 gives a uniform distribution instead."""

    @override
    def native(self, dim: int, block_size: int) -> init.Initialiser:
        return init.KaimingNormal(self._gain(), self._fan(dim, block_size))


_ONLY_WHEN_ASKED = 1 << 30  # steps between two checks: HashTableFilterHook makes them


class _Policy:
    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        self._name = name
        self._params = dict(params or {})

    @property
    def name(self) -> str:
        """The name of the policy."""
        return self._name

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters."""
        return self._params

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, {self._params})"


class AdmitHook(_Policy):
    """Which unknown ids get rows: "ReadOnly", none."""

    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, params)
        if name != "ReadOnly":
            raise UnsupportedError(
                f'AdmitHook("{name}")', 'expected "ReadOnly"; see kv.admission for other rules.'
            )
        if self.params:
            raise ValueError(f"ReadOnly expects no parameters, got {self.params}.")


class FilterHook(_Policy):
    """Which rows are removed: "GlobalStepFilter", those unused for `filter_step` steps.

    `HashTableFilterHook` says when.
    """

    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, params)
        if name != "GlobalStepFilter":
            raise UnsupportedError(
                f'FilterHook("{name}")', 'expected "GlobalStepFilter"; see kv.eviction for other rules.'
            )
        if set(self.params) != {"filter_step"}:
            raise ValueError(f'GlobalStepFilter expects {{"filter_step": steps}}, got {self.params}.')


def admission(hook: AdmitHook | None) -> Admission:
    """Karvan's rule for a hook."""
    return Always() if hook is None else ReadOnly()


def eviction(hook: FilterHook | None) -> Eviction:
    """Karvan's rule for a hook."""
    if hook is None:
        return Never()
    return recis.global_step_filter(int(hook.params["filter_step"]), every=_ONLY_WHEN_ASKED)
