"""Where a loader is in its data, in a form that does not depend on the number of workers or ranks.

A position names the blocks (see `shuffle.py`) whose records have all been handed out, and for blocks that
have been begun, how many. Epochs before `epoch` are complete. Every rank counts what it handed out on top of
the position that it started from; `merge` joins the positions of all ranks, and any number of ranks may
start from the result. Joining is a union, so the order of ranks and repetitions do not matter.

A position is asked for after every batch, so telling it must not take longer the more is finished. Finished
blocks are therefore kept as the runs that tell them, to which the next one is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

VERSION = 1

Run: TypeAlias = tuple[int, int, int]  # first, count, step


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
        self._runs: list[Run] = []  # what is done, in the order it came

    def add(self, block: int, records: int, complete: bool) -> None:
        """Count records of a block; never backwards."""
        if complete and block not in self.done:
            self.done.add(block)
            self.partial.pop(block, None)
            _append(self._runs, block)
        elif records and block not in self.done:
            self.partial[block] = max(records, self.partial.get(block, 0))

    def compact(self) -> None:
        """Tell what is done by fewer runs, if it has fewer in the order of blocks."""
        rising: list[Run] = []
        for block in sorted(self.done):
            _append(rising, block)
        self._runs = min(rising, self._runs, key=len)

    def told(self) -> tuple[tuple[Run, ...], tuple[tuple[int, int], ...]]:
        """Runs of blocks that are done, and (block, records) of partial ones."""
        return tuple(self._runs), tuple(sorted(self.partial.items()))


class Entry(NamedTuple):
    """What is told of successive epochs with equal progress."""

    epoch: int
    epochs: int
    done: tuple[Run, ...]
    partial: tuple[tuple[int, int], ...]

    def state(self) -> dict[str, Any]:
        """As JSON, in lists of its own."""
        return {
            "epoch": self.epoch,
            "epochs": self.epochs,
            "done": [list(run) for run in self.done],
            "partial": [list(begun) for begun in self.partial],
        }


class Position:
    """Progress by epoch; `epoch` is the first one that is not known to be complete."""

    def __init__(self) -> None:
        self.epoch = 0
        self.steps = 0
        self._progress: dict[int, Progress] = {}
        self._newest = 0  # the epoch that is being handed out
        self._earlier: list[Entry] | None = None  # what was told of those before it, if that still holds

    def progress(self, epoch: int) -> Progress:
        """What has been handed out of an epoch; nothing, for one not begun."""
        return self._progress.get(epoch) or Progress()

    def add(self, receipt: Receipt) -> None:
        """Count what a batch took."""
        if receipt.epoch >= self.epoch:
            if receipt.epoch != self._newest:
                self._newest = max(self._newest, receipt.epoch)
                self._earlier = None
            progress = self._progress.setdefault(receipt.epoch, Progress())
            progress.add(receipt.block, receipt.records, receipt.complete)

    def is_complete(self, epoch: int, blocks: int) -> bool:
        """Whether all of the epoch's `blocks` blocks are done."""
        return epoch < self.epoch or len(self.progress(epoch).done) == blocks

    def advance(self, epoch: int) -> None:
        """Say that all epochs before this one are complete, and forget their details."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._progress = {number: p for number, p in self._progress.items() if number >= epoch}
            self._earlier = None

    def compact(self) -> None:
        """Make what is told as short as it can be."""
        for progress in self._progress.values():
            progress.compact()
        self._earlier = None

    def join(self, other: Position) -> None:
        """Count what the other position counts, too."""
        self.steps = max(self.steps, other.steps)
        for epoch, progress in other._progress.items():
            self._add_told(epoch, *progress.told())
        self.advance(other.epoch)

    def _add_told(self, epoch: int, done: Iterable[Sequence[int]], partial: Iterable[Sequence[int]]) -> None:
        for first, count, step in done:
            for block in range(first, first + count * step, step):
                self.add(Receipt(epoch, block, 0, True))
        for block, records in partial:
            self.add(Receipt(epoch, block, records, False))

    def state(self) -> dict[str, Any]:
        """As JSON; successive epochs with equal progress, as a rank's finished ones have, take one entry.

        Finished blocks of an epoch are ranges [first, count, step], partial ones [block, records].
        """
        if self._earlier is None:
            self._earlier = []
            for epoch in sorted(self._progress.keys() - {self._newest}):
                _tell(self._earlier, epoch, self._progress[epoch])
        entries = list(self._earlier)
        if self._newest in self._progress:
            _tell(entries, self._newest, self._progress[self._newest])
        progress = [entry.state() for entry in entries]
        return {"epoch": self.epoch, "steps": self.steps, "progress": progress}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """The position that `state()` described."""
        position = cls()
        position.steps = int(state["steps"])
        for entry in state["progress"]:
            for epoch in range(entry["epoch"], entry["epoch"] + entry["epochs"]):
                position._add_told(epoch, entry["done"], entry["partial"])
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
    position.compact()
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


def _tell(entries: list[Entry], epoch: int, progress: Progress) -> None:
    """Add an epoch behind those before it: to the last entry, if it tells the same."""
    done, partial = progress.told()
    if entries:
        last = entries[-1]
        if epoch == last.epoch + last.epochs and (done, partial) == (last.done, last.partial):
            entries[-1] = last._replace(epochs=last.epochs + 1)
            return
    entries.append(Entry(epoch, 1, done, partial))


def _append(runs: list[Run], number: int) -> None:
    """Add a number behind the others: to the last run, if it goes on there.

    The share of a rank is one run, with the world as its step.
    """
    if runs:
        first, count, step = runs[-1]
        ahead = number - (first + (count - 1) * step)
        if ahead == step or (count == 1 and ahead > 0):
            runs[-1] = (first, count + 1, ahead)
            return
    runs.append((number, 1, 1))
