"""Every Python block of the documentation runs, in the order of its page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text):
    """(line, code) of each block; the line is where the code starts in the page."""
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in _BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES)
def test_the_python_blocks_of_the_page_run(page):
    names = {"__name__": "__main__"}
    for line, code in python_blocks((ROOT / page).read_text()):
        # Errors then point to the line in the page.
        exec(compile("\n" * line + code, page, "exec"), names)


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_page_has_python_blocks(page):
    assert python_blocks((ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_the_files_a_page_links_to_exist(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
