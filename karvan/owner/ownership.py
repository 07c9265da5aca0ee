"""`own`: this process owns a folder for as long as it trains there.

A process may own a folder several times, one after another or nested, in any of its threads: it has one
lease, which is released with the last use. Other processes are refused. The processes of a launched job use
the lease of their master: they find its id in KARVAN_OWNER, take no lease for the job's folder, and check
before a save that it is still the master's. With several ranks, rank 0 owns the folder for all of them.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from karvan.job.checkpoint_url import local_path
from karvan.job.environment import JobEnvironment
from karvan.owner.lease import FILE, Lease, LeaseObject, away_error, lost_error, read_lease
from karvan.owner.record import OwnerRecord

_log = logging.getLogger(__name__)

SECONDS = 60.0

# The code that saves reports a folder that cannot be written to, with a better message.
_REPORTED_BY_SAVES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


class Ownership:
    """A use of a folder; `release` ends it."""

    def __init__(self, folder: Path, shared: _SharedLease | None, place: LeaseObject | None = None) -> None:
        self.folder = folder
        self._place = place
        self._shared = shared

    @property
    def id(self) -> str:
        """The id of the lease, for the processes of a job; empty without one."""
        return "" if self._shared is None else self._shared.lease.record.id

    def on_lost(self, do: Callable[[], None]) -> None:
        """Call this, on another thread, when another run has taken the folder over."""
        if self._shared is not None:
            self._shared.lease.on_lost(do)

    def check(self) -> None:
        """Raise a LeaseLostError if another run has taken the folder over."""
        check_owner(self.folder, self._place)

    def release(self) -> None:
        """End it; others may take the folder if this was the last use of it by this process."""
        shared, self._shared = self._shared, None
        if shared is None or os.getpid() != shared.process:
            return
        with _lock:
            shared.uses -= 1
            if shared.uses:
                return
            del _leases[shared.key]
        shared.lease.release()


class _SharedLease:
    def __init__(self, key: Path, lease: Lease) -> None:
        self.key = key
        self.lease = lease
        self.process = os.getpid()
        self.uses = 1


_lock = threading.Lock()
_leases: dict[Path, _SharedLease] = {}


def own(folder: str | os.PathLike[str], id: str = "", place: LeaseObject | None = None) -> Ownership:
    """Own a folder, which is created if necessary; an OwnerError if another run owns it.

    id: of the lease of a process that has died, or was left behind, and of which this one is the successor.
    place: the object of the lease, for a folder that stands for a URL.
    """
    path = local_path(folder)
    key = Path(os.path.realpath(path))
    if _is_of_the_master(key):
        check_owner(path, place)
        return Ownership(path, None, place)
    with _lock:
        lease = _known(key)
        if lease is not None:
            lease.lease.check()
            lease.uses += 1
            return Ownership(path, lease)
        try:
            path.mkdir(parents=True, exist_ok=True)
            shared = _leases[key] = _SharedLease(key, Lease(path, lease_seconds(), id, place))
        except OSError as error:
            if error.errno not in _REPORTED_BY_SAVES:
                _log.warning("No lease for %s, so another run may also write there: %s", path, error)
            return Ownership(path, None)
    return Ownership(path, shared)


def check_owner(folder: str | os.PathLike[str], place: LeaseObject | None = None) -> None:
    """Raise a LeaseLostError if this process, or its master, has owned the folder and no longer does.

    place: the object of the lease, which the processes of a job read where the folder stands for a URL,
    because their master may be on another machine. An OSError, which is an outage, if the folder's
    file system is unmounted.
    """
    path = local_path(folder)
    key = Path(os.path.realpath(path))
    if _is_of_the_master(key):
        lease = None
        if place is not None:
            with suppress(OSError):
                content = place.read()
                lease = None if content is None else OwnerRecord.parse(content)
            if lease is not None and lease.id != JobEnvironment.read().owner:
                raise lost_error(path / FILE, lease)
            return
        with suppress(OSError):  # the save reports a file system that fails
            lease = read_lease(path / FILE)
        if lease is None and not os.path.lexists(path / FILE):  # the master would have created it again
            raise away_error(path)
        if lease is not None and lease.id != JobEnvironment.read().owner:
            raise lost_error(path / FILE, lease)
        return
    key_ = _known(key)
    if key_ is not None:
        key_.lease.check()


def lease_seconds() -> float:
    """Seconds without a renewal after which others may take over."""
    setting = JobEnvironment.read().lease_seconds
    seconds = SECONDS if setting is None else setting
    if not 1 <= seconds <= 86400:
        raise ValueError(f"KARVAN_LEASE_SECONDS expects seconds from 1 to 86400, got {seconds:g}.")
    return seconds


def _known(key: Path) -> _SharedLease | None:
    lease = _leases.get(key)
    return lease if lease is not None and lease.process == os.getpid() else None


def _is_of_the_master(key: Path) -> bool:
    job = JobEnvironment.read()
    return bool(job.owner and job.checkpoints) and Path(os.path.realpath(local_path(job.checkpoints))) == key
