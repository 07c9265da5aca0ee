"""Decides whether files cannot be read because of an outage or because they are damaged.

Errors of a local disk and of connections have numbers or classes that say so. Clients of object stores raise
a plain OSError with a text, as decoders do for damaged bytes: a few texts are known, and for the others one
byte of the file is read. If that fails, the place is away; otherwise the error is *doubtful*, and what comes
back twice more is taken as damage.

A local file that is not there any more is missing, unless the file system that it was on has been unmounted:
the nearest folder that is there is then on another device than the file's folder was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa

from karvan.data.errors import DataError
from karvan.data.formats.paths import Files
from karvan.outages import is_temporary

# Of the clients of S3, Google Cloud Storage and HDFS.
_AWAY = re.compile(
    r"NETWORK_CONNECTION|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT|THROTTLING|curlCode"
    r"|UNAVAILABLE|DEADLINE_EXCEEDED|[Tt]imed? ?out|[Cc]onnection (refused|reset|closed|aborted)"
    r"|[Cc]ouldn.t connect|[Cc]ould not connect"
)
_IN_PYTHON = "Detail: Python exception"  # how Arrow tells of an error that a file system of fsspec has raised
# Their errors are of classes of their own.
_CLIENTS = ("aiohttp", "azure", "botocore", "google", "paramiko", "requests", "urllib3")


def is_away(error: BaseException) -> bool:
    """Whether an error alone says that its place is away."""
    if is_temporary(error):
        return True
    return any(_says_away(each) for each in _causes(error))


class FilePlace:
    """Where files are."""

    def __init__(self, files: Files) -> None:
        self._filesystem = files.filesystem
        self._local = files.filesystem.type_name == "local"
        self._devices: dict[str, int] = {}
        if self._local:
            for folder in {os.path.dirname(os.path.abspath(path)) for path in files.paths}:
                with suppress(OSError):
                    self._devices[folder] = os.stat(folder).st_dev

    def is_away(self, error: BaseException, path: str) -> bool | None:
        """Whether an error of reading a file is an outage; None: perhaps."""
        if is_away(error):
            return True
        if self._local:
            return _is_missing(error) and self._is_unmounted(path)
        if any(_is_plain(each) or _is_of_client(each) for each in _causes(error)):
            return None if self._can_be_read(path) else True
        return False

    def _can_be_read(self, path: str) -> bool:
        try:
            with self._filesystem.open_input_file(path) as file:
                return bool(file.read(1))
        except FileNotFoundError:
            return True  # the file system answers; the next attempt says what is missing
        except Exception:
            return False

    def _is_unmounted(self, path: str) -> bool:
        folder = os.path.dirname(os.path.abspath(path))
        device = self._devices.get(folder)
        while device is not None:
            try:
                return os.stat(folder).st_dev != device
            except FileNotFoundError:
                folder = os.path.dirname(folder)
            except OSError as error:
                return is_temporary(error)
        return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def _says_away(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, OSError | pa.ArrowException) and _IN_PYTHON in text:
        return "FileNotFoundError" not in text
    return _is_plain(error) and _AWAY.search(text) is not None


def _is_plain(error: BaseException) -> bool:
    return type(error) is OSError and error.errno is None


def _is_of_client(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _CLIENTS


def _is_missing(error: BaseException) -> bool:
    known = (each for each in _causes(error) if isinstance(each, FileNotFoundError | DataError))
    return any(isinstance(each, FileNotFoundError) or "no such file" in str(each) for each in known)
