"""docs/security.md names a test for each of its promises: all of them exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/security.md").read_text())
    assert len(named) > 10
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []


def test_every_row_of_its_ports_and_files_names_a_test():
    page = (ROOT / "docs/security.md").read_text()
    parts = [part for part in re.split(r"^## ", page, flags=re.M) if part.startswith(("Ports", "Files"))]
    rows = [line for part in parts for line in part.splitlines() if line.startswith("|")]
    rows = [line for line in rows if not re.match(r"\|-|\| (Port|File|Attack) \|", line)]
    assert len(parts) == 2
    assert len(rows) > 8
    assert [line for line in rows if not re.search(r"`tests/[\w/]+\.py", line.split("|")[-2])] == []


def test_its_tables_have_no_gaps():
    lines = (ROOT / "docs/security.md").read_text().splitlines()
    starts = [
        place
        for place, line in enumerate(lines)
        if line.startswith("|") and not lines[place - 1].startswith("|")
    ]
    assert starts
    assert [lines[place] for place in starts if not lines[place + 1].startswith("|-")] == []


def test_nothing_of_it_is_left_to_write():
    assert "<!--" not in (ROOT / "docs/security.md").read_text()
