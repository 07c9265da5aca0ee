"""Compiles the tests, and pytest's plugins, as pytest does, with the values of asserts that fail.

Pytest keeps what it has compiled beside the tests, if Python may. Where it may not, or has not yet, each run
would compile all of them on one core, which takes as long as some hundred tests. Plugins are hypothesis and
xdist, which pytest treats like tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("test_*.py", "conftest.py", "*_conformance.py")  # the last are named in tests/conftest.py


def compile_test(path: Path) -> None:
    """Write what pytest would, if it is not there."""
    folder = rewrite.get_cache_dir(path)
    target = folder / (path.name[:-3] + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, target) is not None:
        return
    source_hash, code = rewrite._rewrite_test(path, None)  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    with open(partial := target.with_suffix(".partial"), "wb") as file:
        rewrite._write_pyc_fp(file, source_hash, code)
    partial.replace(target)


def plugins() -> Iterator[Path]:
    """The files of packages that bring a plugin of pytest."""
    for package in distributions():
        if any(point.group == "pytest11" for point in package.entry_points):
            yield from (
                Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".py"
            )


def main() -> int:
    """Compile all of them, in as many processes as there are cores."""
    tests = {path for pattern in PATTERNS for path in (ROOT / "tests").rglob(pattern)}
    paths = sorted(tests) + sorted(plugins())
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_test, paths, chunksize=8))
    return 0


if __name__ == "__main__":
    sys.exit(main())
