"""The machine's random-row limit: how many rows per second memory can serve, whatever the program."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import Report, cores, interleave, medians, parser, thread_counts

ROWS_PER_PASS = 1 << 20  # of each thread


class Probe:
    """A large array whose rows are visited in random order; closes with `with`."""

    def __init__(self, quick: bool) -> None:
        self.bytes = (1 if quick else 4) << 30
        self._library = _compile()
        self._handle = self._library.probe_open(self.bytes, ROWS_PER_PASS, cores())
        if not self._handle:
            raise MemoryError(f"The random-row probe needs {self.bytes >> 30} GiB of memory, but got none.")

    def update(self, threads: int) -> Callable[[], None]:
        """Return a step that adds to random rows of 128 bytes, `ROWS_PER_PASS` on each thread."""
        return lambda: self._library.probe_pass(self._handle, threads, 1)

    def read(self, threads: int) -> Callable[[], None]:
        """Return a step that reads 64 bytes of random rows, `ROWS_PER_PASS` on each thread."""
        return lambda: self._library.probe_pass(self._handle, threads, 0)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.probe_close(self._handle)


def _compile() -> ctypes.CDLL:
    source = Path(__file__).with_name("limits.cpp")
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "limits.so"
        flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    library.probe_open.restype = ctypes.c_void_p
    library.probe_open.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.probe_pass.restype = ctypes.c_double
    library.probe_pass.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    library.probe_close.restype = None
    library.probe_close.argtypes = [ctypes.c_void_p]
    return library


def main() -> None:
    """Measure updates and reads on one thread and on all."""
    args = parser(__doc__ or "").parse_args()
    report = Report("limits", args.quick)
    with Probe(args.quick) as probe:
        candidates = {}
        for threads in thread_counts():
            candidates[f"update128_{threads}t"] = probe.update(threads)
            candidates[f"read64_{threads}t"] = probe.read(threads)
        for name, seconds in medians(interleave(candidates, rounds=5)).items():
            threads = int(name.rsplit("_", 1)[1][:-1])
            report.figures[f"{name}_rows_per_s"] = threads * ROWS_PER_PASS / seconds
    report.finish()
    if args.json != "-":
        report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
