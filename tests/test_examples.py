"""The examples run and learn what they say they learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# Arguments, and how far below the best reachable AUC the example may end.
GATES = {
    "planted.py": (["--users", "200", "--items", "100", "--steps", "300", "--every", "100"], 0.03),
}


def _run(name, *arguments):
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_gate():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(GATES)


@pytest.mark.parametrize("name", GATES)
def test_the_example_reaches_its_auc(name):
    arguments, gap = GATES[name]
    last = _run(name, *arguments).splitlines()[-1]
    reached, best = map(float, re.match(r"AUC (\S+) of (\S+) reachable", last).groups())
    assert best > 0.7  # there is something to learn
    assert reached > best - gap


@pytest.mark.parametrize("name", GATES)
def test_help_shows_how_to_call_the_example(name):
    assert f"python examples/{name}" in _run(name, "--help")
