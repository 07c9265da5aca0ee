"""The order of an epoch, the shares of ranks in it, and their positions.

The records of an epoch are cut into blocks, and these are shuffled. Blocks do not depend on the number of
ranks; shares do. Entire blocks are dealt in order, each to the rank that has the fewest records so far, for
as long as no rank gets more than an equal share. Equal blocks are thus dealt in turns, so that ranks advance
through unshuffled data together. The few remaining blocks, about one for each rank, are cut: every rank gets
the range of their records that it is missing. Shares therefore differ by one record at most, whatever the
blocks are, and most blocks are read by one rank only.

A job that resumes on another number of ranks deals what earlier divisions have not handed out in this way.
Positions in checkpoints depend on this: a change here needs a new version of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapreplace
from itertools import chain, groupby, islice, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from karvan.data.source import Part, Split

# Shuffling: an epoch's order of blocks, and of the records inside each.
#
# A *block* is a run of records that is read at once, and mostly by one rank. Without shuffling it is a split.
# With it, the splits are shuffled, and a block is made of consecutive ones with about `shuffle` records
# together, whose records are permuted by (seed, epoch, block number). That is the shuffle buffer: bounded by
# `shuffle`, the same on every machine, and the position in it is one number, so that reading can stop and
# resume anywhere.
#
# Where splits are larger than `shuffle`, a block is one of them, or a part of a very large one, and its
# records are permuted within windows of `shuffle`. So blocks do not become small, and slow, because `shuffle`
# is small.
#
# Records of different blocks mix only as far as the splits do. Splits much smaller than `shuffle` mix better
# and read worse, because file formats decode whole row groups.

# Splits are cut by records, not by files, so one huge file and a thousand small ones are divided equally
# well. The order of an epoch is a pure function of (seed, epoch). It is computed here, not by numpy's
# generators, because positions in checkpoints depend on it and numpy may change its streams between
# versions.


MOST_RECORDS_PER_SPLIT = 65_536
FEWEST_RECORDS_PER_BLOCK = 8_192
"""Reading a smaller block costs about as much as reading one of this size."""
FEWEST_SPLITS = 64

T = TypeVar("T")
Words = npt.NDArray[np.uint64]


def cut(parts: Iterable[Part], records_per_split: int) -> list[Split]:
    """Tile every part with splits of `records_per_split` records; the last of a part may be shorter."""
    if records_per_split < 1:
        raise ValueError(f"A split needs at least 1 record, but records_per_split is {records_per_split}.")
    return [
        Split(part.path, first, min(records_per_split, part.records - first))
        for part in parts
        for first in range(0, part.records, records_per_split)
    ]


def default_split_records(parts: Iterable[Part], shuffle: int, group_records: int | None = None) -> int:
    """How many records a split has by default.

    It depends on the data alone, never on the number of ranks: a position must mean the same for any number.
    Small data is cut finer, so that a shuffle mixes well, and ranks advance through unshuffled data at the
    same pace. But a small shuffle does not make splits small. Files whose records must be decoded in groups
    are read in complete groups, because smaller splits would decode each group many times.
    """
    if group_records:
        return group_records
    total = sum(part.records for part in parts)
    finest = max(1, -(-total // FEWEST_SPLITS))
    target = max(shuffle, FEWEST_RECORDS_PER_BLOCK) if shuffle else finest
    return min(MOST_RECORDS_PER_SPLIT, finest, target)


def shuffled(items: Sequence[T], *seeds: int) -> list[T]:
    """The items in the order that the seeds, for example (seed, epoch), determine."""
    return [items[i] for i in permutation(len(items), *seeds)]


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless 0 <= rank < world_size."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"A rank must be from 0 to world_size - 1, but rank is {rank} and world_size is {world_size}."
        )


def permutation(count: int, *seeds: int, window: int | None = None) -> npt.NDArray[np.int64]:
    """A permutation of 0 … count - 1 that depends on nothing but the seeds.

    Numbers are sorted by a hash of (seeds, number), made of SplitMix64 steps; equal hashes keep their order.
    With a `window`, each run of that many numbers is sorted separately.
    """
    if window == 1:
        return np.arange(count)
    state = np.zeros(1, dtype=np.uint64)
    for seed in seeds:
        state = _mix(state ^ _mix(np.asarray([seed % 2**64], dtype=np.uint64)))
    keys = _mix(state + np.arange(count, dtype=np.uint64))
    if window is None or window >= count:
        return _sorted(keys)
    last = count - count % window
    full = _sorted(keys[:last].reshape(-1, window)) + np.arange(0, last, window)[:, None]
    return np.concatenate([full.reshape(-1), last + _sorted(keys[last:])])


def _sorted(keys: Words) -> npt.NDArray[np.int64]:
    order: npt.NDArray[np.int64] = np.argsort(keys, kind="stable", axis=-1).astype(np.int64, copy=False)
    return order


def _mix(words: npt.NDArray[Any]) -> Words:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class Block:
    """Splits that are read together; `number` counts the blocks of an epoch."""

    number: int
    splits: tuple[Split, ...]

    @property
    def records(self) -> int:
        """The records of all splits."""
        return sum(split.count for split in self.splits)


def blocks(splits: Iterable[Split], records: int) -> list[Block]:
    """Group consecutive splits into blocks of at least `records` records; the last one may be smaller.

    Inside a block the splits are sorted and joined where they touch, so that they are read in few pieces.
    """
    return [Block(number, group) for number, group in enumerate(_groups(splits, records))]


def _groups(splits: Iterable[Split], records: int) -> Iterator[tuple[Split, ...]]:
    group: list[Split] = []
    buffered = 0
    for split in splits:
        group.append(split)
        buffered += split.count
        if buffered >= records:
            yield _joined(group)
            group, buffered = [], 0
    if group:
        yield _joined(group)


def _joined(splits: Sequence[Split]) -> tuple[Split, ...]:
    joined: list[Split] = []
    for split in sorted(splits):
        last = joined[-1] if joined else None
        if last is not None and (last.path, last.first + last.count) == (split.path, split.first):
            joined[-1] = Split(last.path, last.first, last.count + split.count)
        else:
            joined.append(split)
    return tuple(joined)


def _evenly(split: Split, most: int) -> Iterator[Split]:
    pieces = -(-split.count // most)
    bounds = [number * split.count // pieces for number in range(pieces + 1)]
    for first, end in pairwise(bounds):
        yield Split(split.path, split.first + first, end - first)


class ShufflePlan:
    """The order of a data set's records in every epoch, a pure function of the parts and these settings."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        shuffle: int = 0,
        seed: int = 0,
        split_records: int | None = None,
        group_records: int | None = None,
    ) -> None:
        self.shuffle = int(shuffle)
        self.seed = int(seed)
        if split_records is None:
            split_records = default_split_records(parts, shuffle, group_records)
        self.split_records = int(split_records)
        self._splits = cut(parts, self.split_records)
        self._parts = list(parts)
        self.records = sum(part.records for part in self._parts)
        self.blocks = lru_cache(maxsize=2)(self._blocks)

    def _blocks(self, epoch: int) -> list[Block]:
        if not self.shuffle:
            return blocks(self._splits, 1)
        splits = shuffled(self._splits, self.seed, epoch)
        if self.split_records <= self.shuffle:
            return blocks(splits, self.shuffle)
        most = max(self.shuffle, FEWEST_RECORDS_PER_BLOCK)
        return blocks((part for split in splits for part in _evenly(split, most)), 1)

    def order(self, epoch: int, block: Block) -> npt.NDArray[np.int64]:
        """The order of the block's records, if they are shuffled."""
        window = self.shuffle if self.split_records > self.shuffle else None
        return permutation(block.records, self.seed, epoch, block.number, window=window)

    def settings(self) -> dict[str, Any]:
        """What a position is valid for, JSON-able. Names of folders do not count: a data set may be moved."""
        return dict(self._settings)

    @property
    def parts(self) -> int:
        """How many parts the source has."""
        return len(self._parts)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        names = "\n".join(f"{part.path.rsplit('/', 1)[-1]} {part.records}" for part in self._parts)
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "split_records": self.split_records,
            "parts": self.parts,
            "records": self.records,
            "names": hashlib.sha256(names.encode()).hexdigest()[:16],
        }


