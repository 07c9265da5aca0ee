"""Heartbeats of ranks, so that errors name the rank that is missing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from karvan.clock import clock
from karvan.distributed.collectives import RankError
from karvan.torch_internals import Store

_BEAT = 1.0  # seconds between two heartbeats
_LOST = 3.5  # seconds without one after which a rank counts as dead or stopped


class RankMonitor:
    """Sends the heartbeats of this rank, and finds the ranks that send none."""

    def __init__(
        self, store: Store, rank: int, world: int, progress: Callable[[], Mapping[str, int]]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._progress = progress
        self._beats = 0
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="karvan-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()
        self._thread.join(_BEAT)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks, which will miss this one, why it has failed."""
        if isinstance(error, RankError):  # of another rank, which `explain` has reported
            return
        name = _name(self._rank, {"pid": os.getpid(), "host": os.uname().nodename})
        with suppress(RuntimeError):
            self._say("failed", f"{name} has failed with {type(error).__name__}: {_short(error)}")

    def explain(self, channel: str, lost: int | None, error: Exception) -> RankError:
        """An error that names the rank because of which a collective on a channel has failed.

        lost: a rank whose process is known to have ended, perhaps because it has lost another one.
        """
        who = self._missing(channel) if lost is None else self._ended_first(lost)
        with suppress(RuntimeError):  # the store may be gone as well
            self._say("failed", who or str(error))
        return RankError(f"{who or 'A rank has failed, it is not known which'}: {_short(error)}")

    def _ended_first(self, lost: int) -> str:
        try:
            alive, failed = self._all("alive"), self._all("failed")
        except (RuntimeError, ValueError):
            return f"Rank {lost} has died"
        return str(failed.get(lost) or f"{_name(lost, alive.get(lost))} has died")

    def _missing(self, channel: str) -> str | None:
        try:
            before = self._all("alive")
            if not self._reported(self._all("failed")):
                clock.sleep(_LOST)
            after, failed = self._all("alive"), self._all("failed")
        except (RuntimeError, ValueError):
            return "The process that holds the ranks' store (rank 0, or torchrun) is gone"
        if failure := self._reported(failed):
            return failure
        others = [rank for rank in range(self._world) if rank != self._rank]
        silent = [r for r in others if after.get(r) == before.get(r)]
        if silent:
            where = ", ".join(_name(rank, after.get(rank)) for rank in silent)
            return f"{where} {'has' if len(silent) == 1 else 'have'} died or stopped"
        count = self._progress().get(channel, 0)
        slow = [r for r in others if after.get(r, {}).get("at", {}).get(channel, 0) < count]
        if slow:
            where = ", ".join(_name(rank, after.get(rank)) for rank in slow)
            return f"{where} {'does' if len(slow) == 1 else 'do'} not reach operation {count} of '{channel}'"
        return None

    def _reported(self, failed: Mapping[int, Any]) -> str | None:
        """The failure that another rank has reported, if any."""
        return next((str(failed[rank]) for rank in sorted(failed) if rank != self._rank), None)

    def _all(self, what: str) -> dict[int, Any]:
        keys = {rank: f"karvan/{what}/{rank}" for rank in range(self._world)}
        return {
            rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }

    def _run(self) -> None:
        while not self._ended.wait(_BEAT):
            try:
                self._beat()
            except (RuntimeError, ValueError):  # the store is gone, and the job with it
                return

    def _beat(self) -> None:
        self._beats += 1
        at = dict(self._progress())
        self._say("alive", {"beat": self._beats, "pid": os.getpid(), "host": os.uname().nodename, "at": at})

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"karvan/{what}/{self._rank}", json.dumps(value))


def _name(rank: int, alive: Any) -> str:
    return f"Rank {rank} (process {alive['pid']} on {alive['host']})" if alive else f"Rank {rank}"


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
