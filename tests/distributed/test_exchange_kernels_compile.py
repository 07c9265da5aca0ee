"""The kernels of exchanges between ranks as their compiler sees them, without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = Path(__file__).parent.parent / "support" / "distributed" / "compile_exchange_kernels.py"


def _assembler():
    """Triton's copy of NVIDIA's assembler, which not every system has."""
    found = importlib.util.find_spec("triton")
    return found and Path(found.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"


@pytest.mark.skipif(not (_assembler() and _assembler().exists()), reason="triton has no assembler here")
@pytest.mark.slow
def test_the_kernels_of_exchanges_compile_for_hopper(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, str(COMPILE)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 5