# The position of a loader in its data: a few numbers for each rank.
#
# The records of an epoch are divided over the ranks by a pure function, and every rank hands out its share in
# order. So a rank's position is its epoch and the number of records of its share that it has handed out.
# `merge` joins the positions of all ranks, in any order and any number of times.
#
# A job that resumes on another number of ranks divides the remaining records. These follow from the division
# that ended and the positions of its ranks. A position therefore also lists the earlier divisions that still
# matter, so that the division can be computed again after the next stop.

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
        first = min(position.epoch for position in positions.values())  # that is not complete on all ranks
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


_log = logging.getLogger("karvan.data")


class Piece(NamedTuple):
    """Records `first` to `end` of a block, counted in the order in which the block hands them out."""

    block: int
    first: int
    end: int


def share_records(records: int, rank: int, world: int) -> int:
    """How many of `records` records a rank gets.

    The first ranks get one more if they do not divide evenly, so that rank 0, which shows the progress of
    all, is among the longest.
    """
    return (records + world - 1 - rank) // world


def deal(pieces: Sequence[Piece], world: int) -> list[list[Piece]]:
    """Divide pieces, which are sorted, over ranks: disjoint, complete, and equal to within one record."""
    if world == 1:
        return [list(pieces)]
    total = count(pieces)
    least = total // world
    shares: list[list[Piece]] = [[] for _ in range(world)]
    fewest = [(0, rank) for rank in range(world)]  # a heap of (records so far, rank)
    dealt = 0
    for _, group in groupby(pieces, key=itemgetter(0)):
        block = list(group)
        records = count(block)
        so_far, rank = fewest[0]
        if so_far + records > least:
            break
        heapreplace(fewest, (so_far + records, rank))
        shares[rank] += block
        dealt += len(block)
    rest = deque(islice(pieces, dealt, None))
    for so_far, rank in sorted(fewest, key=itemgetter(1)):
        shares[rank] += _take(rest, share_records(total, rank, world) - so_far)
    return shares


