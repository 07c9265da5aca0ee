"""Initial vectors of new rows: `Table(16, init=Normal(std=0.01))`.

The values are a pure function of the engine's seed, the table's name, the key and the column. A key therefore
starts with the same vector in every run, for any number of shards and any order in which keys arrive.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from karvan.public_names import publish

__all__ = [
    "Constant",
    "Gamma",
    "Initialiser",
    "KaimingNormal",
    "KaimingUniform",
    "Normal",
    "Poisson",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
]

_LARGEST = 3.4028234663852886e38  # the largest float32: vectors start as float32
_REACH = 6.0  # standard deviations; the native quantile function ends a little beyond


class Initialiser(ABC):
    """The distribution of a new row's values."""

    @abstractmethod
    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """Its kind, a, b, lo and hi in the terms of csrc/table/init.h, for rows of `dim` values."""


@dataclass(frozen=True)
class Constant(Initialiser):
    """Every value the same."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _require_finite(self, value=self.value)

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        return "constant", self.value, 0.0, 0.0, 0.0


@dataclass(frozen=True)
class Uniform(Initialiser):
    """Uniform from low up to, but not including, high."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        _require_finite(self, low=self.low, high=self.high, width=self.high - self.low)
        if self.low > self.high:
            raise ValueError(f"{self} must have low <= high.")

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        return "uniform", self.low, self.high, 0.0, 0.0


@dataclass(frozen=True)
class Normal(Initialiser):
    """Normal with the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        _require_finite(self, mean=self.mean, std=self.std)
        if self.std < 0:
            raise ValueError(f"{self} must have std >= 0.")

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        return "normal", self.mean, self.std, 0.0, 0.0


@dataclass(frozen=True)
class TruncatedNormal(Initialiser):
    """Normal without the values outside [low, high], which default to two std from the mean.

    They are absolute: `TruncatedNormal(std=0.02, low=-2, high=2)`, as torch and RecIS cut, leaves all values.
    """

    mean: float = 0.0
    std: float = 0.01
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        low, high = self._bounds()
        _require_finite(self, mean=self.mean, std=self.std, low=low, high=high)
        if self.std <= 0:
            raise ValueError(f"{self} must have std > 0.")
        if low >= high:
            raise ValueError(f"{self} must have low < high, but they are {low} and {high}.")
        if low > self.mean + _REACH * self.std or high < self.mean - _REACH * self.std:
            raise ValueError(
                f"{self} must keep values within {_REACH:g} std of the mean, where almost all lie."
            )

    def _bounds(self) -> tuple[float, float]:
        low = self.mean - 2 * self.std if self.low is None else self.low
        high = self.mean + 2 * self.std if self.high is None else self.high
        return low, high

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        return "truncated_normal", self.mean, self.std, *self._bounds()


@dataclass(frozen=True)
class Gamma(Initialiser):
    """Gamma with the given shape, up to a million, and scale: its mean is shape * scale.

    Values outside [low, high] become the bound that they are beyond.
    """

    shape: float
    scale: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        _require_finite(self, shape=self.shape, scale=self.scale)
        if not 1e-6 <= self.shape <= 1e6:
            raise ValueError(f"{self} must have a shape from 1e-6 to 1e6.")
        if self.scale <= 0:
            raise ValueError(f"{self} must have scale > 0.")
        _clamp(self, self.low, self.high)

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        return "gamma", self.shape, self.scale, *_clamp(self, self.low, self.high)


@dataclass(frozen=True)
class Poisson(Initialiser):
    """Poisson: whole numbers whose mean is `rate`, from 0 to 500.

    Values outside [low, high] become the bound that they are beyond.
    """

    rate: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        _require_finite(self, rate=self.rate)
        if not 0 <= self.rate <= 500:
            raise ValueError(f"{self} must have a rate from 0 to 500.")
        _clamp(self, self.low, self.high)

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        return "poisson", self.rate, 0.0, *_clamp(self, self.low, self.high)


@dataclass(frozen=True)
class _Scaled(Initialiser):
    """Values whose spread falls with the fan: their standard deviation is gain / sqrt(fan).

    A row is not a weight matrix; unless fans are given, it is treated as one with fan_in = fan_out = dim. So
    Xavier and Kaiming differ only in their default gain.
    """

    gain: float = 1.0
    fan_in: int | None = None

    def __post_init__(self) -> None:
        _require_finite(self, gain=self.gain)
        if self.gain < 0:
            raise ValueError(f"{self} must have gain >= 0.")
        for name in ("fan_in", "fan_out"):
            fan = getattr(self, name, None)
            if fan is not None and not fan >= 1:
                raise ValueError(f"{self} must have a {name} of at least 1, or None for dim.")

    def _fan(self, dim: int) -> float:
        return dim if self.fan_in is None else self.fan_in

    def _std(self, dim: int) -> float:
        if dim < 1:
            raise ValueError(f"{self} needs a dim of at least 1, but dim is {dim}.")
        return self.gain / math.sqrt(self._fan(dim))


@dataclass(frozen=True)
class _Xavier(_Scaled):
    """The fan is the mean of both."""

    fan_out: int | None = None

    def _fan(self, dim: int) -> float:
        fan_out = dim if self.fan_out is None else self.fan_out
        return (super()._fan(dim) + fan_out) / 2


class _ScaledUniform(_Scaled):
    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        bound = math.sqrt(3.0) * self._std(dim)
        return "uniform", -bound, bound, 0.0, 0.0


class _ScaledNormal(_Scaled):
    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """See `Initialiser.native`."""
        return "normal", 0.0, self._std(dim), 0.0, 0.0


@dataclass(frozen=True)
class XavierUniform(_Xavier, _ScaledUniform):
    """Uniform within gain * sqrt(6 / (fan_in + fan_out)); a fan of None is dim (Glorot and Bengio, 2010).

    RecIS initialises blocks of 10,240 rows: `XavierUniform(fan_out=10240)` has its range.
    """

    gain: float = 1.0


@dataclass(frozen=True)
class XavierNormal(_Xavier, _ScaledNormal):
    """Normal with std gain * sqrt(2 / (fan_in + fan_out)); a fan of None is dim (Glorot and Bengio, 2010)."""

    gain: float = 1.0


@dataclass(frozen=True)
class KaimingUniform(_ScaledUniform):
    """Uniform within gain * sqrt(3 / fan_in), by default dim (He et al., 2015); the gain suits a ReLU."""

    gain: float = math.sqrt(2.0)


@dataclass(frozen=True)
class KaimingNormal(_ScaledNormal):
    """Normal with std gain / sqrt(fan_in), by default dim (He et al., 2015); the gain suits a ReLU."""

    gain: float = math.sqrt(2.0)


def _clamp(init: Initialiser, low: float | None, high: float | None) -> tuple[float, float]:
    """The bounds that values are moved to; without them, all float32."""
    lowest, highest = -_LARGEST if low is None else low, _LARGEST if high is None else high
    _require_finite(init, low=lowest, high=highest)
    if lowest > highest:
        raise ValueError(f"{init} must have low <= high.")
    return lowest, highest


def _require_finite(init: Initialiser, **numbers: float) -> None:
    for name, number in numbers.items():
        if not abs(number) <= _LARGEST:  # false for nan as well
            raise ValueError(f"{init} must have a finite float32 as {name}, but it is {number}.")


publish("karvan.embedding.init")
