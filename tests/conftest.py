"""What all tests share: hypothesis profiles, the environment of the programs that tests start, fixtures."""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import types
from contextlib import suppress
from pathlib import Path

import pytest

gc.disable()  # imports and tests are objects that stay; see pytest_runtestloop

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run side by side: torch's threads, also those of programs that tests start, would be in each
    # other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells have their background jobs ignore these signals. Programs that tests start would inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

import torch  # noqa: E402 - after that, as it reads the variable

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, on CPU tensors. Triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with suppress(ImportError):  # triton is not there on every machine
        import quick_interpreter  # noqa: F401

# Tests of stores are there; pytest explains the failures only of modules that it knows.
_SUITES = ("capture", "device", "policy", "rows", "tier", "training")
pytest.register_assert_rewrite(*(f"{suite}_conformance" for suite in _SUITES))

_tests = 0
_SUPPORT = Path(__file__).parent / "support"

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # on a machine for tests/gpu, which do without it
    settings = None
else:
    _COMMON = {
        "deadline": None,
        "suppress_health_check": [
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    }
    settings.register_profile(
        "ci", max_examples=12, stateful_step_count=12, derandomize=True, database=None, **_COMMON
    )
    settings.register_profile(
        "thorough", max_examples=300, stateful_step_count=40, print_blob=True, **_COMMON
    )


def pytest_addoption(parser):
    parser.addoption("--forks", type=int, help="run tests in this number of processes; see forked_workers")
    parser.addoption("--thorough", action="store_true", help="many more hypothesis examples, at random")
    parser.addoption("--write-digests", action="store_true", help="pin anew what tests/test_digests.py sees")


def pytest_configure(config):
    # Programs that tests start import from the same folders as tests do.
    support = [str(path) for path in config.getini("pythonpath") if path.is_relative_to(_SUPPORT)]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*support, *filter(None, given)]))
    # Also where a loader is the first to fork: all forks of a process come from one server.
    multiprocessing.set_forkserver_preload(["fork_imports"])
    forks = config.getoption("--forks")
    if forks and not torch.cuda.is_available():  # a GPU that was asked for works in no fork
        from forked_workers import ForkedWorkers

        config.pluginmanager.register(ForkedWorkers(config, forks))
    if settings is not None:
        settings.load_profile("thorough" if config.getoption("--thorough") else "ci")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj):
    """No module is a test: pytest need not ask each one for attributes, of which karvan suggests others."""
    return [] if isinstance(obj, types.ModuleType) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Collect what tests leave, without looking through what was there before them each time.

    Not before the process ends, when extensions tell of what is left.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """Tests that draw from torch's own generator get the same numbers in every run and order."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # for devices that are not there it would keep where each of these calls came from
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_jobs(monkeypatch, tmp_path_factory):
    """Jobs that a test launches are in a folder of its own: many tests have jobs of the same name."""
    global _tests
    _tests += 1
    monkeypatch.setenv("KARVAN_JOBS", str(tmp_path_factory.getbasetemp() / f"jobs-{_tests}"))


@pytest.fixture(autouse=True)
def _train_after_a_test_with_sigterm():
    """A SIGTERM ends the training of a process, but the next test is like a program of its own."""
    yield
    if "karvan.train.stopping" in sys.modules:
        sys.modules["karvan.train.stopping"].reset_termination()


@pytest.fixture(autouse=True)
def _same_threads_afterwards():
    """Tests may set karvan's thread count; those that run without the native part have none to restore."""
    karvan = sys.modules.get("karvan")
    built = hasattr(karvan, "get_num_threads") and sys.modules["karvan.native"].is_built()
    before = karvan.get_num_threads() if built else None
    yield
    if before is not None:
        karvan.set_num_threads(before)
