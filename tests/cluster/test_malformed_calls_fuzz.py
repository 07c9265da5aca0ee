"""Mutated calls to all services under AddressSanitizer: no bad read, no error that callers do not know."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_programs import run_forked
from support_paths import support_path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
SEEDS, CASES = 8, 12_500


def _library(name):
    """A library of the compiler's, if there is one."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    told = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    found = told.stdout.strip()
    return found if os.path.isabs(found) and Path(found).exists() else None


@pytest.fixture(scope="module")
def asan():
    """The extension module with AddressSanitizer, and the environment of a process that may load it."""
    libraries = _library("libasan.so"), _library("libstdc++.so")
    tools = Path(sys.executable).parent
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    cmake = shutil.which("cmake", path=path)
    if None in libraries or cmake is None:
        pytest.skip("needs cmake and a compiler with AddressSanitizer (libasan.so)")
    options = ["-DKARVAN_SANITIZE=address", "-DCMAKE_BUILD_TYPE=Release"]
    options.append(f"-DPython_EXECUTABLE={sys.executable}")
    environment = {**os.environ, "PATH": path}
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(BUILD), *options],
        [cmake, "--build", str(BUILD), "--target", "_native", "--parallel"],
    ):
        made = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    (module,) = BUILD.glob("_native*.so")
    # Allocations that are too large fail as elsewhere; Arrow's memory is malloc's, which ASan watches.
    return str(module), {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "OMP_NUM_THREADS": "1",
        "KARVAN_THREADS": "2",
    }


def _fuzz(module, environment, seed, cases, folder):
    program = support_path("cluster/call_fuzzer.py")
    command = [sys.executable, str(program), module, str(seed), str(cases), str(folder)]
    if not module:  # that of the package, which forks have
        return run_forked(command, timeout=120, env=environment)
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_few_mutated_calls_are_refused_or_answered(tmp_path):
    ended = _fuzz("", dict(os.environ), 0, 300, tmp_path)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-6000:]
    assert "300 cases" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_mutated_calls_read_nothing_beyond_their_arrays(asan, seed, tmp_path):
    module, environment = asan
    ended = _fuzz(module, environment, seed, CASES, tmp_path)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-6000:]
    print(ended.stdout)


@pytest.mark.slow
def test_without_the_check_of_a_dtype_the_bad_read_is_found(asan, tmp_path):
    module, environment = asan
    ended = _fuzz(module, {**environment, "KARVAN_FUZZ_UNCHECKED": "1"}, 1, 2000, tmp_path)
    assert ended.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in ended.stderr
