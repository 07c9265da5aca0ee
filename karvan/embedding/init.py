"""How new rows begin: `kv.Table(16, init=kv.init.Normal(std=0.01))`.

The values depend only on the engine's seed, the table's name, the key and the column. So a key starts with
the same vector in every run, in whatever order keys arrive.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from karvan.argument_checks import publish

__all__ = [
    "Uniform",
    "Normal",
    "TruncatedNormal",
    "Constant",
    "XavierUniform",
    "XavierNormal",
    "KaimingUniform",
    "KaimingNormal",
    "Gamma",
    "Poisson",
    "Initialiser",
]

_LARGEST = 3.4028234663852886e38  # the largest float32: vectors start as float32
_REACH = 6.0  # standard deviations; the native quantile function ends a little beyond


class Initialiser(ABC):
    """The base class of distributions of a new row's values.

    Example:
        >>> isinstance(kv.init.Uniform(), kv.init.Initialiser)
        True
    """

    @abstractmethod
    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """Return the distribution for the native core.

        Args:
            dim: The number of elements of a vector.

        Returns:
            Its kind, and the numbers a, b, lo and hi of `csrc/table/init.h`.
        """


@dataclass(frozen=True)
class Constant(Initialiser):
    """The same value everywhere.

    Args:
        value: The value.

    Example:
        >>> table = kv.Table(dim=1, init=kv.init.Constant(0.0))
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        _require_finite(self, value=self.value)

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """Return the distribution for the native core."""
        return "constant", self.value, 0.0, 0.0, 0.0


@dataclass(frozen=True)
class Uniform(Initialiser):
    """Uniform from `low` up to, but not including, `high`.

    It is the default of tables.

    Args:
        low: The lowest value.
        high: The end of the range.

    Raises:
        ValueError: `low` is above `high`.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.Uniform(-0.05, 0.05))
    """

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        _require_finite(self, low=self.low, high=self.high, width=self.high - self.low)
        if self.low > self.high:
            raise ValueError(f"{self} must have low <= high.")

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """Return the distribution for the native core."""
        return "uniform", self.low, self.high, 0.0, 0.0


@dataclass(frozen=True)
class Normal(Initialiser):
    """Normal with a mean and a standard deviation.

    Args:
        mean: The mean.
        std: The standard deviation.

    Raises:
        ValueError: `std` is negative.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.Normal(std=0.02))
    """

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        _require_finite(self, mean=self.mean, std=self.std)
        if self.std < 0:
            raise ValueError(f"{self} must have std >= 0.")

    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """Return the distribution for the native core."""
        return "normal", self.mean, self.std, 0.0, 0.0


@dataclass(frozen=True)
class TruncatedNormal(Initialiser):
    """Normal without the values outside of [low, high].

    The limits are absolute: `TruncatedNormal(std=0.02, low=-2, high=2)` keeps all values, as in torch and
    RecIS.

    Args:
        mean: The mean.
        std: The standard deviation.
        low: The lowest value; by default two std below the mean.
        high: The highest value; by default two std above the mean.

    Raises:
        ValueError: `std` is not above 0, or the limits leave no values.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.TruncatedNormal(std=0.02))
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
        """Return the distribution for the native core."""
        return "truncated_normal", self.mean, self.std, *self._bounds()


@dataclass(frozen=True)
class Gamma(Initialiser):
    """Gamma with a shape and a scale; its mean is shape · scale.

    Args:
        shape: The shape, from 1e-6 to 1e6.
        scale: The scale, above 0.
        low: Values below it become it.
        high: Values above it become it.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.Gamma(shape=2.0, scale=0.01))
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
        """Return the distribution for the native core."""
        return "gamma", self.shape, self.scale, *_clamp(self, self.low, self.high)


@dataclass(frozen=True)
class Poisson(Initialiser):
    """Poisson-distributed whole numbers.

    Args:
        rate: Their mean, from 0 to 500.
        low: Values below it become it.
        high: Values above it become it.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.Poisson(rate=1.0))
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
        """Return the distribution for the native core."""
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
        """Return the distribution for the native core."""
        bound = math.sqrt(3.0) * self._std(dim)
        return "uniform", -bound, bound, 0.0, 0.0


class _ScaledNormal(_Scaled):
    def native(self, dim: int) -> tuple[str, float, float, float, float]:
        """Return the distribution for the native core."""
        return "normal", 0.0, self._std(dim), 0.0, 0.0


@dataclass(frozen=True)
class XavierUniform(_Xavier, _ScaledUniform):
    """Uniform within gain · sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010).

    RecIS initialises blocks of 10,240 rows: `XavierUniform(fan_out=10240)` has its range.

    Args:
        gain: Widens the range.
        fan_in: By default the table's dim.
        fan_out: By default the table's dim.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.XavierUniform())
    """

    gain: float = 1.0


@dataclass(frozen=True)
class XavierNormal(_Xavier, _ScaledNormal):
    """Normal with a standard deviation of gain · sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, 2010).

    Args:
        gain: Widens the distribution.
        fan_in: By default the table's dim.
        fan_out: By default the table's dim.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.XavierNormal())
    """

    gain: float = 1.0


@dataclass(frozen=True)
class KaimingUniform(_ScaledUniform):
    """Uniform within gain · sqrt(3 / fan_in) (He et al., 2015).

    Args:
        gain: Widens the range; the default suits a ReLU.
        fan_in: By default the table's dim.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.KaimingUniform())
    """

    gain: float = math.sqrt(2.0)


@dataclass(frozen=True)
class KaimingNormal(_ScaledNormal):
    """Normal with a standard deviation of gain / sqrt(fan_in) (He et al., 2015).

    Args:
        gain: Widens the distribution; the default suits a ReLU.
        fan_in: By default the table's dim.

    Example:
        >>> table = kv.Table(dim=16, init=kv.init.KaimingNormal())
    """

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
