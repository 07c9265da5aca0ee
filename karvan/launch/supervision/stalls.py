"""Finds processes that are alive but make no progress and block the job, from their heartbeats.

    a trainer                            is stalled if it has a task (fit, evaluate), has made no progress for
                                           `stall_timeout` seconds, and does not wait for another role. One
                                           that waits for other trainers is not stalled, as long as one of
                                           them does not wait
    a loader, an embedding worker, a     is stalled if it has made no progress for as long, another process
      parameter server                     has waited for it for as long, and it waits for no process itself

A process that waits for another one is blocked by it, and is not killed. A trainer without a task runs the
user's code, which may take any time; so may a source that no process waits for. Parameter servers and
embedding workers run no user code, so they have at most `SERVICE_TIMEOUT` seconds: less than the timeout of
the calls that wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from karvan.activity import TRAINERS, ActivityReport
from karvan.job.roles import Role

SERVICE_TIMEOUT = 240.0  # seconds

Activities = Mapping[tuple[Role, int], ActivityReport]


@dataclass(frozen=True)
class Stall:
    """A process that blocks the job, and the processes that wait for it."""

    role: Role
    index: int
    report: ActivityReport
    waiters: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name in logs."""
        return f"{self.role}-{self.index}"

    def __str__(self) -> str:
        task = f" in {self.report.task}" if self.report.task else ""
        waiters = f", and {_listed(self.waiters)} for it" if self.waiters else ""
        return f"{self.name} has made no progress for {self.report.idle:.0f} s{task}{waiters}"


def find_stalls(activities: Activities, timeout: float) -> list[Stall]:
    """The processes that block the others; none if all make progress, or wait."""
    found = [
        Stall(*key, report, _waiters(activities, key, 0.0))
        for key, report in activities.items()
        if report.idle >= _limit(key[0], timeout) and not _waits(report, _limit(key[0], timeout))
    ]
    stalls = [
        each
        for each in found
        if (
            _waiters(activities, (each.role, each.index), _limit(each.role, timeout))
            if each.role.listens
            else each.report.task
        )
    ]
    return stalls or _trainers_that_wait_for_each_other(activities, timeout)


def _limit(role: Role, timeout: float) -> float:
    return timeout if role.runs_user_code else min(timeout, SERVICE_TIMEOUT)


def _waits(report: ActivityReport, timeout: float) -> bool:
    """Whether it waits for another process; short calls that are answered do not count."""
    return any(seconds >= timeout / 2 for seconds in report.waits.values())


def _waiters(activities: Activities, whom: tuple[Role, int], timeout: float) -> tuple[str, ...]:
    role, index = whom
    names = {f"{role}-{index}", TRAINERS} if role.is_rank else {f"{role}-{index}"}
    return tuple(
        f"{key[0]}-{key[1]}"
        for key, report in sorted(activities.items())
        if key != whom and any(report.waits.get(name, -1.0) >= timeout for name in names)
    )


def _trainers_that_wait_for_each_other(activities: Activities, timeout: float) -> list[Stall]:
    """All trainers, if each has only ever waited for the others."""
    trainers = {key: report for key, report in activities.items() if key[0].is_rank}
    stuck = [
        each.task and each.idle >= timeout and set(each.waits) <= {TRAINERS} for each in trainers.values()
    ]
    if len(trainers) < 2 or not all(stuck):
        return []
    return [Stall(*key, report, _waiters(activities, key, 0.0)) for key, report in trainers.items()]


def _listed(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"{names[0]} waits"
    return f"{', '.join(names[:-1])} and {names[-1]} wait"
