"""The kinds of stores that conformance tests run on, and random exploration with or without hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

import karvan.native
from karvan import distributed
from karvan.store import MemoryStore, Store


class DistinctKeysStore(MemoryStore):
    """Rows in memory, but reached only by `lookup` and `apply`, as a store behind a wire would be."""

    forward = Store.forward
    update = Store.update


@dataclass(frozen=True)
class StoreKind:
    """How to make a store, and what tests must know of it.

    skips_rows: a gradient that is not finite skips its row, not its table.
    drops_rejected: the gradient of a key that was not admitted counts as dropped.
    slow: a step takes a tenth of a second, so that tests make fewer of them.
    """

    name: str
    make: Callable[[], Store]
    skips_rows: bool = False
    drops_rejected: bool = False
    slow: bool = False

    def __str__(self) -> str:
        return self.name

    def few(self, many: int, few: int) -> int:
        """`few` if steps are slow, `many` otherwise."""
        return few if self.slow else many


def also_slowly(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Values for `parametrize`, of which those that are not `quick` are for slow tests."""
    return [pytest.param(v, id=str(v), marks=() if v in quick else pytest.mark.slow) for v in values]


def memory() -> Store:
    """A store to compare with; where there is no native core, the test is skipped."""
    if not karvan.native.is_built():
        pytest.skip("compares with tables of the native core")
    return MemoryStore()


def make_cuda(device: str) -> Callable[[], Store]:
    """A factory of stores on a device; "cpu" is Triton's interpreter."""

    def make() -> Store:
        from karvan.store.cuda.store import CudaStore

        return CudaStore(device)

    return make


def make_tiered(device: str) -> Callable[[], Store]:
    """A factory of stores on a device that has room for a handful of rows; the others are in host memory."""

    def make() -> Store:
        from karvan.store.cuda.store import CudaStore

        return CudaStore(device, 600)

    return make


def make_sharded_cuda(device: str) -> Callable[[], Store]:
    """A factory of stores on a device that ranks share the rows of; a connection of ranks must be there."""

    def make() -> Store:
        from karvan.store.cuda.sharded import ShardedCudaStore

        return ShardedCudaStore(distributed.current(), device)

    return make


def explore(body: Callable[[random.Random], None], examples: int, shrink: bool = True) -> None:
    """Call `body` with sources of random numbers, which hypothesis draws if it is there.

    shrink: look for the smallest failure, which takes many calls.
    """
    try:
        from hypothesis import Phase, given, settings
        from hypothesis import strategies as st
    except ImportError:
        for seed in range(examples):
            body(random.Random(seed))
        return

    def explored(source: random.Random) -> None:
        body(source)

    examples = max(1, examples * settings.default.max_examples // 12)
    wrapped = given(source=st.randoms(use_true_random=False))(explored)
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]
    settings(settings.default, max_examples=examples, phases=phases)(wrapped)()
