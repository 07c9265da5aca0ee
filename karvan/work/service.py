"""`WorkService`: the calls by which trainers and loaders lease tasks of the ledger.

A holder is a process, under a name of its own. It calls

    open_work            with the `WorkSpec` of the data, before anything else. The first call of a job begins
                         its ledger; later ones, of the same or other holders, must describe the same work.
                         Only the first one of a master may change settings of a ledger that exists: a job
                         that is started again may have more tries. It may have other data if the
                         ledger's is trained to its end, or if `drops_rest` says so.
    lease_tasks          for tasks of some kinds. It says the token of the last lease it knows: later ones of
                         its name were answered by a master that died before the answer arrived, and are
                         answered again.
    acknowledge_records  how many records of its tasks are done. The answer names leases that have ended: the
                         holder drops them, because somebody else has their records.
    give_back_tasks      that it will not finish, because it leaves.
    fail_task            if a task's records raise an error, with the bad record if it was found. The answer
                         says what follows; see `TaskFailure`.
    begin_evaluation     by every trainer, before it leases tasks of an evaluation: the first call of its
                         number begins it.
    begin_prediction     by every trainer, before it leases tasks of a prediction, again until the answer is
                         yes: it begins when the one before is complete, or no other trainer is in it. Its
                         number is that of the call in the program, so a trainer that was restarted is told
                         that the earlier ones are done. There need be no `open_work` before.
    begin_export         when all is trained, before the final checkpoint. It is acknowledged when that is
                         complete; until then the job has not ended.
    take_position        for a checkpoint: what is done, and what is left of the open tasks.
    restore_position     after a rollback: that of the checkpoint, or the beginning. All leases end.

"wait" means: ask again, others still work on this epoch. "done" means that nothing will follow, "failed" that
the job has failed. A network error means neither: the holder calls again until the master is back.

A lease ends when its holder is reported dead (`release`), or when the holder made no progress for `patience`
seconds, or for three times as long as the slowest task took if that is more: then it hangs. Progress is a
new lease, or an acknowledged record of any of its tasks: those that are leased ahead wait for their turn.

A process that was reported dead may only have been out of reach. It gets no more tasks, and calls that would
change the work of the others are refused, such as a `restore_position` that was on its way meanwhile.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from karvan.clock import clock
from karvan.errors import mark
from karvan.protocol import master as protocol
from karvan.wire import Endpoint, Message, RefusedError, Request, Service, endpoints
from karvan.work.ledger import JobFailedError, Ledger, LedgerDiskError, LedgerError, NoTask
from karvan.work.task import NO_WORK, Task, TaskKind, TaskLease, WorkSpec, is_of_process, process_of

_log = logging.getLogger(__name__)

PATIENCE = 300.0
_SLOWEST_TIMES = 3.0
_PRESENT = 5.0  # seconds since it has asked for a task for which a holder without any is in a prediction


class WorkService(Service):
    """Serves the ledger of a job, at `path`; a master that was restarted continues an existing one.

    All changes go through one lock, and are on disk before they are answered.
    """

    name = "work"
    progresses = False

    def __init__(
        self, path: Path, *, patience: float = PATIENCE, now: Callable[[], float] = clock.now
    ) -> None:
        self._path = path
        self._patience = patience
        self._now = now
        self._lock = threading.Lock()
        self._opened = Ledger.existing(path)
        self._described = False  # whether a holder has described the work to this master
        self._begun: dict[int, float] = {}  # when a lease began, by token; of the last master's unknown
        self._heard: dict[str, float] = {}  # when there was progress, by holder
        if self._opened is not None:
            self._heard = {lease.holder: now() for lease in self._opened.leases}
        self._slowest = 0.0
        self._predicts: dict[str, tuple[int, float]] = {}  # which prediction holders are in, and since when
        self._started = now()
        self._ended: set[str] = set()  # processes that were reported dead: refused
        self._postponed: deque[Callable[[], object]] = deque()  # ends of leases that the disk did not take
        self._disk_is_full = False  # as far as the log says
        self.endpoints = endpoints(
            protocol.WORK_CALLS,
            Endpoint(protocol.OPEN_WORK, self._open),
            Endpoint(protocol.LEASE_TASKS, self._lease),
            Endpoint(protocol.ACKNOWLEDGE_RECORDS, self._acknowledge),
            Endpoint(protocol.GIVE_BACK_TASKS, self._give_back),
            Endpoint(protocol.FAIL_TASK, self._fail),
            Endpoint(protocol.BEGIN_EVALUATION, self._begin_evaluation),
            Endpoint(protocol.BEGIN_PREDICTION, self._begin_prediction),
            Endpoint(protocol.BEGIN_EXPORT, self._begin_export),
            Endpoint(protocol.TAKE_POSITION, self._take_position),
            Endpoint(protocol.RESTORE_POSITION, self._restore_position),
        )

    @property
    def ledger(self) -> Ledger:
        """The ledger; a RefusedError before the work is opened."""
        if self._opened is None:
            raise RefusedError("expected a call of open_work first, which describes the data of the job.")
        return self._opened

    def close(self) -> None:
        """Close the ledger's file."""
        if self._opened is not None:
            self._opened.close()

    def _open(self, request: Request[protocol.OpenWork]) -> None:
        fields = request.head.spec
        spec = WorkSpec(**{**fields, "parts": tuple(map(tuple, fields["parts"]))})
        with self._lock, _refusing():
            spec.plan()  # which must be one before it is written
            if self._opened is None:
                self._opened = Ledger(self._path, spec)
            elif not self._described:
                self._opened.change_settings(spec, request.head.drops_rest)
            else:
                spec.check(self._opened.spec.settings(), data_only=False)
            self._described = True

    def release(self, holder: str) -> list[Task]:
        """A holder has died or left: its tasks wait. Returns them."""
        with self._lock:
            if self._opened is None:
                return []
            leases = self._opened.leases_of(holder)
            self._end(leases)
            return [lease.task for lease in leases]

    @contextmanager
    def _postponing(self, again: Callable[[], object]) -> Iterator[None]:
        """Do this again with the next `overdue` if the disk of the ledger is full now.

        Only who asks for tasks waits for the disk: the supervisor of a job does not.
        """
        try:
            yield
        except LedgerDiskError as error:
            if not self._disk_is_full:
                _log.warning("Leases of processes that are gone end later: %s.", error.strerror)
            self._disk_is_full = True
            self._postponed.append(again)

    def release_process(self, process_holder: str) -> list[Task]:
        """A process has died: the tasks of all holders in it wait. Returns them.

        It gets no more, should it only have been silent: nobody would take them back.
        """
        with self._lock:
            self._ended.add(process_holder)
            self._leave_prediction(process_holder)
            leases = [] if self._opened is None else self._opened.leases
        holders = dict.fromkeys(
            lease.holder for lease in leases if is_of_process(lease.holder, process_holder)
        )
        released: list[Task] = []
        with self._postponing(partial(self.release_process, process_holder)):
            for holder in holders:
                released += self.release(holder)
        return released

    def refuse(self, processes: Iterable[str]) -> None:
        """These were reported dead to an earlier master."""
        with self._lock:
            self._ended.update(processes)

    def release_predictions(self, process_holder: str) -> bool:
        """A process has died: its prediction tasks wait. Returns whether others are in that prediction.

        Unlike those of training, nobody has to settle which of their records are done.
        """
        with self._lock:
            self._leave_prediction(process_holder)
            if self._opened is None:
                return False
            leases = [
                lease
                for lease in self._opened.leases
                if lease.task.kind is TaskKind.PREDICT and is_of_process(lease.holder, process_holder)
            ]
            with self._postponing(partial(self.release_predictions, process_holder)):
                self._end(leases)
            return bool(self._in_prediction(self._opened.position.prediction))

    def forget_predictions(self) -> None:
        """The job is launched again, and so are its predictions."""
        with self._lock:
            if self._opened is not None:
                self._opened.forget_predictions()

    def _leave_prediction(self, process_holder: str) -> None:
        for holder in [holder for holder in self._predicts if is_of_process(holder, process_holder)]:
            del self._predicts[holder]

    def _in_prediction(self, number: int) -> set[str]:
        """Who is in a prediction that is not complete: holders of its tasks, and those that ask for one."""
        if not self.ledger.is_predicting(number):
            return set()
        holders = {lease.holder for lease in self.ledger.leases if lease.task.kind is TaskKind.PREDICT}
        now = self._now()
        asking = {
            holder for holder, (its, at) in self._predicts.items() if its == number and now - at < _PRESENT
        }
        return holders | asking

    def progress(self) -> dict[str, Any] | None:
        """How far the work is: tasks and records of the ledger; None before it is opened."""
        with self._lock:
            if self._opened is None:
                return None
            position, spec = self._opened.position, self._opened.spec
            leased, waiting = [lease.task for lease in self._opened.leases], self._opened.waiting
            tasks = [*leased, *waiting]
            training = sum(task.kind is TaskKind.TRAIN for task in tasks)
            exports = any(task.kind is TaskKind.EXPORT for task in tasks)
            return {
                "epoch": position.epoch,
                "epochs": spec.epochs,
                "tasks": len(spec.plan()),
                "done": max(0, position.issued - training),
                "leased": len(leased),
                "waiting": len(waiting),
                "records": position.records,
                "bad_records": position.bad_records,
                "to_predict": sum(task.left for task in tasks if task.kind is TaskKind.PREDICT),
                "export": "done" if position.exported else "open" if exports else "none",
                "failure": position.failure,
            }

    def has_work(self) -> bool:
        """Whether a holder has described work."""
        return self._opened is not None

    def is_complete(self) -> bool:
        """Whether no work is left to lease, or none was ever opened."""
        with self._lock:
            return self._opened is None or self._opened.complete

    def overdue(self, spared: Callable[[str], bool] = lambda holder: False) -> list[TaskLease]:
        """End the leases of which nothing was heard for too long; their holders hang. Returns them.

        spared: whether a holder keeps its leases however long it takes, because others watch it. Nobody does
        in a prediction, and a record that is predicted twice is no harm.
        """
        for _ in range(len(self._postponed)):
            self._postponed.popleft()()
        self._disk_is_full = bool(self._postponed)
        with self._lock:
            if self._opened is None:
                return []
            limit = max(self._patience, _SLOWEST_TIMES * self._slowest)
            now = self._now()
            late = [
                lease
                for lease in self.ledger.leases
                if now - self._heard.setdefault(lease.holder, now) > limit
                and (lease.task.kind is TaskKind.PREDICT or not spared(lease.holder))
            ]
            try:
                self._end(late)
            except LedgerDiskError:  # the next time
                return []
            return late

    def _lease(self, request: Request[protocol.LeaseTasks]) -> Message[protocol.LeaseAnswer]:
        head, holder = request.head, request.head.holder
        kinds = frozenset(map(TaskKind, head.kinds))
        with self._lock:
            self._require_running(holder)
            if kinds == {TaskKind.PREDICT} and head.epoch is not None:
                self._predicts[holder] = (head.epoch, self._now())
            leases_before = self.ledger.leases_of(holder)
            leases = [
                lease for lease in leases_before if lease.token > head.last_token and lease.task.kind in kinds
            ]
            if leases:
                return _leased(leases)
            try:
                granted = self.ledger.lease(holder, kinds, head.most, head.epoch)
            except JobFailedError as error:
                return Message(protocol.LeaseAnswer(leases=[], answer="failed", failure=str(error)))
            if isinstance(granted, NoTask):
                return Message(protocol.LeaseAnswer(leases=[], answer=granted.value))
            now = self._now()
            for lease in granted:
                self._begun[lease.token] = now
            self._heard[holder] = now
        return _leased(granted)

    def _acknowledge(self, request: Request[protocol.DoneRecords]) -> Message[protocol.EndedLeases]:
        done = dict(request.head.done)
        with self._lock:
            holders = {lease.holder for lease in map(self.ledger.lease_of, done) if lease is not None}
            with _refusing():
                ended = self.ledger.acknowledge(done)
            now = self._now()
            self._heard.update(dict.fromkeys(holders, now))
            for token in done:
                if self.ledger.lease_of(token) is None and token in self._begun:
                    self._slowest = max(self._slowest, now - self._begun[token])
            self._forget(done)
        return Message(protocol.EndedLeases(ended=ended))

    def _give_back(self, request: Request[protocol.ReturnedLeases]) -> None:
        with self._lock:
            mine, tokens = self.ledger.leases_of(request.head.holder), set(request.head.tokens)
            self._end([lease for lease in mine if lease.token in tokens])  # wait in the order of their leases

    def _fail(self, request: Request[protocol.FailedLease]) -> Message[protocol.FailureAnswer]:
        head = request.head
        with self._lock:
            with _refusing():
                failed = self.ledger.fail(head.token, head.error, head.record, head.number_in_file)
            self._forget([head.token])
        return Message(protocol.FailureAnswer(**failed._asdict()))

    def _begin_evaluation(self, request: Request[protocol.BeginEvaluation]) -> None:
        head = request.head
        with self._lock:
            self._require_running(head.holder)
            with _refusing():
                self.ledger.begin_evaluation(head.evaluation, head.parts, head.records_per_task)

    def _begin_prediction(self, request: Request[protocol.BeginPrediction]) -> Message[protocol.Begun]:
        head = request.head
        holder, number = head.holder, head.prediction
        with self._lock:
            self._require_running(holder)
            if self._opened is None:
                self._opened = Ledger(self._path, NO_WORK)
            last, now = self._opened.position.prediction, self._now()
            self._predicts[holder] = (number, now)
            if number > last and self._opened.is_predicting(last):
                unknown = now - self._started < _PRESENT  # who has asked the master before this one
                if unknown or self._in_prediction(last) - {holder}:
                    return Message(protocol.Begun(begun=False))
            with _refusing():
                self._opened.begin_prediction(number, head.parts, head.records_per_task)
        return Message(protocol.Begun(begun=True))

    def _begin_export(self, request: Request[protocol.Holder]) -> Message[protocol.Token]:
        holder = request.head.holder
        with self._lock:
            self._require_running(holder)
            lease = self.ledger.begin_export(holder)
            self._begun[lease.token] = self._heard[holder] = self._now()
        return Message(protocol.Token(token=lease.token))

    def _take_position(self, request: Request[protocol.Holder]) -> Message[protocol.SavedPosition]:
        with self._lock:
            self._require_running(request.head.holder)
            return Message(protocol.SavedPosition(state=json.dumps(self.ledger.state_dict())))

    def _restore_position(self, request: Request[protocol.RestorePosition]) -> None:
        state = request.head.state
        with self._lock:
            self._require_running(request.head.holder)
            try:
                if state is None:
                    self.ledger.reset()
                else:
                    self.ledger.load_state_dict(protocol.POSITION.check(json.loads(state), "the position"))
            except (RefusedError, RecursionError, ValueError) as error:
                raise RefusedError(f"expected the position of a checkpoint of this data: {error}") from None
            self._begun, self._heard = {}, {}

    def _require_running(self, holder: str) -> None:
        if process_of(holder) in self._ended:
            text = f"expected a process of the running job, got {holder}: others have its tasks now."
            raise mark(RefusedError(text), True)

    def _end(self, leases: Sequence[TaskLease]) -> None:
        """What is left of the tasks of these leases waits."""
        tokens = [lease.token for lease in leases]
        self.ledger.give_back(tokens)
        self._forget(tokens)

    def _forget(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self.ledger.lease_of(token) is None:
                self._begun.pop(token, None)
        if len(self._heard) > 2 * len(self.ledger.leases) + 100:  # of holders that come and go
            self._heard = {holder: at for holder, at in self._heard.items() if self.ledger.leases_of(holder)}


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse a call that the ledger does not accept."""
    try:
        yield
    except (ValueError, LedgerError) as error:
        raise RefusedError(str(error)) from None


def _leased(leases: Iterable[TaskLease]) -> Message[protocol.LeaseAnswer]:
    answers = [
        protocol.LeaseHead(
            token=lease.token, task={**lease.task._asdict(), "skipped": list(lease.task.skipped)}
        )
        for lease in leases
    ]
    return Message(protocol.LeaseAnswer(leases=answers, answer="tasks"))
