"""Where a loader is in its data, in a form that does not depend on the number of workers or ranks.

A position names the blocks (see `shuffle.py`) whose records have all been handed out, and for blocks that
have been begun, how many. Epochs before `epoch` are complete. Every rank counts what it handed out on top of
the position that it started from; `merge` joins the positions of all ranks, and any number of ranks may
start from the result. Joining is a union, so the order of ranks and repetitions do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

VERSION = 1


class Receipt(NamedTuple):
    """So many records of a block, from its start on, have been handed out."""

    epoch: int
    block: int
    records: int
    complete: bool


class Progress:
    """What has been handed out of one epoch."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.partial: dict[int, int] = {}

    def add(self, block: int, records: int, complete: bool) -> None:
        """Count records of a block; never backwards."""
        if complete or block in self.done:
            self.done.add(block)
            self.partial.pop(block, None)
        elif records:
            self.partial[block] = max(records, self.partial.get(block, 0))

    def state(self) -> dict[str, Any]:
        """As JSON: ranges of done blocks [first, count, step] and [block, records] of partial ones."""
        partial = [[block, records] for block, records in sorted(self.partial.items())]
        return {"done": _ranges(sorted(self.done)), "partial": partial}


class Position:
    """Progress by epoch; `epoch` is the first one that is not known to be complete."""

    def __init__(self) -> None:
        self.epoch = 0
        self.steps = 0
        self._progress: dict[int, Progress] = {}

    def progress(self, epoch: int) -> Progress:
        """What has been handed out of an epoch; nothing, for one not begun."""
        return self._progress.get(epoch) or Progress()

    def add(self, receipt: Receipt) -> None:
        """Count what a batch took."""
        if receipt.epoch >= self.epoch:
            progress = self._progress.setdefault(receipt.epoch, Progress())
            progress.add(receipt.block, receipt.records, receipt.complete)

    def is_complete(self, epoch: int, blocks: int) -> bool:
        """Whether all of the epoch's `blocks` blocks are done."""
        return epoch < self.epoch or len(self.progress(epoch).done) == blocks

    def advance(self, epoch: int) -> None:
        """Say that all epochs before this one are complete, and forget their details."""
        self.epoch = max(self.epoch, epoch)
        self._progress = {number: p for number, p in self._progress.items() if number >= self.epoch}

    def join(self, other: Position) -> None:
        """Count what the other position counts, too."""
        self.steps = max(self.steps, other.steps)
        for epoch, progress in other._progress.items():
            for block in progress.done:
                self.add(Receipt(epoch, block, 0, True))
            for block, records in progress.partial.items():
                self.add(Receipt(epoch, block, records, False))
        self.advance(other.epoch)

    def state(self) -> dict[str, Any]:
        """As JSON; successive epochs with equal progress, as a rank's finished ones have, take one entry."""
        entries: list[dict[str, Any]] = []
        for epoch, progress in sorted(self._progress.items()):
            state = progress.state()
            last = entries[-1] if entries else None
            if last and epoch == last["epoch"] + last["epochs"] and state == _without_epochs(last):
                last["epochs"] += 1
            else:
                entries.append({"epoch": epoch, "epochs": 1, **state})
        return {"epoch": self.epoch, "steps": self.steps, "progress": entries}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """The position that `state()` described."""
        position = cls()
        position.steps = int(state["steps"])
        for entry in state["progress"]:
            for epoch in range(entry["epoch"], entry["epoch"] + entry["epochs"]):
                for first, count, step in entry["done"]:
                    for block in range(first, first + count * step, step):
                        position.add(Receipt(epoch, block, 0, True))
                for block, records in entry["partial"]:
                    position.add(Receipt(epoch, block, records, False))
        position.advance(int(state["epoch"]))
        return position


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the `state_dict()`s of all ranks of a job into one that a loader of any world size takes."""
    states = list(states)
    if not states:
        raise ValueError("merge needs the positions of at least one rank, but received none.")
    first = states[0]
    position = Position()
    ranks: set[int] = set()
    for state in states:
        check_settings(state, first["settings"], "the first position")
        if state["world"] != first["world"]:
            raise ValueError(
                f"Positions to merge must come from one job, but their worlds are {first['world']} "
                f"and {state['world']}."
            )
        ranks.update(state["ranks"])
        position.join(Position.from_state(state["position"]))
    untils = [state["until"] for state in states]
    return {
        "version": VERSION,
        "settings": dict(first["settings"]),
        "world": first["world"],
        "ranks": sorted(ranks),
        "until": None if None in untils else max(untils),
        "position": position.state(),
    }


def check_settings(state: Mapping[str, Any], settings: Mapping[str, Any], whose: str) -> None:
    """Raise unless the state is a position in the same data, in the same order."""
    if state.get("version") != VERSION:
        raise ValueError(f"A position must have version {VERSION}, but has {state.get('version')!r}.")
    received = state["settings"]
    different = [name for name in settings if received.get(name) != settings[name]]
    if different:
        detail = ", ".join(f"{name} {received.get(name)!r} (here {settings[name]!r})" for name in different)
        raise ValueError(
            f"A position is valid for the same data and order only, but {whose} differs: {detail}."
        )


def _without_epochs(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"done": entry["done"], "partial": entry["partial"]}


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Rising numbers as [first, count, step]; the share of a rank is one range with the world as its step."""
    ranges: list[list[int]] = []
    for step, pairs in groupby(zip(numbers[1:], numbers, strict=False), key=lambda pair: pair[0] - pair[1]):
        run = [pair[0] for pair in pairs]
        if not ranges:
            ranges.append([numbers[0], len(run) + 1, step])
        else:
            ranges.append([run[0], len(run), step])
    return ranges or [[number, 1, 1] for number in numbers]
