"""The notebooks run from top to bottom, and are stored without outputs."""

import json
import os
import re
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram
from support_paths import support_path

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"

# The AUC that the last evaluation must reach, and a line that the ranked list at the end has.
GATES = {
    "first_steps.ipynb": (0.92, r"^9 +\w+ \w+ \(\d{4}\) .*0\.\d+$"),
    "from_a_csv_to_a_ranked_list.ipynb": (0.8, r"^\d+ +c-00000 +5 +SKU-\d+ .*0\.\d+$"),
}

GENRES = ["Action", "Comedy", "Crime", "Drama", "Horror", "Romance", "Sci-Fi", "Thriller"]
CATEGORIES = ["books", "games", "garden", "kitchen", "music", "sports"]


def test_every_notebook_has_a_gate():
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == set(GATES)


@pytest.mark.parametrize("name", GATES)
def test_the_notebook_has_no_outputs_and_some_words_between_its_cells(name):
    notebook = json.loads((NOTEBOOKS / name).read_text())
    assert notebook["nbformat"] == 4
    cells = notebook["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            assert all(len(line.rstrip("\n")) <= 80 for line in cell["source"])
            assert "assert" not in "".join(cell["source"])
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", "".join("".join(cell["source"]) for cell in cells)):
        assert (NOTEBOOKS / link).exists()


def recommended(output):
    """What the last list agrees with, and in each of its lines: genres of movies, categories of products."""
    agrees = re.findall(r"^(?:likes|favourite category): (.+)$", output, re.MULTILINE)[-1].split(", ")
    lines = re.findall(r"^\d+ +(.+) 0\.\d+$", output, re.MULTILINE)[-10 if "likes" in output else -5 :]
    words = GENRES if "likes" in output else CATEGORIES
    return agrees, [[word for word in words if word in line] for line in lines]


@pytest.mark.parametrize("name", GATES)
def test_the_notebook_runs_and_ends_with_a_ranked_list_that_agrees_with_its_words(name, tmp_path):
    program = ForkedProgram(
        [sys.executable, support_path("common/run_notebook.py"), NOTEBOOKS / name],
        stdout=PIPE,
        stderr=PIPE,
        cwd=tmp_path,
        # Nets this small gain nothing by a second thread, and other tests run beside this one.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "COLUMNS": "200"},
    )
    output, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors
    auc, last = GATES[name]
    reached = re.findall(r"evaluation={.*'auc': ([\d.]+)", output)
    assert float(reached[-1]) > auc
    assert "plot.html: 1 run, " in output
    assert re.search(last, output.splitlines()[-1]), output
    agrees, lines = recommended(output)
    assert all(set(words) & set(agrees) for words in lines[:4]), output
    words = [word for line in lines for word in line]
    assert sum(word in agrees for word in words) >= 0.8 * len(words), output
