"""`TrainerGroup`: which trainers train together, round after round, as the master decides.

A round is a list of members, in the order of their ranks. It lasts until a member dies or leaves, or until
another trainer wants to join. A trainer calls

    enter_group   when it starts. It gets its number, the name of the group, by which a folder of checkpoints
                  knows its trainers, and the name of the run, by which servers know it.
    join_group    when it is ready to train, and when its round is over. It calls again until the answer names
                  a later round. The next round begins when all members of the last one have called, except
                  for those that are gone: they have no step in progress then. Members keep their order;
                  joiners come after them. The first round begins when `least` trainers are there.
    watch_group   a few times a second. The answer says whether somebody waits to join; whether the round is
                  broken, because a member waits for the next one or is gone; which members are gone; and who
                  waits.
    settle_group  by the first member of a round, after its members have agreed on the last step that the
                  round before has made: only then are the tasks of members that are gone leased to others.
    leave_group   when it will not train any more.

A member is gone when it has left, when the engine says that its process has ended (`remove`), when another
member has seen that, or when it was not heard for `lost_after` seconds while others wait for it. A member
that is gone stays so: if it comes back, its calls are refused. If nobody at all is heard for some seconds, it
is the master that is out of reach, and silence begins anew.

If all members are gone, what they had trained since the last checkpoint is lost, and another run begins.
Rounds, members and runs have numbers and names that are never used again. They are in a file, so that they
outlive the master. What a full disk does not take is in memory, with a warning, and in the file later.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from karvan.clock import clock
from karvan.errors import mark
from karvan.files import read_object, replace_file
from karvan.protocol import master as protocol
from karvan.wire import Endpoint, Message, RefusedError, Request, Service, endpoints

_log = logging.getLogger(__name__)

_PRESENT = 5.0  # seconds since its last call for which a trainer that wants to join counts as present


class TrainerGroup(Service):
    """The group of trainers of a job; `path` is its file, None for a group that dies with its master.

    least: how many trainers there must be to begin. settled: called with the names of the processes that are
    gone, once the others have settled what those have done.
    """

    name = "trainer group"
    progresses = False

    def __init__(
        self,
        path: Path | None = None,
        *,
        least: int = 1,
        lost_after: float = 60.0,
        settled: Callable[[list[str]], None] = lambda processes: None,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._path = path
        self._least = self._expected = least
        self._lost_after = lost_after
        self._on_settled = settled
        self._now = now
        self._lock = threading.Lock()
        self.round = 0  # the number of the current one; 0 before the first
        self._run = secrets.token_hex(8)
        self._group = secrets.token_hex(16)
        self._members: list[int] = []
        self._processes: dict[int, str] = {}  # of members and of those that want to join
        self._gone: set[int] = set()  # of the processes above
        self._left: set[str] = set()
        self._next_member = 0
        self._waits: dict[int, float] = {}  # when each that waits for the next round has called last
        self._heard: dict[int, float] = {}
        self._heard_last = now()  # of whomever
        self._unwritten = False  # whether the disk has not taken the last change
        if path is not None and (state := read_object(path)) is not None:
            self._read(state)
        self.endpoints = endpoints(
            protocol.GROUP_CALLS,
            Endpoint(protocol.ENTER_GROUP, self._enter),
            Endpoint(protocol.JOIN_GROUP, self._join),
            Endpoint(protocol.WATCH_GROUP, self._watch),
            Endpoint(protocol.SETTLE_GROUP, self._settle),
            Endpoint(protocol.LEAVE_GROUP, self._leave),
        )

    @property
    def members(self) -> list[str]:
        """The processes of the current round, in the order of their ranks, without those that are gone."""
        with self._lock:
            return [self._processes[name] for name in self._present()]

    @property
    def gone(self) -> list[str]:
        """The processes without which the others have continued, or will."""
        with self._lock:
            return self._processes_gone()

    def has_begun(self) -> bool:
        """Whether there is a round in which trainers train."""
        with self._lock:
            return bool(self._members)

    def remove(self, process: str) -> bool:
        """A process has ended. Returns whether others of its round are left, who will continue without it."""
        with self._lock:
            member = self._member_of(process)
            if member is not None:
                self._gone.add(member)
                self._end_run()
                self._write()
            return bool(self._present())

    def expect(self, trainers: int) -> None:
        """No more than this many trainers will come: a run begins when they are there."""
        with self._lock:
            self._expected = max(1, trainers)

    def has_left(self, process: str) -> bool:
        """Whether a process has left the others before the end of training."""
        with self._lock:
            return process in self._left

    def is_member(self, process: str) -> bool:
        """Whether a process is in the current round, or may join the next one."""
        with self._lock:
            member = self._member_of(process)
            return member is not None and member not in self._gone

    def _enter(self, request: Request[protocol.GroupProcess]) -> Message[protocol.EnteredGroup]:
        with self._lock:
            member = self._admit(request.head.process)
            return Message(protocol.EnteredGroup(member=member, group=self._group, run=self._run))

    def _join(self, request: Request[protocol.JoinGroup]) -> Message[protocol.JoinedGroup]:
        head, now = request.head, self._now()
        with self._lock:
            member = self._admit(head.process)
            self._hear(member, now)
            if member in self._members and head.round < self.round:
                return self._answer(member)
            self._waits[member] = now
            if lost := {name for name in head.lost if name in self._members} - self._gone:
                self._gone |= lost
                self._write()
            self._begin_round(now)
            return self._answer(member)

    def _answer(self, member: int) -> Message[protocol.JoinedGroup]:
        trains = member in self._members and member not in self._waits
        number, members, run = (self.round, self._members, self._run) if trains else (0, [], "")
        return Message(protocol.JoinedGroup(member=member, round=number, members=members, run=run))

    def _begin_round(self, now: float) -> None:
        """Begin the next round, if all who are needed for it wait."""
        self._drop_silent(now)
        survivors = self._present()
        waiting = self._waiting(now)
        if not set(survivors) <= waiting:
            return
        joiners = sorted(waiting.difference(survivors))
        if not survivors and len(joiners) < min(self._least, self._expected):
            return
        self._end_run()
        self._members = [*survivors, *joiners]
        self.round += 1
        self._waits = {}
        self._write()

    def _end_run(self) -> None:
        """If all members are gone, the next ones begin another run."""
        if self._members and not self._present():
            self._members = []
            self._run = secrets.token_hex(8)

    def _watch(self, request: Request[protocol.ProcessRound]) -> Message[protocol.RoundState]:
        head, now = request.head, self._now()
        with self._lock:
            member = self._admit(head.process)
            self._hear(member, now)
            if self._unwritten:
                self._write()
            if head.round != self.round:
                return Message(protocol.RoundState(regroup=True, broken=True, gone=[], waiting=[]))
            self._drop_silent(now)
            waiting = self._waiting(now)
            lost = [member for member in self._members if member in self._gone]
            broken = bool(lost) or not waiting.isdisjoint(self._members)
            return Message(
                protocol.RoundState(
                    regroup=broken or bool(waiting), broken=broken, gone=lost, waiting=sorted(waiting)
                )
            )

    def _settle(self, request: Request[protocol.ProcessRound]) -> None:
        with self._lock:
            self._admit(request.head.process)
            if request.head.round != self.round:
                return
            processes = self._processes_gone()
        self._on_settled(processes)

    def _leave(self, request: Request[protocol.GroupProcess]) -> None:
        process = request.head.process
        with self._lock:
            if self._member_of(process) in self._members:
                self._left.add(process)
        self.remove(process)

    def _admit(self, process: str) -> int:
        member = self._member_of(process)
        if member in self._gone:
            text = f"The trainers have continued without {process}: it left, or did not answer."
            raise mark(RefusedError(text), True)
        if member is None:
            if len(self._processes) - len(self._gone) >= protocol.MOST_TRAINERS:
                raise RefusedError(
                    f"expected at most {protocol.MOST_TRAINERS:,} trainers, got {process} as well."
                )
            member = self._next_member
            self._next_member += 1
            self._processes[member] = process
            self._write()
        return member

    def _hear(self, member: int, now: float) -> None:
        if now - self._heard_last > _PRESENT:
            self._heard = {}
        self._heard[member] = self._heard_last = now

    def _member_of(self, process: str) -> int | None:
        return next((member for member, name in self._processes.items() if name == process), None)

    def _drop_silent(self, now: float) -> None:
        """Members of the round that were not heard for long are gone."""
        for member in self._present():
            if now - self._heard.setdefault(member, now) > self._lost_after:
                self._gone.add(member)

    def _waiting(self, now: float) -> set[int]:
        """Those that wait for the next round."""
        return {member for member, at in self._waits.items() if now - at <= _PRESENT} - self._gone

    def _present(self) -> list[int]:
        """Members of the round that are not gone, in the order of their ranks."""
        return [member for member in self._members if member not in self._gone]

    def _processes_gone(self) -> list[str]:
        return [name for member, name in self._processes.items() if member in self._gone]

    def _write(self) -> None:
        if self._path is None:
            return
        state = {
            "round": self.round,
            "run": self._run,
            "group": self._group,
            "members": self._members,
            "processes": {str(member): name for member, name in self._processes.items()},
            "gone": sorted(self._gone),
            "left": sorted(self._left),
            "next_member": self._next_member,
        }
        try:
            replace_file(self._path, json.dumps(state))
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                text = "%s could not be written, in case the master dies: %s."
                _log.warning(text, self._path, error.strerror)
            self._unwritten = True

    def _read(self, state: dict[str, Any]) -> None:
        self.round, self._run, self._group = state["round"], state["run"], state["group"]
        self._members, self._next_member = state["members"], state["next_member"]
        self._processes = {int(member): name for member, name in state["processes"].items()}
        self._gone, self._left = set(state["gone"]), set(state["left"])
