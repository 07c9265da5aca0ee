"""`JobState`: what a supervisor knows of its job, in a file, so that the next master continues from it.

The file is small, and replaced as a whole before and after every start of a process, and after every event
that changes something: a master that is killed leaves the state before or after a change. A full disk does
not end the job, but is reported.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from karvan.files import read_object, replace_file

_log = logging.getLogger(__name__)
_reported: set[Path] = set()  # files that could not be written, of which a warning is enough


@dataclass
class MemberState:
    """The last process of a replica. `record` is empty until the process has surely started."""

    process: str = ""
    generation: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    waits: bool = False  # whether it is to be restarted, alone
    wanted: bool = True  # whether it is to run at present
    registration: str = "none"  # see `Registration`


@dataclass
class JobState:
    """The state of a job; `begun` once its processes were started for the first time."""

    path: Path | None = None
    begun: bool = False
    generation: int = 0
    rollback: bool = False  # whether trainers are killed, and restarted soon
    outcome: list[Any] | None = None  # code and failure, once it is known: the job is stopping
    restarts: list[float] = field(default_factory=list)  # wall-clock times
    crash_loop: list[Any] = field(default_factory=list)
    members: dict[str, MemberState] = field(default_factory=dict)
    saved: str = field(default="", init=False)  # the content of the file

    @classmethod
    def read(cls, path: Path) -> JobState:
        """The state in a file; a new one if there is none."""
        values = read_object(path)
        if values is None:
            return cls(path)
        members = {name: MemberState(**fields) for name, fields in values.pop("members").items()}
        return cls(path, **values, members=members)

    def save(self) -> None:
        """Replace the file, if there is one and something has changed."""
        if self.path is None:
            return
        values = asdict(self)
        del values["path"], values["saved"]
        content = json.dumps(values)
        if content == self.saved:
            return
        try:
            replace_file(self.path, content)
            self.saved = content
            _reported.discard(self.path)
        except OSError as error:
            if self.path not in _reported:
                _reported.add(self.path)
                _log.warning("The state of the job could not be saved, in case its master dies: %s", error)
