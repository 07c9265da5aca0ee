"""Check the built site and the pages beside it: check_site.py SITE.

- Each link within the project has a target, and its anchor exists. Links to other hosts are not followed.
- Each picture exists and says what it shows (alt).
- Each word is English, or one of docs/words.txt. Code, names such as DeepFM and the reference do not count.

Pages beside the site are the Markdown files of the project's folder and the text of the notebooks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import markdown
from spellchecker import SpellChecker

ROOT = Path(__file__).parent.parent
# A word stands alone: no part of a path, an option, an address or a name with digits or underscores.
WORD = re.compile(r"(?<![\w./:@#$%=~-])([A-Z]?[a-z]{2,}(?:'[a-z]+)?)(?![\w/=@]|[.:][\w/])")


class Page(HTMLParser):
    """The anchors, links, pictures and words of a page."""

    def __init__(self, html: str, part: str | None) -> None:
        """Read html; part is the tag whose links, pictures and words count, None for all."""
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.unnamed: list[str] = []
        self.words: list[str] = []
        self._part = part
        self._inside = [] if part else ["all"]
        self._skipped: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag has."""
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == self._part:
            self._inside.append(tag)
        if tag in ("code", "pre", "style", "script"):
            self._skipped.append(tag)
        if not self._inside:
            return
        self.links += [value for name in ("href", "src") if (value := given.get(name))]
        if tag == "img" and not (given.get("alt") or "").strip():
            self.unnamed.append(str(given.get("src")))

    def handle_endtag(self, tag: str) -> None:
        """Leave the tag."""
        for stack in (self._inside, self._skipped):
            if stack and stack[-1] == tag:
                stack.pop()

    def handle_data(self, data: str) -> None:
        """Collect the words of text that is no code."""
        if self._inside and not self._skipped:
            self.words += WORD.findall(data)


@cache
def page_of(path: Path) -> Page:
    """Read a page of the site, or one beside it."""
    if path.suffix == ".html":
        return Page(path.read_text(), "article")
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join(source if isinstance(source, str) else "".join(source) for source in cells)
    extensions = ["attr_list", "fenced_code", "md_in_html", "tables", "toc"]
    return Page(markdown.markdown(text, extensions=extensions), None)


def target_of(link: str, path: Path, site: Path) -> tuple[Path, str] | None:
    """The file and the anchor that a link of the page means; None for another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    docs = ROOT / "docs"
    if file.suffix == ".md" and file.is_relative_to(docs):
        file = (site / file.relative_to(docs)).with_suffix(".html")
    return file, unquote(parts.fragment)


def broken(path: Path, site: Path) -> Iterator[str]:
    """What is wrong with the links and pictures of a page."""
    page = page_of(path)
    for link in page.links:
        if (target := target_of(link, path, site)) is None:
            continue
        file, anchor = target
        if not file.exists():
            yield f"the link {link} leads nowhere"
        elif anchor and file.suffix in (".html", ".md") and anchor not in page_of(file).anchors:
            yield f"the page of the link {link} has no such anchor"
    for picture in page.unnamed:
        yield f"the picture {picture} has no text that says what it shows"


def misspelled(path: Path, dictionary: SpellChecker, names: set[str]) -> Iterator[str]:
    """The words of a page that are in no dictionary."""
    words = {word: word.removesuffix("'s") for word in page_of(path).words}
    for word, stem in sorted(words.items()):
        if names.isdisjoint({stem, stem.lower()}) and stem.lower() not in dictionary:
            yield f"'{word}' is misspelled, or a word for docs/words.txt"


def main(site: Path) -> int:
    """Check everything; returns the exit code."""
    dictionary = SpellChecker(language="en", distance=1)
    names = {*(ROOT / "docs" / "words.txt").read_text().split()}
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    beside = [*ROOT.glob("*.md"), *(ROOT / "examples" / "notebooks").glob("*.ipynb")]
    problems = []
    for path in [*beside, *pages]:
        name = path.relative_to(site if path.is_relative_to(site) else ROOT)
        found = list(broken(path, site))
        if name.parts[0] != "reference":
            found += misspelled(path, dictionary, names)
        problems += [f"{name}: {problem}" for problem in found]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
