"""Decodes ORC stripes in a child process, so that a crash of the ORC library is only an error.

The library trusts the lengths of strings, lists and maps that a stripe holds: damaged ones make it request
huge amounts of memory and write outside of its buffers. So such columns are decoded by a small program
(`decode_process.py`), with bounds on its memory and time:

```
 this process                                                       the child
 the stripe, and the file's tail, at same offsets ──► file in memory ──► ORC library
 RecordBatch ◄── copy ◄────────────────────────────── file in memory ◄── Arrow IPC
```

The child reads nothing else, so the file may be on any file system. There are as many children as threads
that decode at the same time, and they are reused for the next stripe. They end when this process does,
however it ends, since their input ends with it, and after half a minute without work. A child that has ended
by itself is replaced; if one crashes while decoding a stripe, an `OSError` states the cause.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from karvan.data.errors import DataError
from karvan.data.formats.decoded_size import most_decoded, too_large
from karvan.data.formats.orc.stripes import Stripe

_PROGRAM = Path(__file__).with_name("decode_process.py")
_MAGIC = 3  # bytes at the beginning, which identify old versions
_MEMORY, _COPIES = 512 << 20, 4  # of the program, and of what it decodes, which grows by doubling
_SECONDS, _BYTES_PER_SECOND = 60, 1 << 20
_IDLE_SECONDS = 30


def decode_in_child(
    file: pa.NativeFile, number: int, stripe: Stripe, columns: Sequence[str]
) -> pa.RecordBatch:
    """Columns of a stripe of the open `file`, decoded in a child process."""
    most = most_decoded(stripe.size)
    request = {
        "stripe": number,
        "columns": list(columns),
        "bytes": _MEMORY + _COPIES * most,
        "most": most,
        "seconds": _SECONDS + stripe.size // _BYTES_PER_SECOND,
    }
    answer = None
    while answer is None:
        try:
            child = _idle.pop()
        except IndexError:
            child = _Child()
        try:
            answer = child.ask(file, stripe, request)
        except BaseException:
            child.close()
            raise
    _idle.append(child)
    if isinstance(answer, str):
        raise OSError(answer)
    # The offsets come from a process whose memory may have been corrupted.
    answer.validate(full=True)
    return answer


class _Child:
    """A running decoder, and the two files that are shared with it."""

    def __init__(self) -> None:
        self._file, self._result = (
            FileIO(os.memfd_create(name), "r+") for name in ("orc-file", "orc-result")
        )
        shared = [self._file.fileno(), self._result.fileno()]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), *map(str, [*shared, _IDLE_SECONDS])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=shared,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ask(
        self, file: pa.NativeFile, stripe: Stripe, request: dict[str, Any]
    ) -> pa.RecordBatch | str | None:
        """The decoded stripe, or the library's error, or None if the child had ended before."""
        size = file.size()
        self._file.truncate(size)
        for begin, end in [(0, _MAGIC), (stripe.begin, stripe.end), (stripe.tail, size)]:
            _write(self._file, file.read_at(end - begin, begin), begin)
        answer = self._exchange(request)
        self._file.truncate(0)
        if answer is None:
            self.close()
            return None
        if answer.get("too large"):
            raise DataError(too_large(stripe.size, answer["too large"]))
        if "error" in answer:
            return str(answer["error"])
        batch = _read(self._result, answer["size"])
        self._result.truncate(0)
        return batch

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.wait()
        if status == 0:
            return None
        if status > 0:
            raise OSError(f"The process that decodes ORC has ended with status {status}.")
        cause, columns = signal.Signals(-status).name, ", ".join(request["columns"])
        raise OSError(
            f"Decoding {columns} crashes the ORC library ({cause}): the file is damaged or too large."
        )

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process:
            pass
        self._file.close()
        self._result.close()


def _write(file: FileIO, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file.fileno(), view, at)
        view, at = view[written:], at + written


def _read(file: FileIO, size: int) -> pa.RecordBatch:
    buffer = pa.allocate_buffer(size)
    view = memoryview(buffer)
    at = 0
    while at < size:
        at += os.preadv(file.fileno(), [view[at:]], at)
    return ipc.open_stream(buffer).read_next_batch()


# Lists are safe to push to and pop from on any thread.
_idle: list[_Child] = []


@atexit.register
def _close_all() -> None:
    while _idle:
        _idle.pop().close()


# After a fork, the children still belong to the process that started them.
os.register_at_fork(after_in_child=_idle.clear)
