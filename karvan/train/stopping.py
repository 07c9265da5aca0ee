"""When a training stops: its goal, signals of the system, and requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from karvan.argument_checks import check_integers
from karvan.distributed import CollectiveChannel, Connection
from karvan.process_end import handling
from karvan.train.epoch import Accumulation
from karvan.train.results import TrainingCounts


@dataclass(frozen=True)
class Goal:
    """So many epochs or optimizer steps, whichever comes first; both count training on this data.

    Without either it is one epoch. An evaluation comes every `eval_every` steps, or after each epoch, and at
    the end.

    """

    epochs: int | None
    max_steps: int | None
    eval_data: Iterable[Any] | None
    eval_every: int | None

    def __post_init__(self) -> None:
        check_integers(epochs=self.epochs, max_steps=self.max_steps, eval_every=self.eval_every)
        for name in ("epochs", "max_steps", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}.")
        if self.eval_every is not None and self.eval_data is None:
            raise ValueError(f"eval_every={self.eval_every} needs eval_data, got None.")
        if self.epochs is None and self.max_steps is None:
            object.__setattr__(self, "epochs", 1)

    def reached(self, counts: TrainingCounts) -> bool:
        """Whether nothing more is to be trained."""
        return (self.epochs is not None and counts.epoch >= self.epochs) or (
            self.max_steps is not None and counts.step - counts.start_step >= self.max_steps
        )

    @property
    def text(self) -> str:
        """The goal, as text."""
        limits = {"epoch": self.epochs, "step": self.max_steps}
        return " or ".join(
            f"{n} {what}{'' if n == 1 else 's'}" for what, n in limits.items() if n is not None
        )

    def evaluates_after_step(self, counts: TrainingCounts) -> bool:
        """Whether an evaluation is due."""
        return self.eval_every is not None and counts.step % self.eval_every == 0

    def steps(self, data: Iterable[Any], passes: Accumulation, counts: TrainingCounts) -> int | None:
        """The step at which training ends, if that can be known; ranks are taken to have equal data."""
        length = _length(data)
        limit = None if self.max_steps is None else counts.start_step + self.max_steps
        if self.epochs is None or length is None:
            return limit
        per_epoch = passes.steps(length)
        batches_left = getattr(data, "batches_left", None)
        if not counts.batches:
            current = per_epoch
        elif batches_left is None:
            current = per_epoch - -(-counts.batches // passes.count)
        else:  # the epoch may have started on another number of ranks
            current = passes.steps(batches_left)
        epochs = self.epochs - counts.epoch
        steps = counts.step + (current + (epochs - 1) * per_epoch if epochs > 0 else 0)
        return steps if limit is None else min(steps, limit)


def _length(data: Iterable[Any]) -> int | None:
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # it has no end
        return None


# Ctrl-C and SIGTERM: the first one stops after the current step, a second Ctrl-C aborts.
#
# SIGTERM is for the program, not for one fit of it: whoever sent it will not wait for the next one. So after
# a SIGTERM every further fit, and every further TrainContext, raises a `TerminatedError` when it starts,
# until `reset_termination` is called. Ctrl-C in a notebook ends a cell, and the next one may train again.


_REASONS = {signal.SIGINT: "interrupt", signal.SIGTERM: "terminate"}


class TerminatedError(RuntimeError):
    """Training was requested after a SIGTERM had ended the training of this program."""


class _Termination:
    """Whether a SIGTERM has ended a fit of this process, or one of a rank that it trains with."""

    received = False


def note_termination() -> None:
    """A SIGTERM has ended a fit, of this or another rank."""
    _Termination.received = True


def reset_termination() -> None:
    """Allow training again after a SIGTERM has ended a fit.

    Without it, every further fit raises a TerminatedError, because whoever sent the signal does not wait for
    the next one.

    Example:
        >>> kv.train.reset_termination()
    """
    _Termination.received = False


def is_terminated() -> bool:
    """Whether a SIGTERM has ended a fit of this process."""
    return _Termination.received


def check_not_terminated(channel: CollectiveChannel) -> None:
    """Raise a TerminatedError if a SIGTERM has ended the training of this program, on any rank."""
    if any(channel.gather_json(_Termination.received)):
        note_termination()
        raise TerminatedError(
            "SIGTERM has ended the training of this program, so nothing more is trained. The stopped fit "
            "has saved a checkpoint if it has a folder for them; run the program again to resume from "
            "it. To train on purpose, call karvan.train.reset_termination() first."
        )


class StopRequest:
    """A request to stop a fit.

    `final`: the data is trained enough, so the next fit may use other data.

    """

    def __init__(self) -> None:
        self.final = False
        self._signal: str | None = None  # "interrupt" or "terminate"
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the fit should stop, if it should: "interrupt", "terminate", or the reason passed to `stop`."""
        return self._signal or self._reason

    def begin(self) -> None:
        """A fit starts: drop the requests of the fit before."""
        self._reason, self.final = None, False

    def stop(self, reason: str, *, final: bool = False) -> None:
        """Stop after the current step."""
        if not reason:
            raise ValueError("stop expects a reason, got an empty one.")
        self._reason = reason
        self.final = self.final or final

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Catch both signals within it, on the main thread; on others Python has no signals."""
        self._signal = None
        with handling(dict.fromkeys(_REASONS, self._handle)):
            yield

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._signal:
            self._signal = _REASONS[signal.Signals(number)]
            if number == signal.SIGTERM:
                note_termination()
            # Not print: the handler may have interrupted one.
            os.write(2, b"\nStopping after this step. Ctrl-C aborts at once.\n")


class Stopping:
    """The decision of a Trainer's ranks to stop.

    A single process stops when it is requested. Several ranks stop together: a request travels with the
    batches of the feed, or is gathered at rare moments, such as the end of an evaluation. Of trainers that
    come and go it travels with their steps alone.
    """

    def __init__(self, connection: Connection, request: StopRequest) -> None:
        self._channel = connection.main
        self._alone = connection.world_size == 1 and connection.group is None
        self._gathers = connection.world_size > 1
        self._request = request
        self._agreed: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the fit stops here, if it does: a rank that is not alone cannot do so by itself."""
        return self._request.reason if self._alone else self._agreed

    def ask_all(self) -> None:
        """Stop if any rank should; a collective."""
        if self._gathers:
            reasons = self._channel.gather_json(self._request.reason)
            self.agree(next((reason for reason in reasons if reason), None))

    def agree(self, reason: str | None) -> bool:
        """Stop on all ranks, if there is a reason; whether the fit stops here."""
        if reason is not None and self._agreed is None:
            self._agreed = reason
            if reason == "terminate":  # perhaps on another rank
                note_termination()
            self._request.stop(reason)
        return self.reason is not None
