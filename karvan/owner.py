"""The owner of a folder of checkpoints, so that two runs never write into one.

`own`: this process owns a folder for as long as it trains there. It may own a folder several times, one after
another or nested, in any of its threads: it has one lease, which is released with the last use. Other
processes are refused. The processes of a launched job use the lease of their master: they find its id in
KARVAN_OWNER, take no lease for the job's folder, and check before a save that it is still the master's. With
several ranks, rank 0 owns the folder for all of them.

`Lease`: a file in the folder that says which process may write there, renewed while that process runs:
- Taking. The file is written under another name and hard-linked to its final name, which fails if that
  exists: of several processes exactly one succeeds, also on network file systems.
- Renewing. A thread overwrites the file in place, six times within the lease's `seconds`. An owner whose
  file was removed in the meantime writes into an unlinked file, never into another's lease.
- Others. An owner whose process has ended (same machine) is replaced at once. One that runs is an
  `OwnerError`. One on another machine, or one that is stopped (SIGSTOP, Ctrl-Z), is watched: if the file
  changes, it runs; if it does not for `seconds`, measured by the watcher's own clock, it is replaced. Wall
  clocks are never compared.
- Replacing. The old file is renamed, which only one process can do, and read once more: if it is not the
  one that expired, it is put back.
- Losing. An owner that was paused for longer than its lease finds another's id in the file, and raises
  `LeaseLostError` before its next save.
- Release. The file is removed. The file of a killed process is replaced as above.
- URLs. A folder that stands for a URL has an object there as well, for other machines.
- Successors. The master of a job that is restarted takes the lease with the id of the one before, which it
  replaces at once, wherever that ran; processes of the job know the lease by its id, and notice nothing. A
  master that was not dead finds another process in the file, and has lost its lease. So does a trainer of an
  elastic job without a launcher, whose group has continued without it.
"""

from __future__ import annotations

import errno
import getpass
import json
import logging
import os
import re
import secrets
import shlex
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from karvan.clock import clock
from karvan.job.checkpoint_url import local_path, shown
from karvan.job.environment import JobEnvironment

# `OwnerRecord`: who owns a folder, as its lease file says, and whether that process still runs.
#
# A process is identified by its number and its start time, since numbers are reused. The numbers are valid
# only on the machine, since its last boot, and in the PID namespace (container) of the process; anywhere else
# only renewals of the lease show that the process runs.


class OwnerError(RuntimeError):
    """Another run trains in the folder; the text says which one, since when, and what to do."""


class LeaseLostError(OwnerError):
    """Another run has taken the folder over while this one was paused for long."""


_LONGEST_COMMAND = 300
_CREDENTIALS = re.compile(r"://[^/@\s]+@")  # of a URL


@dataclass(frozen=True)
class OwnerRecord:
    """An owner. id is random; machine identifies where pid and start are valid."""

    id: str
    host: str
    machine: str
    pid: int
    start: str
    user: str
    command: str
    taken: str  # wall-clock time, for error messages
    seconds: float  # without a renewal after which others may take over
    renewals: int = 0

    @classmethod
    def of_this_process(cls, seconds: float, id: str = "") -> OwnerRecord:
        """A new record of this process; id: that of the process of which it is the successor."""
        pid = os.getpid()
        return cls(
            id=id or secrets.token_hex(16),
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            start=_start_of(pid) or "",
            user=_user(),
            command=_CREDENTIALS.sub("://", shlex.join(sys.orig_argv))[:_LONGEST_COMMAND],
            taken=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            seconds=seconds,
        )

    @classmethod
    def parse(cls, content: bytes) -> OwnerRecord | None:
        """The record in a lease file; None if it is incomplete or not a lease."""
        try:
            values: dict[str, Any] = json.loads(content)
            kinds: dict[str, Any] = {"pid": int, "renewals": int, "seconds": (int, float)}
            fields = cls.__dataclass_fields__
            if not all(isinstance(values[name], kinds.get(name, str)) for name in fields):
                return None
            record = cls(**{name: values[name] for name in fields})
        except (ValueError, KeyError, TypeError):
            return None
        return record if 0 < record.seconds < 1e6 else None

    def is_in(self, content: bytes | None) -> bool:
        """Whether a lease is of the same process, perhaps another renewal of it."""
        return content is not None and self._is_process(OwnerRecord.parse(content))

    def other_in(self, content: bytes | None) -> OwnerRecord | None:
        """The other process that a lease is of; None if it is of this one, or of nobody that can be read."""
        record = None if content is None else OwnerRecord.parse(content)
        return None if record is None or self._is_process(record) else record

    def _is_process(self, other: OwnerRecord | None) -> bool:
        return other is not None and (self.id, self.machine, self.pid, self.start) == (
            *(other.id, other.machine, other.pid, other.start),
        )

    def content(self) -> bytes:
        """For a lease file; of the same length after any renewal, so that it is overwritten in place."""
        text = json.dumps({**asdict(self), "renewals": 0}, indent=1, ensure_ascii=True)
        return text.replace('"renewals": 0', f'"renewals": {self.renewals:>10d}').encode() + b"\n"

    def state(self) -> str:
        """The state of its process: "running", "stopped", "gone", or "unknown" (on another machine)."""
        if self.machine != _machine():
            return "unknown"
        if not self.start or _start_of(self.pid) != self.start:
            return "gone" if self.start else "unknown"
        status = (_stat_of(self.pid) or ["X"])[0]
        return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(status, "running")

    def __str__(self) -> str:
        where = f"process {self.pid} of {self.user} on {self.host}, since {self.taken}"
        return f"{where} ({self.command})"


