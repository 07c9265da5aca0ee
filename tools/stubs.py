"""Writes karvan/_native.pyi, the types of the native module, from the built extension: `make stubs`.

nanobind generates it; tools/native.pat gives tuples and dicts their element types, which C++ does not tell.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "karvan" / "_native.pyi"
# Shapes and devices, which no type checker reads and which bury the signature.
_ANNOTATED = re.compile(r"Annotated\[(NDArray\[[\w.]+\]), dict\([^\[\]]*?\)\]")
_UNUSED = "from typing import Annotated\n"


def generate() -> str:
    """The stub of the extension this interpreter imports."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "_native.pyi"
        patterns = ROOT / "tools" / "native.pat"
        _run("nanobind.stubgen", "-q", "-m", "karvan._native", "-p", str(patterns), "-o", str(made))
        made.write_text(_ANNOTATED.sub(r"\1", made.read_text()).replace(_UNUSED, ""))
        _run("ruff", "format", "--quiet", "--no-cache", "--config", str(ROOT / "pyproject.toml"), str(made))
        return made.read_text()


def _run(*module: str) -> None:
    subprocess.run([sys.executable, "-m", *module], check=True, cwd=ROOT)


def main() -> int:
    """Write the stub, or compare it with the one that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the stub is out of date")
    arguments = parser.parse_args()
    text = generate()
    if not arguments.check:
        STUB.write_text(text)
        return 0
    if STUB.exists() and STUB.read_text() == text:
        return 0
    print("karvan/_native.pyi differs from the extension: run `make stubs`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
