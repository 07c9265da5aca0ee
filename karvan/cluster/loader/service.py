"""`LoaderService`: what each loader answers, whatever it reads.

Every loader has a number, which callers have to expect, and data that its program offers, with the statistics
of transforms. Until then, a question for them is answered by "wait" after a second. What trainers get of the
data depends on who decides which records they train:

- `epoch_service.py`: batches of epochs, each of which belongs to one trainer;
- `task_service.py`: batches of the tasks that trainers have leased (`sharding: dynamic`).
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import override

from karvan.cluster.loader.statistics import LoaderStatistics
from karvan.errors import DAMAGED, FAILED, TEMPORARY, code_of, mark
from karvan.protocol.loader import NoAnswerYet, Whole
from karvan.wire import Message, Request, Service
from karvan.wire.schema import Head

D = TypeVar("D", bound=Head)


class LoaderService(Service, Generic[D]):
    """Loader number `index`; a head of class `D` says what trainers have to know of its data."""

    progresses = False  # calls are not progress; batches are
    wait: ClassVar[float] = 1.0
    """Seconds until a call is answered, even if there is nothing to send yet."""

    def __init__(self, index: int) -> None:
        self.name = f"loader {index}"
        self._index = index
        self._changed = threading.Condition()
        self._description: D | None = None  # once the program has offered its data
        self._statistics = LoaderStatistics()  # of the transforms; final as soon as there is a description
        self._error = ""
        self._error_code = FAILED
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def statistics(self) -> LoaderStatistics | None:
        """The statistics that trainers receive; None before there is data."""
        return None if self._description is None else self._statistics

    def fail(self, error: BaseException) -> None:
        """Reading has failed: trainers get the error, until a new generation of them starts."""
        self.note_failure(error)
        with self._changed:
            self._error = f"it could not continue reading: {type(error).__name__}: {error}"
            self._error_code = code_of(error)
            self._changed.notify_all()

    @override
    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _describe_data(self, description: D, statistics: LoaderStatistics | None) -> None:
        """Answer questions for the data from now on."""
        with self._changed:
            self._description, self._statistics = description, statistics or LoaderStatistics()
            self._changed.notify_all()

    def _described(self) -> D | None:
        """The description of the data, once the program has started; None if that takes longer."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._error or self._description is not None, self.wait
            )
            if self._description is None and self._error:
                raise self._failure()
            return self._description

    def _answer_description(self, call: Request[Head]) -> Message[D | NoAnswerYet]:
        return Message(self._described() or NoAnswerYet(wait=True))

    def _answer_statistics(self, call: Request[Whole]) -> Message[Any]:
        if self._described() is None:
            return Message(NoAnswerYet(wait=True))
        return self._statistics.message(call.head.whole)

    def _failure(self) -> RuntimeError:
        """The error for trainers: an outage of the data, damage, or a fault of the reading program."""
        error = RuntimeError(self._error)
        if self._error_code in (DAMAGED, TEMPORARY):
            mark(error, self._error_code == TEMPORARY)
        return error
