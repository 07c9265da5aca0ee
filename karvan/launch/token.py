"""The token of a launched job: a random one for every start, unless the job sets `token_file`.

The token is 32 random bytes, in hex, in a file that only its owner may read (0600), in the job's run folder,
which only its owner may enter (0700). Processes of the job get the path in KARVAN_TOKEN_FILE; the token
itself is never an argument, an environment variable or a line of a log. The file is removed when the job
ends, or cannot start. Processes that hold the token leave no core dumps. A job that is killed leaves the file
behind, with a token that no later start accepts: its services died with it, and the next start makes another
token.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from karvan.system_limits import forbid_core_dumps

_BYTES = 32


def make_token(path: Path) -> None:
    """Write a new token to this path, instead of the last one."""
    forbid_core_dumps()
    with suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(_BYTES)}\n")
