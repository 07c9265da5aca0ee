"""The committed types of the native module are those of the module."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _pinned(package):
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if name == package:
            return version
    raise LookupError(package)


def test_the_committed_stub_is_what_the_extension_generates():
    for package in ("nanobind", "ruff"):  # another version may write the same types another way
        if metadata.version(package) != _pinned(package):
            pytest.skip(f"the stub is generated with {package} {_pinned(package)}")
    done = subprocess.run(
        [sys.executable, "tools/stubs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
