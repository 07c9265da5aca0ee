"""Finds processes that live but make no progress and block the job, from their heartbeats.

    a trainer                            is stalled if it has a task (fit, evaluate), has made no progress for
                                           `stall_timeout` seconds, and does not wait for another role. One
                                           that waits for other trainers is not, as long as one of them does
                                           not wait
    a loader, an embedding worker, a     is stalled if it has made no progress for as long, somebody has
      parameter server                     waited for it for as long, and it does not wait for anybody itself

Who waits for somebody is held up by it, and is left alone. A trainer without a task runs its user's own code,
and may take as long as it likes; so may a source that nobody waits for. Parameter servers and embedding
workers run no code of a user's, so they have `SERVICE_TIMEOUT` seconds at most: less than the calls of those
who wait for them.
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
    """A process that holds up the job, and who waits for it."""

    role: Role
    index: int
    report: ActivityReport
    waiters: tuple[str, ...]

    @property
    def name(self) -> str:
        """As logs call it."""
        return f"{self.role}-{self.index}"

    def __str__(self) -> str:
        task = f" in {self.report.task}" if self.report.task else ""
        waiters = f", and {_listed(self.waiters)} for it" if self.waiters else ""
        return f"{self.name} has made no progress for {self.report.idle:.0f} s{task}{waiters}"


def find_stalls(activities: Activities, timeout: float) -> list[Stall]:
    """The processes that hold up the others; none if everybody makes progress, or waits."""
    found = [
        Stall(*key, report, _waiters(activities, key, 0.0))
        for key, report in activities.items()
        if report.idle >= _limit(key[0], timeout) and not _waits(report, _limit(key[0], timeout))
    ]
    stalls = [
        each
        for each in found
        if (each.role == Role.TRAINER and each.report.task)
        or (
            each.role in (Role.LOADER, Role.EMBEDDING_WORKER, Role.PARAMETER_SERVER)
            and _waiters(activities, (each.role, each.index), _limit(each.role, timeout))
        )
    ]
    return stalls or _trainers_that_wait_for_each_other(activities, timeout)


def _limit(role: Role, timeout: float) -> float:
    answers_calls = role in (Role.PARAMETER_SERVER, Role.EMBEDDING_WORKER)
    return min(timeout, SERVICE_TIMEOUT) if answers_calls else timeout


def _waits(report: ActivityReport, timeout: float) -> bool:
    """Whether it waits for somebody; a question now and then, which is answered, is no wait."""
    return any(seconds >= timeout / 2 for seconds in report.waits.values())


def _waiters(activities: Activities, whom: tuple[Role, int], timeout: float) -> tuple[str, ...]:
    role, index = whom
    names = {f"{role}-{index}", TRAINERS} if role == Role.TRAINER else {f"{role}-{index}"}
    return tuple(
        f"{key[0]}-{key[1]}"
        for key, report in sorted(activities.items())
        if key != whom and any(report.waits.get(name, -1.0) >= timeout for name in names)
    )


def _trainers_that_wait_for_each_other(activities: Activities, timeout: float) -> list[Stall]:
    """All trainers, if each has only ever waited for the others."""
    trainers = {key: report for key, report in activities.items() if key[0] == Role.TRAINER}
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
