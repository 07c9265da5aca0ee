"""`SharedLease`: a lease as an object at a URL, for runs on machines that share no file system.

Object stores replace an object as a whole, and nobody is told about it. So a lease there is weaker than a
file of which exactly one process can be the creator:
- Taking. An owner that runs on this machine is an `OwnerError`. Any other is watched, like the owner of a
  file: if the object changes, it runs; if it does not for its `seconds`, it is replaced. The new owner writes
  its record, waits a moment and reads it again: of several that have written, only the last one finds its
  own. One that writes later than that moment takes the folder from the first, which notices:
- Renewing. Six times within its `seconds` the owner reads the object, and writes it again. If it finds
  another owner, it has lost its lease. It also reads before every save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from karvan.clock import clock
from karvan.owner.errors import LeaseLostError, OwnerError
from karvan.owner.record import OwnerRecord

_log = logging.getLogger(__name__)

_POLL_EVERY = 0.5  # seconds between two reads of an object that is being watched
_SETTLED_AFTER = 1.0  # seconds after which the owner reads what it has written


class LeaseObject(Protocol):
    """The object of a lease. Methods raise an OSError if the store cannot be used."""

    def read(self) -> bytes | None:
        """Its content; None if there is none."""

    def write(self, content: bytes) -> None:
        """Write or replace it."""

    def remove(self) -> None:
        """Remove it, if it is there."""


class SharedLease:
    """The lease of `record` at a URL, which this process holds once `take` has returned.

    where: the URL, for messages. refused, lost: make the errors of another owner.
    """

    def __init__(
        self,
        where: str,
        place: LeaseObject,
        record: OwnerRecord,
        refused: Callable[[OwnerRecord], OwnerError],
        lost: Callable[[OwnerRecord], LeaseLostError],
    ) -> None:
        self._where = where
        self._place = place
        self._record = record
        self._refused = refused
        self._lost = lost

    def take(self) -> None:
        """Take it; an OwnerError if another process holds it, perhaps after waiting for a renewal."""
        content = self._place.read()
        if content is not None:
            self._wait_for(content)
        self._place.write(self._record.content())
        time.sleep(_SETTLED_AFTER)
        found = self._read()
        if found is not None and not found.is_process(self._record):
            raise self._refused(found)

    def find_other(self) -> LeaseLostError | None:
        """The error of another owner, if there is one."""
        found = self._read()
        return None if found is None or found.is_process(self._record) else self._lost(found)

    def renew(self, number: int) -> None:
        """Show that this process runs."""
        self._place.write(replace(self._record, renewals=number).content())

    def release(self) -> None:
        """Allow others to take the folder."""
        with suppress(OSError):
            found = self._read()
            if found is not None and found.is_process(self._record):
                self._place.remove()

    def _read(self) -> OwnerRecord | None:
        content = self._place.read()
        return None if content is None else OwnerRecord.parse(content)

    def _wait_for(self, content: bytes) -> None:
        """Return once the owner of an object is known to be gone; raise if it runs."""
        owner = OwnerRecord.parse(content)
        if owner is not None and owner.id == self._record.id:
            return
        state = "unknown" if owner is None else owner.state()
        if owner is not None and state == "running":
            raise self._refused(owner)
        seconds = self._record.seconds if owner is None else owner.seconds
        if state != "gone":
            _log.warning(
                "%s belongs to %s, which may or may not be running: waiting %g s for a renewal of its lease "
                "before taking over.",
                self._where,
                owner or "an owner that cannot be read",
                seconds,
            )
            start = clock.now()
            while clock.now() - start < seconds:
                time.sleep(min(_POLL_EVERY, seconds / 6))
                now = self._place.read()
                if now is None:
                    return
                if now != content:
                    found = OwnerRecord.parse(now)
                    if found is not None:
                        raise self._refused(found)
                    content = now
        why = "is gone" if state == "gone" else f"did not renew its lease for {seconds:g} s"
        _log.warning("%s is taken over from %s, which %s.", self._where, owner or "an unknown owner", why)
