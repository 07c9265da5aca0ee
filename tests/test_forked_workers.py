"""`pytest --forks`: each test runs once in some process, also where others of its module end the process."""

import re
import sys
from pathlib import Path

from forked_programs import run_forked
from forked_workers import SLOWEST

CONFTEST = """
from forked_workers import ForkedWorkers

class Workers(ForkedWorkers):
    def pytest_sessionstart(self, session):
        "These tests need no fork server."

def pytest_configure(config):
    config.pluginmanager.register(Workers(config, 2))
"""

TESTS = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield tmp_path_factory.mktemp("{name}")
    print("the module has ended")

def test_it_passes_in_a_folder_of_its_own(folder):
    assert folder.parent.name == f"popen-{{os.environ['PYTEST_XDIST_WORKER']}}"

def test_it_fails_and_shows_what_it_has_printed():
    print("printed by {name}")
    assert [1, 2] == [1, 3]

def test_it_ends_its_process():
    os._exit(3)

def test_it_kills_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

def test_it_is_skipped():
    pytest.skip("for a reason")

def test_it_warns(folder):
    warnings.warn("with a warning")
"""


def test_every_test_is_run_once_and_reported_whatever_others_do(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(name=name))
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--basetemp=made", "."]
    ran = run_forked(command, cwd=tmp_path)
    assert ran.returncode == 1
    assert re.search(r"^9 failed, 6 passed, 3 skipped, 3 warnings in ", ran.stdout, re.MULTILINE), ran.stdout
    for name in ("one", "two", "three"):
        assert f"printed by {name}" in ran.stdout
        assert f"FAILED test_{name}.py::test_it_fails_and_shows_what_it_has_printed - " in ran.stdout
        for test, code in (("it_ends", 3), ("it_kills", -9)):
            lost = rf"FAILED test_{name}.py::test_{test}_its_process - gw\d ended with code {code} in"
            assert re.search(lost, ran.stdout), ran.stdout


def test_after_the_first_failure_a_run_may_end(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(
        "def test_fails():\n    assert False\n\ndef test_passes():\n    pass\n"
    )
    (tmp_path / "test_b.py").write_text("import time\n\ndef test_waits():\n    time.sleep(1000)\n")
    ran = run_forked([sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "."], cwd=tmp_path)
    assert ran.returncode == 1
    assert "stopping after 1 failures" in ran.stdout


def test_modules_that_take_longest_exist():
    root = Path(__file__).parent.parent
    assert [path for path in SLOWEST if not (root / path).is_file()] == []
