"""The program that decodes ORC stripes in a child process; see `orc.py`.

It is run as a script and does not import karvan, so it starts without torch. Requests arrive as lines of JSON
on standard input, and each is answered by a line on standard output:

    {"stripe": 2, "columns": ["history"], "bytes": 1610612736, "most": 268435456, "seconds": 60}
    {"size": 81920}   or   {"too large": "has 300,000,000 bytes"}
    or   {"error": "bad read in RleDecoderV2::readByte"}

Its arguments are the descriptors of two anonymous files in memory, one with the ORC file and one for the
decoded stripe as an Arrow IPC stream, and how many seconds it waits for the next request. It ends when its
input ends or no request arrives, and a damaged stripe may crash it at any moment: that is why it is a
separate process.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import ipc, orc


def _decode(request: dict[str, Any], source: int, result: int) -> int:
    """Decode a stripe into the file `result`, and return the size of the result in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    _limit(resource.RLIMIT_CPU, spent + request["seconds"])
    _limit(resource.RLIMIT_DATA, request["bytes"])
    with pa.memory_map(f"/proc/self/fd/{source}") as file:
        batch = orc.ORCFile(file).read_stripe(request["stripe"], request["columns"])
        if batch.get_total_buffer_size() > request["most"]:
            raise MemoryError(f"has {batch.get_total_buffer_size():,} bytes")
        os.lseek(result, 0, os.SEEK_SET)
        with (
            open(result, "wb", buffering=0, closefd=False) as out,
            ipc.new_stream(out, batch.schema) as writer,
        ):
            writer.write_batch(batch)
    return os.lseek(result, 0, os.SEEK_CUR)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _main(source: int, result: int, idle: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory runs out, this process is killed first
    while select.select([sys.stdin], [], [], idle)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        answer: dict[str, Any]
        try:
            answer = {"size": _decode(json.loads(line), source, result)}
        except MemoryError as error:  # pyarrow's, too
            answer = {
                "too large": str(error) if str(error).startswith("has ") else "needs more memory to decode"
            }
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
