"""Initializers of rows, each one of `kv.init`.

The values of a row are a function of the seed of `torch.manual_seed`, the table's name and the id, not of the
order in which ids arrive. So a `generator` is not taken. Fans are those of RecIS, which initialises blocks of
rows: that of `EmbeddingOption(block_size=…)` is the other fan of Xavier and Kaiming.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch.nn.init import calculate_gain
from typing_extensions import override

from karvan.compat.unsupported import require_default
from karvan.embedding import init
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
