"""The examples run and learn what they say they learn."""

import re
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram

EXAMPLES = Path(__file__).parent.parent / "examples"

ADULT = EXAMPLES.parent.parent / "shared" / "data" / "adult"

# Arguments, and the AUC the example must end with; where it is below 0, it is relative to the best reachable.
GATES = {
    "planted.py": (["--users", "200", "--items", "100", "--steps", "300", "--every", "100"], -0.03),
    "quickstart.py": ([], -0.04),
    "criteo.py": ([], 0.78),
    "adult.py": (["--epochs", "2"], 0.91),
    "sequences.py": ([], -0.02),
}


def _run(name, *arguments):
    """Run an example; returns its exit code, output and errors."""
    example = ForkedProgram([sys.executable, EXAMPLES / name, *arguments], stdout=PIPE, stderr=PIPE)
    output, errors = example.communicate(timeout=300)
    return example.returncode, output, errors


def _output(name, *arguments):
    code, output, errors = _run(name, *arguments)
    assert code == 0, errors
    return output


def test_every_example_has_a_gate():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(GATES)


def _reached(name, *arguments):
    """The AUC in the example's last line, and the best reachable one if it is said."""
    if name == "adult.py" and not ADULT.exists():
        pytest.skip("the data is not there")
    last = _output(name, *arguments).splitlines()[-1]
    reached, best = re.match(r"AUC (\S+)(?: of (\S+) reachable)?", last).groups()
    return float(reached), float(best) if best else 0.0


SLOW = ("planted.py", "criteo.py")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in GATES]
)
def test_the_example_reaches_its_auc(name):
    arguments, gate = GATES[name]
    reached, best = _reached(name, *arguments)
    assert max(reached, best) > 0.7  # there is something to learn
    assert reached > gate + (best if gate < 0 else 0)


def test_adult_reaches_the_auc_of_persia_in_its_setting():
    assert _reached("adult.py", "--persia")[0] > 0.89


@pytest.mark.parametrize(
    ("name", "said"), [("adult.py", "There is no adult.data in"), ("criteo.py", "There is no such file")]
)
def test_a_missing_file_is_an_error_without_a_traceback(tmp_path, name, said):
    code, _, errors = _run(name, tmp_path)
    assert code != 0
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", sorted(GATES.keys() - {"quickstart.py"}))
def test_help_shows_how_to_call_the_example(name):
    assert f"python examples/{name}" in _output(name, "--help")
