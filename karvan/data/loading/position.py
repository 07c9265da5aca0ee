"""The position of a loader in its data: a few numbers for each rank.

The records of an epoch are divided over the ranks by a pure function (see `rank_shares.py`), and every rank
hands out its share in order. So a rank's position is its epoch and the number of records of its share that it
has handed out. `merge` joins the positions of all ranks, in any order and any number of times.

A job that resumes on another number of ranks divides the remaining records. These follow from the division
that ended and the positions of its ranks. A position therefore also lists the earlier divisions that still
matter, so that the division can be computed again after the next stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Whether a position is that of a `Loader` or of a stream from loaders.
#
# The position of one kind of data means nothing to another kind, even where both read the same records.


LOADER = "a Loader (kv.data.read)"


def stream_of(loaders: int) -> str:
    """The kind of a stream."""
    return f"kv.data.from_loaders() of {loaders} loader{'' if loaders == 1 else 's'}"


def kind_of(state: Any) -> str | None:
    """The kind of data that a position is of, in words; None if it is neither of these."""
    if not isinstance(state, Mapping) or "version" not in state:
        return None
    if "settings" in state:
        return LOADER
    return stream_of(len(state["loaders"])) if "loaders" in state else None


def mismatch(saved: str | None, requested: str | None) -> str:
    """What to do about a position in the middle of an epoch that is of another kind than the data."""
    before, now = saved or "another kind of data", requested or "another kind of data"
    setting = ""
    if before.startswith("kv.data.from_loaders") and now.startswith("kv.data.from_loaders"):
        setting = f", by roles.loaders: {before.split()[2]} in the job"
    return (
        f"The position is of {before}, but the data is {now}. Finish the epoch with "
        f"{saved or 'the data that it began with'}{setting}, or begin it again with drop_unfinished=True "
        "of fit (karvan train --drop-unfinished). The epoch then starts at its first batch and trains "
        "the earlier batches a second time."
    )


VERSION = 2


class Receipt(NamedTuple):
    """A number of records of an epoch that have been handed out, in the order of the rank's share."""

    epoch: int
    records: int
    complete: bool
    """Whether they are the last ones of the share."""


class RankPosition(NamedTuple):
    """The position of a rank: after all epochs before `epoch` and `records` records of its share of it."""

    epoch: int = 0
    records: int = 0
    steps: int = 0
    """Batches since the start of the first epoch."""

    def after(self, receipt: Receipt) -> RankPosition:
        """The position after the records of a receipt."""
        if receipt.complete:
            return self._replace(epoch=receipt.epoch + 1, records=0)
        before = self.records if receipt.epoch == self.epoch else 0
        return self._replace(epoch=receipt.epoch, records=before + receipt.records)


@dataclass(frozen=True, slots=True)
class Division:
    """A division of the data over `world_size` ranks, and the positions of the ranks when it ended."""

    world_size: int
    positions: Mapping[int, RankPosition]

    @property
    def first_epoch(self) -> int:
        """The first epoch that is not complete on all ranks."""
        return min(position.epoch for position in self.positions.values())

    def reaches(self, epoch: int) -> bool:
        """Whether a rank has handed out records of this epoch, or of a later one."""
        return any((position.epoch, position.records) > (epoch, 0) for position in self.positions.values())

    def state(self) -> dict[str, Any]:
        """As JSON; each of the `places` is [rank, epoch, records, steps]."""
        return {
            "world": self.world_size,
            "places": [[rank, *position] for rank, position in self.positions.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Division:
        """The division that `state()` described."""
        return cls(state["world"], {rank: RankPosition(*numbers) for rank, *numbers in state["places"]})


class Position(NamedTuple):
    """The positions of some or all ranks of a division, and the divisions before it that still matter."""

    earlier: tuple[Division, ...]
    now: Division

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """The position in a loader's state."""
        return cls(tuple(map(Division.from_state, state["earlier"])), Division.from_state(state))

    def of_rank(self, rank: int, world: int) -> tuple[tuple[Division, ...], RankPosition]:
        """Where a rank continues: the divisions before its own, and its position.

        A rank of the same division continues at its own one. Another number of ranks starts a new division
        of the remaining records of all.
        """
        positions = self.now.positions
        if world == self.now.world_size and rank in positions:
            return self.earlier, positions[rank]
        if len(positions) != self.now.world_size:
            raise ValueError(
                f"Rank {rank} of {world} needs its own position or the merged one of all ranks, but "
                f"received the position of ranks {sorted(positions)} of {self.now.world_size}."
            )
        first = self.now.first_epoch
        earlier = tuple(division for division in (*self.earlier, self.now) if division.reaches(first))
        return earlier, RankPosition(first, 0, max(position.steps for position in positions.values()))


def state_of(
    settings: Mapping[str, Any], until: int | None, earlier: Sequence[Division], now: Division
) -> dict[str, Any]:
    """A loader's state, JSON-able; lists and mappings are copies."""
    return {
        "version": VERSION,
        "settings": dict(settings),
        "until": until,
        "earlier": [division.state() for division in earlier],
        **now.state(),
    }


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the `state_dict()`s of all ranks of a job into one for loaders of any number of ranks.

    Args:
        states: The positions of all ranks.

    Returns:
        The joint position.

    Raises:
        ValueError: There are none, or they are of different jobs.

    Example:
        >>> data = [
        ...     kv.data.read({"x": [1, 2, 3]}, 1, rank=rank, world_size=2)
        ...     for rank in (0, 1)
        ... ]
        >>> state = kv.data.merge(each.state_dict() for each in data)
        >>> kv.data.read({"x": [1, 2, 3]}, 1).load_state_dict(state)
    """
    states = list(states)
    if not states:
        raise ValueError("merge needs the positions of at least one rank, but received none.")
    first = states[0]
    positions: dict[int, RankPosition] = {}
    for state in states:
        check_settings(state, first["settings"], "the first position")
        if state["world"] != first["world"]:
            raise ValueError(
                f"Positions to merge must come from one job, but their worlds are {first['world']} "
                f"and {state['world']}."
            )
        if state["earlier"] != first["earlier"]:
            raise ValueError(
                "Positions to merge must come from one job, but these ranks resumed from different "
                "positions: all ranks of a job must load the same merged position."
            )
        for rank, position in Division.from_state(state).positions.items():
            positions[rank] = max(position, positions.get(rank, position))
    untils = [state["until"] for state in states]
    earlier = [Division.from_state(division) for division in first["earlier"]]
    now = Division(first["world"], dict(sorted(positions.items())))
    return state_of(first["settings"], None if None in untils else max(untils), earlier, now)


def check_settings(state: Mapping[str, Any], settings: Mapping[str, Any], whose: str) -> None:
    """Raise unless the state is a position in the same data, in the same order."""
    if (kind := kind_of(state)) != LOADER:
        raise ValueError(mismatch(kind, LOADER))
    if state.get("version") != VERSION:
        raise ValueError(
            f"A position must have version {VERSION}, but has {state.get('version')!r}. "
            "Another version of karvan saved it: finish the epoch with that one, or begin without a position."
        )
    received = state["settings"]
    different = [name for name in settings if received.get(name) != settings[name]]
    if different:
        detail = ", ".join(f"{name} {received.get(name)!r} (here {settings[name]!r})" for name in different)
        raise ValueError(
            f"A position is only valid for the same data in the same order, but {whose} differs: {detail}."
        )
