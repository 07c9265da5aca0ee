"""The goodput of a job whose workers come and go: a simulation from measured costs and published rates.

Goodput is the useful worker-seconds of a job, divided by those it would have if nothing ever failed: the
number of workers, times the seconds. A machine that is gone until its replacement trains counts as lost.

Workers make steps together. What happens, and what it costs:

- A worker dies. The step in progress is lost on all workers, and the others wait for `reform_seconds`. Its
  place is empty until the replacement is there, after `replace_seconds`.
- A replacement joins. After the step in progress all wait for `rejoin_seconds`, in which it gets the state.
- A checkpoint is saved, every `checkpoint_every` seconds of training. After the step in progress all wait for
  `checkpoint_seconds`.

Events that come while all wait are handled together: the wait lasts until the longest of them is over. Each
worker dies at random, after a time that is distributed exponentially from when it was started or has joined.
Replacements are always available. All of this is pessimistic: a preempted machine usually has a notice, in
which its worker can finish the step.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, fields

DAY = 86400.0
MONTH = 30 * DAY


def seconds_between(share: float, seconds: float) -> float:
    """Return the mean seconds between failures of a worker, if this share fails within so many seconds."""
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}.")
    return -seconds / math.log1p(-share)


# Mean seconds between failures of one worker.
PUBLISHED = {
    # Grattafiori et al., "The Llama 3 Herd of Models", 2024: 419 unexpected interruptions in 54 days on
    # 16,384 GPUs, each of which is a worker.
    "GPU failures": 54 * DAY * 16384 / 419,
    # Amazon Web Services, "Spot Instance Advisor", 2024: kinds of machines are listed by the share of them
    # that is interrupted in a month; up to 5 % is the best class, above 20 % the worst.
    "spot, 5 % a month": seconds_between(0.05, MONTH),
    "spot, 20 % a month": seconds_between(0.20, MONTH),
    # Google Cloud, "Preemptible VM instances" (documentation of Compute Engine), 2020: on average between 5 %
    # and 15 % of them are preempted in a day.
    "preemptible, 5 % a day": seconds_between(0.05, DAY),
    "preemptible, 15 % a day": seconds_between(0.15, DAY),
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that were measured; there are no defaults, since each job has its own."""

    step_seconds: float  # of a step
    reform_seconds: float  # from a death until the others train again
    replace_seconds: float  # from a death until its replacement is ready to join
    rejoin_seconds: float  # for which all wait while a replacement gets the state
    checkpoint_seconds: float  # for which all wait at a checkpoint
    checkpoint_every: float  # of training between two checkpoints; infinity for none

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_wait = field.name not in ("step_seconds", "checkpoint_every")
            if not (value > 0 or (is_wait and value == 0)):
                raise ValueError(
                    f"{field.name} must be {'0 or more' if is_wait else 'more than 0'} seconds, got {value}."
                )


@dataclass(frozen=True)
class Goodput:
    """What came of a simulation."""

    useful: float  # worker-seconds
    available: float  # worker-seconds
    failures: int
    checkpoints: int

    @property
    def goodput(self) -> float:
        """The share of useful worker-seconds."""
        return self.useful / self.available


class _Job:
    """The state of a simulated job: all workers that are there train, or all wait; with none, time passes."""

    def __init__(self, costs: Costs, workers: int) -> None:
        self.costs = costs
        self.present = workers
        self.time = 0.0
        self.waits_until = 0.0
        self.in_step = 0.0  # seconds of the step in progress
        self.trained = 0.0  # seconds since the last checkpoint
        self.useful = 0.0
        self.checkpoints = 0

    def advance(self, until: float) -> None:
        """Let time pass, to the next event; checkpoints are saved when they are due."""
        while self.time < until:
            if self.waits_until > self.time:
                self.time = min(until, self.waits_until)
            elif not self.present:
                self.time = until
            else:
                left, due = until - self.time, self._until_checkpoint()
                self._train(min(left, due), ends_step=due <= left)
                if due <= left:
                    self.checkpoints += 1
                    self.trained = 0.0
                    self.wait(self.costs.checkpoint_seconds)

    def _until_checkpoint(self) -> float:
        """Seconds until the end of the step in which a checkpoint becomes due."""
        step, left = self.costs.step_seconds, self.costs.checkpoint_every - self.trained
        first = step - self.in_step
        return first + max(0, math.ceil((left - first) / step)) * step if left < math.inf else math.inf

    def finish_step(self) -> None:
        """Let the step in progress end, if there is one."""
        if self.in_step > 0.0:
            self._train(self.costs.step_seconds - self.in_step, ends_step=True)

    def _train(self, seconds: float, *, ends_step: bool) -> None:
        self.time += seconds
        self.trained += seconds
        self.useful += seconds * self.present
        self.in_step = 0.0 if ends_step else (self.in_step + seconds) % self.costs.step_seconds

    def wait(self, seconds: float) -> None:
        """All wait for so long from now on, or for longer if they do already."""
        self.waits_until = max(self.waits_until, self.time + seconds)

    def lose_step(self) -> None:
        """The step in progress is lost on all workers."""
        self.useful -= self.in_step * self.present
        self.trained -= self.in_step
        self.in_step = 0.0


def simulate(
    costs: Costs, *, workers: int, mean_between_failures: float, seconds: float, seed: int
) -> Goodput:
    """Return the goodput of a job of so many workers over so many seconds; equal seeds give equal results.

    mean_between_failures: the mean seconds after which one worker dies; infinity for never.
    """
    if workers < 1 or not seconds > 0 or not mean_between_failures > 0:
        raise ValueError(
            f"Expected at least one worker and seconds above 0, got {workers} workers, {seconds} seconds and "
            f"{mean_between_failures} seconds between failures."
        )
    chance = random.Random(seed)
    job, failures = _Job(costs, workers), 0

    def lifetime() -> float:
        return mean_between_failures * chance.expovariate(1.0)

    events = [(lifetime(), worker, "dies") for worker in range(workers)]
    heapq.heapify(events)
    while events and events[0][0] < seconds:
        at, worker, what = heapq.heappop(events)
        job.advance(at)
        if what == "dies":
            failures += 1
            job.lose_step()
            job.present -= 1
            if job.present:
                job.wait(costs.reform_seconds)
            heapq.heappush(events, (max(at, job.time) + costs.replace_seconds, worker, "joins"))
        else:
            job.finish_step()
            job.present += 1
            job.wait(costs.rejoin_seconds)
            heapq.heappush(events, (job.time + lifetime(), worker, "dies"))
    job.advance(seconds)
    return Goodput(job.useful, workers * job.time, failures, job.checkpoints)
