"""The pages about security name a test for each of their promises: all of them exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [(ROOT / "docs" / name).read_text() for name in ("security.md", "security_model.md")]


def test_every_test_that_the_pages_name_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", "".join(PAGES))
    assert len(named) > 10
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []


def test_every_row_of_ports_and_files_names_a_test():
    parts = [part for part in re.split(r"^## ", PAGES[1], flags=re.M) if part.startswith(("Ports", "Files"))]
    rows = [line for part in parts for line in part.splitlines() if line.startswith("|")]
    rows = [line for line in rows if not re.match(r"\|-|\| (Port|File|Attack) \|", line)]
    assert len(parts) == 2
    assert len(rows) > 8
    assert [line for line in rows if not re.search(r"`tests/[\w/]+\.py", line.split("|")[-2])] == []


@pytest.mark.parametrize("page", PAGES, ids=["security", "security_model"])
def test_its_tables_have_no_gaps(page):
    lines = page.splitlines()
    starts = [
        place
        for place, line in enumerate(lines)
        if line.startswith("|") and not lines[place - 1].startswith("|")
    ]
    assert starts
    assert [lines[place] for place in starts if not lines[place + 1].startswith("|-")] == []


def test_nothing_of_them_is_left_to_write():
    assert "<!--" not in "".join(PAGES)
