"""`GroupClient`: a trainer's calls to the master about the group that it trains in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from karvan.protocol.master import GROUP_CALLS
from karvan.wire import Client, Security

_DEADLINE = 600.0  # seconds in which a master must come back


class GroupRound(NamedTuple):
    """A round of the group: its number, its members in the order of their ranks, and its run."""

    number: int
    members: tuple[int, ...]
    run: str


class GroupState(NamedTuple):
    """What has happened to a round; see `karvan/work/trainer_group.py`."""

    regroup: bool
    broken: bool
    gone: tuple[int, ...]
    waiting: tuple[int, ...]


class GroupClient:
    """Calls under the name of this process. It outlives the master: calls wait for the next one."""

    def __init__(
        self,
        find: str | Callable[[], str],
        process: str,
        security: Security | None = None,
        *,
        deadline: float = _DEADLINE,
    ) -> None:
        self.process = process
        self.member = -1  # until it has entered
        self.group = ""  # the name of the group, once it has entered
        self._client = Client("master", find, security, calls=GROUP_CALLS, deadline=deadline, forgetful=True)

    def enter(self) -> str:
        """Get a number, `member`, and the name of the group; returns the name of the run."""
        answer = self._client.call("enter_group", {"process": self.process}).head
        self.member, self.group = answer["member"], answer["group"]
        return str(answer["run"])

    def join(self, round_number: int, lost: Iterable[int] = ()) -> GroupRound | None:
        """Ask for a round after this one, 0 for any; None: not yet. lost: members whose processes ended."""
        head = {"process": self.process, "round": round_number, "lost": list(lost)}
        answer = self._client.call("join_group", head).head
        self.member = answer["member"]
        if not answer["round"]:
            return None
        return GroupRound(answer["round"], tuple(answer["members"]), answer["run"])

    def watch(self, round_number: int) -> GroupState:
        """What has happened to a round."""
        answer = self._client.call("watch_group", {"process": self.process, "round": round_number}).head
        gone, waiting = tuple(answer["gone"]), tuple(answer["waiting"])
        return GroupState(answer["regroup"], answer["broken"], gone, waiting)

    def settle(self, round_number: int) -> None:
        """The members of a round have settled what those that are gone have done."""
        self._client.call("settle_group", {"process": self.process, "round": round_number})

    def leave(self, within: float | None = None) -> None:
        """Leave the group for good. within: seconds in which the master must answer; by default minutes."""
        self._client.call("leave_group", {"process": self.process}, deadline=within)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