def skip(pieces: Iterable[Piece], records: int) -> list[Piece]:
    """The pieces after this many records."""
    rest = deque(pieces)
    _take(rest, records)
    return list(rest)


def count(pieces: Iterable[Piece]) -> int:
    """The records of all pieces."""
    return sum(end - first for _, first, end in pieces)


class Shares:
    """The share of one rank in every epoch, in a division that follows the `earlier` ones."""

    def __init__(self, plan: ShufflePlan, earlier: Sequence[Division], rank: int, world: int) -> None:
        self._plan = plan
        self._earlier = earlier
        self._rank = rank
        self._world = world
        self.pieces = lru_cache(maxsize=2)(self._pieces)

    def records(self, epoch: int) -> int:
        """How many records the share has. This is arithmetic: it needs no blocks."""
        remaining = self._plan.records
        for division in self._earlier:
            shares = [
                share_records(remaining, rank, division.world_size) for rank in range(division.world_size)
            ]
            remaining -= sum(
                _handed_out(division, rank, epoch, records) for rank, records in enumerate(shares)
            )
        return share_records(remaining, self._rank, self._world)

    @property
    def first_whole_epoch(self) -> int:
        """The first epoch of which no earlier division has handed anything out."""
        positions = (position for division in self._earlier for position in division.positions.values())
        return max((position.epoch + 1 for position in positions), default=0)

    def _pieces(self, epoch: int) -> tuple[Piece, ...]:
        """The share, in the order in which it is handed out."""
        pieces = [Piece(block.number, 0, block.records) for block in self._plan.blocks(epoch)]
        for division in self._earlier:
            if division.reaches(epoch):
                pieces = _left(pieces, division, epoch)
        return tuple(deal(pieces, self._world)[self._rank])


def _left(pieces: Sequence[Piece], division: Division, epoch: int) -> list[Piece]:
    """The pieces of an epoch that a division had not handed out when it ended, sorted and joined."""
    rests = (
        skip(share, _handed_out(division, rank, epoch, count(share)))
        for rank, share in enumerate(deal(pieces, division.world_size))
    )
    joined: list[Piece] = []
    for piece in sorted(chain.from_iterable(rests)):
        if joined and joined[-1].block == piece.block and joined[-1].end == piece.first:
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(piece)
    return joined


def _handed_out(division: Division, rank: int, epoch: int, share: int) -> int:
    position = division.positions[rank]
    if epoch == position.epoch:
        return position.records
    return share if epoch < position.epoch else 0


def _take(pieces: deque[Piece], records: int) -> list[Piece]:
    """Remove this many records from the front, and return them."""
    chosen: list[Piece] = []
    while records and pieces:
        block, first, end = pieces.popleft()
        cut = min(end, first + records)
        chosen.append(Piece(block, first, cut))
        if cut < end:
            pieces.appendleft(Piece(block, cut, end))
        records -= cut - first
    return chosen
