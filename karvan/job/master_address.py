"""`MasterAddress`: where the master of a job is, which has its registry and its leased work.

A master that is restarted on another machine has another address. Its engine leaves that in the *master
address file* of every process that runs (KARVAN_MASTER_ADDRESS_FILE). Clients call a `MasterAddress` at every
attempt to connect, so they find the master again after the connection to the last one was lost or refused.
The file says only where to look: the token of the job, and its TLS, say who the master is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MasterAddress:
    """An address "host:port" that may change; called, it says the present one.

    first: that with which the process was started. file: the path of its master address file, or "".
    """

    first: str
    file: str = ""

    def __call__(self) -> str:
        """What the file says; the first address without one, or if there is nothing to read in it."""
        if not self.file:
            return self.first
        try:
            lines = Path(self.file).read_text().splitlines()
        except (OSError, UnicodeDecodeError):  # the engine has removed it, since this process is to end
            return self.first
        return lines[0].strip() if lines and lines[0].strip() else self.first

    def __str__(self) -> str:
        return self()


def make_master_address(path: Path, address: str) -> None:
    """Make a master address file, for this user only."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    change_master_address(path, address)


def change_master_address(path: Path, address: str) -> None:
    """Write another address into the file, if it exists and there is one.

    In place, so that nothing appears in a folder that is just being removed.
    """
    with suppress(FileNotFoundError):
        if address:
            with path.open("r+b") as file:
                file.write(f"{address}\n".encode())
                file.truncate()
