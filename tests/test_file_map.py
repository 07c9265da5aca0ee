"""tools/file_map.py writes what the files say about themselves, and notices when it is out of date."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    "karvan/__init__.py": '"""The package."""',
    "karvan/low.py": '"""The lowest module, e.g. `x`. Everything else imports it."""',
    "karvan/high/__init__.py": '"""A folder of modules."""',
    "karvan/high/first.py": '"""The first | module.\n\nMore about it.\n"""',
    "karvan/high/inner/__init__.py": '"""A folder in a folder."""',
    "karvan/high/inner/second.py": '"""A line that\nis continued."""',
    "csrc/table/table.h": "// Keys to rows, in\n// shards. Each has a lock.\n#pragma once\n",
    "csrc/table/table.cpp": '#include "table.h"\n',
    "docs/architecture.md": (
        "Before.\n\n<!-- file map: written by tools/file_map.py -->\n<!-- end of the file map -->\n\nAfter.\n"
    ),
    "tools/layers.toml": 'layers = [["low"], ["__init__"], ["high"]]\n',
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(ROOT / "tools" / "file_map.py", tmp_path / "tools")
    return tmp_path


def _run(tree, *arguments):
    command = [sys.executable, tree / "tools" / "file_map.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_map_has_the_first_sentence_of_each_file_and_leaves_the_rest_of_the_page(tree):
    assert _run(tree).returncode == 0
    page = (tree / "docs" / "architecture.md").read_text()
    assert page.startswith("Before.\n")
    assert page.endswith("\nAfter.\n")
    for row in (
        "| `low.py` | The lowest module, e.g. `x` |",
        "| `first.py` | The first \\| module |",
        "| **`inner/`** | A folder in a folder |",
        "| `inner/second.py` | A line that is continued |",
        "| `table.h` | Keys to rows, in shards |",
    ):
        assert row in page.splitlines()
    assert page.index("### `karvan/high`") < page.index("`low.py`")
    assert "table.cpp" not in page


def test_a_map_that_is_out_of_date_is_noticed(tree):
    assert _run(tree, "--check").returncode == 1
    assert _run(tree).returncode == 0
    assert _run(tree, "--check").returncode == 0
    (tree / "karvan" / "low.py").write_text('"""Another sentence."""')
    done = _run(tree, "--check")
    assert done.returncode == 1
    assert "make map" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("karvan/high/silent.py", "x = 1\n", "karvan/high/silent.py has no first line"),
        ("karvan/new.py", '"""A module."""', "karvan/new is not in tools/layers.toml"),
        (
            "tools/layers.toml",
            'layers = [["low", "gone"], ["__init__"], ["high"]]',
            "karvan/gone is in tools/layers.toml",
        ),
    ],
)
def test_what_is_missing_is_named(tree, name, text, said):
    (tree / name).write_text(text)
    done = _run(tree)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_page_without_the_markers_is_an_error(tree):
    (tree / "docs" / "architecture.md").write_text("Nothing.\n")
    done = _run(tree)
    assert done.returncode == 1
    assert "docs/architecture.md needs the lines" in done.stderr
