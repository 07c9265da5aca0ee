"""Processes as /proc shows them: their state, parent and family; signals to those that may end before."""

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def kill(pid, number=signal.SIGKILL):
    """Send a signal to a process that may have ended by itself, as those do whose parent was killed.

    A test in which it has to be alive calls `os.kill`.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_family(pid):
    """Kill a process and all that it has started at once, as a machine that loses power does.

    Nobody sees another one die: all are stopped before the first is killed.
    """
    stopped = []
    while more := [each for each in family_of(pid) if each not in stopped]:
        for each in more:
            kill(each, signal.SIGSTOP)
        stopped += more
    for each in stopped:
        kill(each)


def family_of(pid):
    """A process and all that it has started, directly or not."""
    children = defaultdict(list)
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children[_starter_of(place.parent)].append(int(place.parent.name))
    found = [pid]
    for each in found:
        found += children[str(each)]
    return found


def _starter_of(place):
    """The parent of a process, or the process that had the fork server start it; as text."""
    mark = b"STARTED_BY="  # see `forked_programs`
    marks = [word for word in (place / "environ").read_bytes().split(b"\0") if word.startswith(mark)]
    return marks[0].removeprefix(mark).decode() if marks else _status(place / "stat")[1]


def parent_of(pid):
    """The process that has started a living one, or has adopted it."""
    return int(_status(Path(f"/proc/{pid}/stat"))[1])


def state_of(pid):
    """The letter that ps shows, such as T for a process that is stopped; Z as well if it is not there."""
    try:
        return _status(Path(f"/proc/{pid}/stat"))[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def is_alive(pid):
    """Whether a process runs, or is stopped; one that has ended and is not waited for is not alive."""
    return state_of(pid) != "Z"


def _status(place):
    """What follows the name of a process in its file: its state, its parent, and more."""
    return place.read_text().rpartition(")")[2].split()
