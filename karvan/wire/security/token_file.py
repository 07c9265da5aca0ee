"""The file that holds a job's token: read once, and checked when it is read.

A token is sent in an HTTP/2 header. One that is not valid there would fail much later, at the first call,
with an error of gRPC that names neither the file nor the mistake; one that others may read is no secret.
Error messages and logs never contain any part of a token.
"""

from __future__ import annotations

import logging
import os
import shlex
import stat
from pathlib import Path

_log = logging.getLogger("karvan.wire")

MOST_CHARACTERS = 4096
LEAST_CHARACTERS = 16  # fewer can be guessed; a warning
RECIPE = "`openssl rand -hex 32` makes one"


def read_token(path: str | Path, name: str = "KARVAN_TOKEN_FILE") -> str:
    """The token in a file, without surrounding whitespace; `name`: the setting that names the file."""
    with Path(path).open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        content = file.read(2 * MOST_CHARACTERS)  # a device or a large file must not fill memory
    token = check_token(content, f"{name} expects", f"got {path}, which")
    if mode & 0o077:
        _log.warning(
            "The token file %s can be read or changed by other users (mode %03o); run: chmod 600 %s",
            path,
            mode,
            shlex.quote(str(path)),
        )
    if len(token) < LEAST_CHARACTERS:
        _log.warning(
            "The token in %s has %d characters; fewer than %d can be guessed (%s).",
            path,
            len(token),
            LEAST_CHARACTERS,
            RECIPE,
        )
    return token


def check_token(content: bytes, expects: str, got: str) -> str:
    """The token in these bytes; a ValueError, worded with the two texts, if they hold none."""
    token = content.strip(b" \t\r\n")
    if not token:  # a job that was meant to be protected must not be open
        raise ValueError(f"{expects} a file that is not empty, {got} is empty.")
    problem = _problem(token)
    if problem:
        expected = f"one line of up to {MOST_CHARACTERS} printable ASCII characters without spaces ({RECIPE})"
        raise ValueError(f"{expects} {expected}, {got} {problem}.")
    return token.decode("ascii")


def _problem(token: bytes) -> str:
    if len(token) > MOST_CHARACTERS:
        return f"has more than {MOST_CHARACTERS}"
    if b"\n" in token or b"\r" in token:
        return "has several lines"
    position = next((at for at, byte in enumerate(token) if not 0x21 <= byte <= 0x7E), None)
    if position is None:
        return ""
    kind = "one that is not ASCII" if token[position] > 0x7E else "a space or control character"
    return f"has {kind} at position {position + 1}"
