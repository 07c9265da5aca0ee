"""One pass over data that computes the statistics of fitted steps, on all ranks together.

Every rank reads its own share and counts. Then each rank adds up the counts of all ranks in the order of
ranks; they are exact, so all get the same bits, whichever rank had which record. A rank without data
participates with empty counts. An error on one rank is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from karvan import distributed
from karvan.distributed.rank_heartbeats import RankHeartbeats
from karvan.features.running_moments import RunningStatistics
from karvan.ragged import Entry

Entries = Callable[[Mapping[str, Entry]], Mapping[str, list[Entry]]]


def gather_statistics(
    statistics: Mapping[str, RunningStatistics], batches: Iterable[Mapping[str, Entry]], entries: Entries
) -> None:
    """Count the entries by name of all batches of all ranks; a collective."""
    connection = distributed.current()
    channel = connection.here
    rounds = RankHeartbeats(channel, connection.settings.timeout)
    problem: Exception | None = None
    try:
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise TypeError(
                    f"fit expects batches of columns, but {type(batches).__name__} returns a "
                    f"{type(batch).__name__}: pass kv.data.read(…, batch_size=1024)."
                )
            for name, found in entries(batch).items():
                for entry in found:
                    _add(name, statistics[name], entry)
            rounds.still_working()
    except distributed.RankError:
        raise  # other ranks no longer respond
    except Exception as error:
        if channel.world_size == 1:
            raise
        problem = error
    if channel.world_size == 1:
        return
    rounds.finish()
    gathered = channel.gather_json(
        {
            "problem": None if problem is None else f"{type(problem).__name__}: {problem}",
            "states": {name: each.state() for name, each in statistics.items()},
        }
    )
    if problem is not None:
        raise problem
    for rank, one in enumerate(gathered):
        if one["problem"] is not None:
            raise distributed.RankError(f"Rank {rank} could not fit its features: {one['problem']}")
        if list(one["states"]) != list(statistics):
            raise ValueError(
                f"fit expects equal features on all ranks, but rank {channel.rank} fits {list(statistics)} "
                f"and rank {rank} fits {list(one['states'])}."
            )
    for rank, one in enumerate(gathered):
        if rank != channel.rank:
            for name, state in one["states"].items():
                statistics[name].merge(state)


def _add(name: str, statistics: RunningStatistics, entry: Entry) -> None:
    try:
        statistics.add(entry)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Feature '{name}', fit: {error}") from None
