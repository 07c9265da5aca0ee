"""`Order`: all that a node has to know in order to run a process, and how it becomes the node's own.

The launcher's machine and the node may differ in: the Python that runs, the folder in which the job was
launched (`working_folder`), the files of the token and TLS, the address by which others reach the process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from karvan.job.address import is_everywhere
from karvan.job.environment import LAUNCHED, names, variable
from karvan.launch.engines.base import Process
from karvan.launch.role_environment import interface_settings
from karvan.owner.lease import FILE, read_lease
from karvan.owner.record import OwnerError
from karvan.system_limits import forbid_core_dumps

# Files that exist in memory alone, for secrets that have travelled to another node.
#
# Such a file belongs to the process that made it: others of the same user open it by a path below /proc, with
# mode 0400. It is on no disk, and is gone with the process, also after kill -9.


def private_file(name: str, content: bytes) -> str:
    """Make a file; returns its path, which is valid as long as this process lives."""
    forbid_core_dumps()
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    os.fchmod(file, 0o400)
    return f"/proc/{os.getpid()}/fd/{file}"


_HOST, _ADVERTISE = variable("host"), variable("advertise")
_CHECKPOINTS, _OWNER = variable("checkpoints"), variable("owner")
_SECRETS = tuple(variable(name) for name in ("token_file", "tls_cert", "tls_key", "tls_ca"))
# Those of users, which processes inherit locally; the address of this machine is not that of another one.
_INHERITED = tuple(name for name in map(variable, names()) if name not in LAUNCHED and name != _ADVERTISE)
_VISIBLE_WITHIN = 5.0  # seconds; network file systems show new files a little later


@dataclass(frozen=True)
class Order:
    """A process, and what of the launcher's machine has to be replaced on the node.

    programs: files in the folder by which a node knows that it sees the same one. network: whether others
    reach the process over the network, and not by loopback. own_threads: whether the process chooses its
    number of threads itself, as it does locally; otherwise it is that of its CPUs.
    """

    process: Process
    secrets: Mapping[str, bytes]  # by variable: the content of the file that it names
    python: str
    version: str
    folder: str
    programs: tuple[str, ...]
    folder_identity: tuple[int, ...]
    network: bool
    own_threads: bool

    @classmethod
    def of(
        cls, process: Process, *, network: bool, own_threads: bool, programs: tuple[str, ...] = ()
    ) -> Order:
        """An order to run a process as if it ran here, in this folder; programs: besides its own."""
        folder = os.getcwd()
        environment = {**_inherited(), **process.environment}
        if process.role.is_rank:  # each has its own devices
            environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        host = process.environment.get(_HOST, "")
        for name, value in interface_settings(host).items() if network and host else ():
            if environment.get(name) == value:  # of this machine, and not set by the job
                del environment[name]
        programs = _programs((*process.command, *programs))
        secrets = {name: Path(environment[name]).read_bytes() for name in _SECRETS if environment.get(name)}
        return cls(
            replace(process, environment=environment),
            secrets,
            sys.executable,
            _version(),
            folder,
            programs,
            identity_of(Path(folder), programs),
            network,
            own_threads,
        )

    def refusal(self, address: str) -> str:
        """Why this node, which has this address, cannot run the process; "" if it can."""
        if self.version != _version():
            return (
                f"node {address} has Karvan {_version()}, but the job was launched with {self.version}. "
                "Install the same version on all nodes."
            )
        folder, owner = self._checkpoints(), self.process.environment.get(_OWNER, "")
        if folder is not None and owner and not _is_owned(folder / FILE, owner):
            return (
                "checkpoints expects a folder that all nodes see, such as one of a network file system, "
                f"got {folder}: node {address} does not see it, or sees another folder there."
            )
        return ""

    def on_node(self, address: str) -> tuple[Process, str]:
        """The process as it runs on this node, which has this address, and the folder in which it runs."""
        environment = dict(self.process.environment)
        for name, content in self.secrets.items():
            environment[name] = private_file(name.lower(), content)
        if self.network:
            if not is_everywhere(environment.get(_HOST, "")):
                environment[_HOST] = address
            environment.setdefault(_ADVERTISE, address)
            if self.process.role.is_rank:
                environment = {**interface_settings(address), **environment}
        folder = self.folder if self._sees_folder() else os.getcwd()
        if (checkpoints := self._checkpoints()) is not None and folder != self.folder:
            environment[_CHECKPOINTS] = str(checkpoints)
        command = self.command_on_node(self.process.command, folder)
        return replace(self.process, command=command, environment=environment), folder

    def command_on_node(self, command: Iterable[str], folder: str) -> tuple[str, ...]:
        """A command of the launcher's machine as it is on this node, where it runs in a folder."""
        return tuple(self._on_node(part, folder) for part in command)

    def _on_node(self, part: str, folder: str) -> str:
        if part == self.python:
            return sys.executable
        if folder != self.folder and part.startswith(f"{self.folder}{os.sep}"):
            copy = os.path.join(folder, os.path.relpath(part, self.folder))
            return copy if os.path.exists(copy) else part
        return part

    def _sees_folder(self) -> bool:
        """Whether the folder of this name is the launcher's, and not another one of the same name."""
        try:
            return identity_of(Path(self.folder), self.programs) == self.folder_identity
        except OSError:
            return False

    def _checkpoints(self) -> Path | None:
        path = self.process.environment.get(_CHECKPOINTS, "")
        return None if not path or "://" in path else Path(self.folder, path)


def identity_of(folder: Path, command: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers by which machines that see the same folder know that it is the same."""
    numbers = [folder.stat().st_ino]
    for part in command:
        if (folder / part).is_file():
            status = (folder / part).stat()
            numbers += [status.st_size, status.st_mtime_ns]
    return tuple(numbers)


def _programs(command: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for part in command if part.endswith((".py", ".yaml", ".yml")))


def _inherited() -> dict[str, str]:
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


def _is_owned(path: Path, owner: str) -> bool:
    until = time.monotonic() + _VISIBLE_WITHIN
    while True:
        try:
            record = read_lease(path)
        except (OSError, OwnerError):
            record = None
        if record is not None and record.id == owner:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def _version() -> str:
    import karvan

    return karvan.__version__