def _machine() -> str:
    """The scope in which process numbers are valid: the machine since its boot, and the PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {os.uname().sysname}"


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if there is no such process."""
    fields = _stat_of(pid)
    return fields[19] if fields is not None else None


def _stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name of the program, which may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in containers
        return f"uid {os.geteuid()}"


# The object of a lease at a URL, for runs on machines that share no file system.
#
# Object stores replace an object as a whole, and nobody is told about it. So a lease there is weaker than a
# file of which exactly one process can be the creator:
# - Taking. An owner that runs on this machine is an `OwnerError`. Any other is watched, like the owner of a
#   file: if the object changes, it runs; if not for its `seconds`, it is replaced. The new owner writes
#   its record, waits a moment and reads it again: of several that have written, only the last one finds its
#   own. One that writes later than that moment takes the folder from the first, which notices:
# - Renewing. Six times within its `seconds` the owner reads the object, and writes it again. If it finds
#   another owner, it has lost its lease. It also reads before every save.


_log = logging.getLogger(__name__)

FILE = ".karvan-owner.json"
_RENEWALS = 6  # of a lease within its seconds
_POLL_EVERY = 0.5  # seconds between two reads of a lease that is being watched
_MOST_BYTES = 16384
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)  # some file systems
_SETTLED_AFTER = 1.0  # seconds after which the owner of an object reads what it has written


class LeaseObject(Protocol):
    """The object of a lease. Methods raise an OSError if the store cannot be used."""

    def read(self) -> bytes | None:
        """Its content; None if there is none."""

    def write(self, content: bytes) -> None:
        """Write or replace it."""

    def remove(self) -> None:
        """Remove it, if it is there."""


def _wait_for_end(
    path: Path, where: object, content: bytes, mine: OwnerRecord, read: Callable[[], bytes | None]
) -> str:
    """Return once the owner of a lease, by its content, is known to be gone; raise if it runs.

    Returns who that was and why it is replaced, for a message; "" if nobody is.
    """
    owner = OwnerRecord.parse(content)
    if owner is not None and owner.id == mine.id:
        return ""  # it is the predecessor of this process
    state = "unknown" if owner is None else owner.state()
    if owner is not None and state == "running":
        raise refused_error(path, owner)
    if state == "gone":
        return f"{owner}, which is gone"
    seconds = mine.seconds if owner is None else owner.seconds
    _log.warning(
        "%s belongs to %s, which %s: waiting %g s for a renewal of its lease before taking over.",
        where,
        owner or "an owner that cannot be read",
        "is stopped" if state == "stopped" else "may or may not be running",
        seconds,
    )
    start = clock.now()
    while clock.now() - start < seconds:
        time.sleep(min(_POLL_EVERY, seconds / _RENEWALS))
        now = read()
        if now is None:
            return ""
        if now != content:
            if (record := OwnerRecord.parse(now)) is not None:
                raise refused_error(path, record)
            content = now
    return f"{owner or 'an unknown owner'}, which did not renew its lease for {seconds:g} s"


