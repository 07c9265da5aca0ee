"""Kernels as their compiler sees them: it refuses much that the interpreter runs. It needs no GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_programs import run_forked

COMPILE = Path(__file__).parent.parent / "support" / "features" / "compile_kernels.py"


def _assembler():
    """Triton's copy of NVIDIA's assembler, which not every system has."""
    found = importlib.util.find_spec("triton")
    return found and Path(found.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"


needs_assembler = pytest.mark.skipif(
    not (_assembler() and _assembler().exists()), reason="triton has no assembler for NVIDIA's GPUs here"
)


def compiled(folder, *names):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, str(COMPILE), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(line.split() for line in done.stdout.splitlines())


@needs_assembler
def test_a_kernel_with_loops_and_one_with_assertions_compile_for_hopper(tmp_path):
    made = compiled(tmp_path, "murmur_kernel", "offsets_kernel")
    assert made == {"murmur_kernel": "4", "offsets_kernel": "4"}


@needs_assembler
@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path):
    assert set(compiled(tmp_path)) == {
        "cross_kernel",
        "dense_kernel",
        "each_remainder_kernel",
        "equal_kernel",
        "farm_kernel",
        "hash_stack_kernel",
        "murmur_kernel",
        "offsets_kernel",
        "pairs_backward_kernel",
        "pairs_kernel",
        "remainder_kernel",
        "slice_kernel",
    }


def test_a_missing_triton_is_an_error_that_says_what_to_do():
    script = (
        "import sys; sys.modules['triton'] = None; import torch; from karvan import ids, kernels; "
        "kernels.on_gpu = lambda tensor: True; ids.mod(torch.zeros(1, dtype=torch.int64), 3)"
    )
    done = run_forked([sys.executable, "-c", script])
    assert (
        "ImportError: Columns on a GPU are computed by kernels that need triton 3.6 or newer" in done.stderr
    )
    assert 'pip install "triton>=3.6"' in done.stderr
