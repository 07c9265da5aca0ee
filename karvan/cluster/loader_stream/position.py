"""The position of trainers in the batches of all loaders, valid for any number of trainers.

A state lists, for each loader, the indices that were taken: all below `begin`, those in `taken`, and for
each trainer in `next`, its own ones below that number. `merge` joins the states of all trainers into one
without `next`.
`positions` are [index, position of the loader's source before it]; `end` is [number of batches, position of
the source after them] once that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from karvan.data.loading.position import kind_of, mismatch, stream_of

VERSION = 1

Known = tuple[int, Any]  # index, and the source's position before it


@dataclass(frozen=True)
class StreamBase:
    """What had been taken of one loader's epoch when the trainers started, by any trainer."""

    begin: int = 0
    taken: frozenset[int] = frozenset()
    position: Known = (0, None)  # the last one known that is not after `begin`

    def has(self, index: int) -> bool:
        """Whether it was taken."""
        return index < self.begin or index in self.taken


def state_of(
    epoch: int, trainers: int, ranks: Iterable[int], loaders: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """A state, as values for JSON."""
    return {
        "version": VERSION,
        "epoch": epoch,
        "trainers": trainers,
        "ranks": list(ranks),
        "loaders": list(loaders),
    }


def loader_state(
    base: StreamBase, positions: Iterable[Known], end: Known | None, next_of: Mapping[int, int]
) -> dict[str, Any]:
    """The part of a state for one loader."""
    return {
        "begin": base.begin,
        "taken": sorted(base.taken),
        "positions": [list(known) for known in (base.position, *positions)],
        "end": None if end is None else list(end),
        "next": {str(rank): index for rank, index in next_of.items()},
    }


def base_of(loader: Mapping[str, Any]) -> StreamBase:
    """The base in the part of a state for one loader."""
    index, position = loader["positions"][0]
    return StreamBase(int(loader["begin"]), frozenset(map(int, loader["taken"])), (int(index), position))


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all trainers of a job into one that any number of trainers can continue from."""
    states = list(states)
    if not states:
        raise ValueError("merge needs the state of at least one trainer, got none.")
    first = states[0]
    for state in states:
        check(state)
        for name, got, expected in (
            ("epoch", state["epoch"], first["epoch"]),
            ("number of trainers", state["trainers"], first["trainers"]),
            ("number of loaders", len(state["loaders"]), len(first["loaders"])),
        ):
            if got != expected:
                raise ValueError(f"States to merge must have the same {name}, got {expected} and {got}.")
    ranks = sorted({rank for state in states for rank in state["ranks"]})
    if len(ranks) != first["trainers"]:
        raise ValueError(
            f"merge needs the states of all {first['trainers']} trainers, got only the states of {ranks}."
        )
    loaders = [
        _merged(
            [state["loaders"][index] for state in states], index, len(first["loaders"]), first["trainers"]
        )
        for index in range(len(first["loaders"]))
    ]
    return state_of(first["epoch"], first["trainers"], ranks, loaders)


def check(state: Mapping[str, Any], loaders: int | None = None) -> None:
    """Raise unless it is a state of this version, and of `loaders` loaders if that is not None."""
    if "loaders" not in state or (loaders is not None and len(state["loaders"]) != loaders):
        raise ValueError(
            mismatch(kind_of(state), "kv.data.from_loaders()" if loaders is None else stream_of(loaders))
        )
    if state.get("version") != VERSION:
        raise ValueError(
            f"A position of kv.data.from_loaders() must have version {VERSION}, but has "
            f"{state.get('version')!r}. Another version of karvan saved it: finish the epoch with that one, "
            "or start without a position."
        )


def start_of_epoch(loaders: int) -> list[dict[str, Any]]:
    """The loaders' parts of a state before the first batch of an epoch."""
    return [loader_state(StreamBase(), (), None, {}) for _ in range(loaders)]


def _merged(states: list[Mapping[str, Any]], loader: int, loaders: int, trainers: int) -> dict[str, Any]:
    bases = [base_of(each) for each in states]
    if any((base.begin, base.taken) != (bases[0].begin, bases[0].taken) for base in bases):
        raise ValueError("States to merge must come from trainers that started together.")
    next_of = {int(rank): index for each in states for rank, index in each["next"].items()}

    def has(index: int) -> bool:
        return bases[0].has(index) or index < next_of.get((index * loaders + loader) % trainers, 0)

    last = max([bases[0].begin, *next_of.values(), *(index + 1 for index in bases[0].taken)])
    begin = bases[0].begin
    while begin < last and has(begin):
        begin += 1
    known = [(int(index), position) for each in states for index, position in each["positions"]]
    best = max((one for one in known if one[0] <= begin), key=lambda one: one[0])
    taken = frozenset(index for index in range(begin, last) if has(index))
    end = next((tuple(each["end"]) for each in states if each["end"] is not None), None)
    return loader_state(StreamBase(begin, taken, best), (), end, {})