class Lease:
    """A lease that this process holds until `release`."""

    def __init__(self, folder: Path, seconds: float, id: str = "", place: LeaseObject | None = None) -> None:
        """Take it; an OwnerError if another process holds it, perhaps after waiting for a renewal.

        id: that of the process of which this one is the successor, if any. place: the object that is taken
        as well, where the folder stands for a URL.
        """
        self.path = folder / FILE
        self.record = OwnerRecord.of_this_process(seconds, id)
        self.key = Path(os.path.realpath(folder))
        self.process = os.getpid()
        self.uses = 1
        self._lost: LeaseLostError | None = None
        self._on_lost: list[Callable[[], None]] = []
        self._released = threading.Event()
        self._descriptor = -1
        self._lock = threading.Lock()
        self._device = device_of(folder)
        while not self._link():
            self._replace_other()
        self._place = place
        if place is not None:
            try:
                self._take_object(place)
            except BaseException:
                self._remove()
                raise
        self._thread = threading.Thread(target=self._run, name="karvan-owner", daemon=True)
        self._thread.start()

    def _take_object(self, place: LeaseObject) -> None:
        where, content = shown(self.path.parent), place.read()
        if content is not None:
            end = _wait_for_end(self.path, where, content, self.record, place.read)
            if end:
                _log.warning("%s is taken over from %s.", where, end)
        place.write(self.record.content())
        time.sleep(_SETTLED_AFTER)
        if (other := self.record.other_in(place.read())) is not None:
            raise refused_error(self.path, other)

    def check(self) -> None:
        """Raise a LeaseLostError if another process has taken the folder over.

        An OSError if the folder is on another file system than when the lease was taken: that one was
        unmounted, and files written in the meantime would be hidden when it is mounted again.
        """
        if self._lost is None and device_of(self.path.parent) != self._device:
            raise away_error(self.path.parent)
        if self._lost is None:
            with suppress(OSError):  # the save reports a file system that fails
                other = self._find_other()
                if other is None and self._place is not None:
                    other = self.record.other_in(self._place.read())
                self._lost = None if other is None else lost_error(self.path, other)
        if self._lost is not None:
            raise LeaseLostError(*self._lost.args)

    def on_lost(self, do: Callable[[], None]) -> None:
        """Call this, on the thread that renews the lease, when another process has taken the folder over."""
        self._on_lost.append(do)

    def _find_other(self) -> OwnerRecord | None:
        content = _read(self.path)
        if self._released.is_set() or (content is not None and OwnerRecord.parse(content) is not None):
            return self.record.other_in(content)
        with self._lock:  # the file was removed
            self._link()
        return self.record.other_in(_read(self.path))

    def release(self) -> None:
        """Allow others to take the folder."""
        self._released.set()
        self._thread.join()
        if self._place is not None:
            with suppress(OSError):
                if self.record.is_in(self._place.read()):
                    self._place.remove()
        self._remove()

    def _remove(self) -> None:
        """Remove the file, if it is still this lease's."""
        with suppress(OSError):
            if self.record.is_in(_read(self.path)):
                self.path.unlink()
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _link(self) -> bool:
        """Create the file if there is none; returns whether this process created it."""
        content = self.record.content()
        hidden = self._aside()
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(descriptor, 0o644)  # so that a refused user can read who the owner is
            os.write(descriptor, content)
            os.fsync(descriptor)
            try:
                os.link(hidden, self.path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if not _create(self.path, content):
                    return False
                created = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                os.close(descriptor)
                descriptor = created
            self._descriptor, descriptor = descriptor, self._descriptor
            return True
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            with suppress(OSError):
                hidden.unlink()

    def _aside(self) -> Path:
        """An unused name beside the file."""
        return self.path.with_name(f"{FILE}.{os.getpid()}-{secrets.token_hex(4)}")

    def _replace_other(self) -> None:
        """Wait until the file's owner is known to be gone, and remove the file."""
        try:
            content = _read(self.path)
        except PermissionError:
            raise OwnerError(
                f"{self.path} cannot be read, so it is not known which run owns the folder: expected a file "
                "that this user may read. Ask its owner, or use another folder."
            ) from None
        if content is None:
            return
        end = _wait_for_end(self.path, self.path.parent, content, self.record, lambda: _read(self.path))
        aside = self._aside()
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        now = _read(aside)
        if now is not None and now != content:  # another process took the lease in the meantime
            with suppress(OSError):
                os.link(aside, self.path)
        elif end and OwnerRecord.parse(content) is not None:
            _log.warning("%s is taken over from %s.", self.path.parent, end)
        with suppress(OSError):
            aside.unlink()

    def _run(self) -> None:
        number = 0
        while not self._released.wait(self.record.seconds / _RENEWALS):
            number += 1
            try:
                self.check()
                content = replace(self.record, renewals=number).content()
                with self._lock:
                    os.pwrite(self._descriptor, content, 0)
                if self._place is not None:
                    self._place.write(content)
            except LeaseLostError as error:
                _log.error("%s", error)
                for do in self._on_lost:
                    do()
                return
            except OSError as error:  # the file system may come back; the lease is valid until it is taken
                _log.warning("The lease %s could not be renewed: %s", self.path, error)


def device_of(folder: Path) -> int:
    """The file system of a folder or, if it does not exist, of its nearest existing parent."""
    for parent in (folder, *folder.absolute().parents):
        with suppress(OSError):
            return os.stat(parent).st_dev
    return -1


def away_error(folder: Path) -> OSError:
    """The error of a folder whose file system was unmounted: an outage."""
    return OSError(
        errno.ESTALE,
        "expected the file system that this run started on, got none or another one; is it mounted?",
        str(folder),
    )


def read_lease(path: Path) -> OwnerRecord | None:
    """Who owns a folder by its lease file; None if nobody does, or it cannot be read."""
    content = _read(path)
    return None if content is None else OwnerRecord.parse(content)


def refused_error(path: Path, owner: OwnerRecord) -> OwnerError:
    """The error of a second owner."""
    return OwnerError(
        f"{shown(path.parent)} belongs to a run that is training: {owner}. Expected one run per checkpoint "
        "folder: stop that one first, or use another folder. A folder of a run that was killed is free by "
        "itself."
    )


def lost_error(path: Path, owner: OwnerRecord) -> LeaseLostError:
    """The error of an owner that another has replaced."""
    return LeaseLostError(
        f"{shown(path.parent)} was taken over by {owner} while this run did not renew its lease (it was "
        "paused, or its machine was). This run stops and saves nothing more, so that there are never two "
        "writers."
    )


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _kind_error(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # others can create anything in a shared folder
            raise _kind_error(path)
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _kind_error(path: Path) -> OwnerError:
    return OwnerError(
        f"{path} is not a plain file, so it is not known which run owns the folder: expected the lease of a "
        "run, or nothing. Remove it, or use another folder."
    )


def _create(path: Path, content: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    return True


SECONDS = 60.0

# The code that saves reports a folder that cannot be written to, with a better message.
_REPORTED_BY_SAVES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


class Ownership:
    """A use of a folder; `release` ends it."""

    def __init__(self, folder: Path, lease: Lease | None, place: LeaseObject | None = None) -> None:
        self.folder = folder
        self._place = place
        self._lease = lease

    @property
    def id(self) -> str:
        """The id of the lease, for the processes of a job; empty without one."""
        return "" if self._lease is None else self._lease.record.id

    def on_lost(self, do: Callable[[], None]) -> None:
        """Call this, on another thread, when another run has taken the folder over."""
        if self._lease is not None:
            self._lease.on_lost(do)

    def check(self) -> None:
        """Raise a LeaseLostError if another run has taken the folder over."""
        check_owner(self.folder, self._place)

    def release(self) -> None:
        """End it; others may take the folder if this was the last use of it by this process."""
        lease, self._lease = self._lease, None
        if lease is None or os.getpid() != lease.process:
            return
        with _lock:
            lease.uses -= 1
            if lease.uses:
                return
            del _leases[lease.key]
        lease.release()


_lock = threading.Lock()
_leases: dict[Path, Lease] = {}  # of this process, and of those from which it was forked


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
        lease = _lease_of(key)
        if lease is not None:
            lease.check()
            lease.uses += 1
            return Ownership(path, lease)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lease = _leases[key] = Lease(path, lease_seconds(), id, place)
        except OSError as error:
            if error.errno not in _REPORTED_BY_SAVES:
                _log.warning("No lease for %s, so another run may also write there: %s", path, error)
            return Ownership(path, None)
    return Ownership(path, lease)


def check_owner(folder: str | os.PathLike[str], place: LeaseObject | None = None) -> None:
    """Raise a LeaseLostError if this process, or its master, has owned the folder and no longer does.

    place: the object of the lease, which the processes of a job read where the folder stands for a URL,
    because their master may be on another machine. An OSError, which is an outage, if the folder's
    file system is unmounted.
    """
    path = local_path(folder)
    key = Path(os.path.realpath(path))
    if _is_of_the_master(key):
        owner = None
        with suppress(OSError):  # the save reports a file system that fails
            content = _read(path / FILE) if place is None else place.read()
            owner = None if content is None else OwnerRecord.parse(content)
        if owner is None and place is None and not os.path.lexists(path / FILE):
            raise away_error(path)  # the master would have created it again
        if owner is not None and owner.id != JobEnvironment.read().owner:
            raise lost_error(path / FILE, owner)
    elif (lease := _lease_of(key)) is not None:
        lease.check()


def lease_seconds() -> float:
    """Seconds without a renewal after which others may take over."""
    setting = JobEnvironment.read().lease_seconds
    seconds = SECONDS if setting is None else setting
    if not 1 <= seconds <= 86400:
        raise ValueError(f"KARVAN_LEASE_SECONDS expects seconds from 1 to 86400, got {seconds:g}.")
    return seconds


def _lease_of(key: Path) -> Lease | None:
    lease = _leases.get(key)
    return lease if lease is not None and lease.process == os.getpid() else None


def _is_of_the_master(key: Path) -> bool:
    job = JobEnvironment.read()
    return bool(job.owner and job.checkpoints) and Path(os.path.realpath(local_path(job.checkpoints))) == key
