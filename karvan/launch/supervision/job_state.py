"""`JobState`: what a supervisor knows of its job, in a file, so that the next master continues from it.

The file is small, and replaced as a whole before and after every start of a process, and after every event:
a master that is killed leaves the state before or after a change. It must survive the process, not the
machine that has the file, so nothing is synced to the disk; network file systems write a file when it is
closed. A full disk does not end the job, but is reported.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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

    @classmethod
    def read(cls, path: Path) -> JobState:
        """The state in a file; a new one if there is none."""
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls(path)
        members = {name: MemberState(**each) for name, each in values.pop("members").items()}
        return cls(path, **values, members=members)

    def save(self) -> None:
        """Replace the file, if there is one."""
        if self.path is None:
            return
        values = asdict(self)
        del values["path"]
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.write_text(json.dumps(values))
            os.replace(new, self.path)
            _reported.discard(self.path)
        except OSError as error:
            if self.path not in _reported:
                _reported.add(self.path)
                _log.warning("The state of the job could not be saved, in case its master dies: %s", error)
