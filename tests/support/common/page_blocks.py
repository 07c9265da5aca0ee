"""The code blocks of a page of the documentation."""

import doctest
import re
from typing import NamedTuple

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\s`]*) *(?P<rest>.*)$")


class Block(NamedTuple):
    """A code block: the line on which its code starts, its language, what follows the language, its code."""

    line: int
    language: str
    rest: str
    code: str


def blocks(text):
    """The code blocks of a page."""
    found, opened, lines = [], None, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            opened, lines = (fence, []) if fence else (None, lines)
        elif fence and not fence["language"]:
            start = number - len(lines)
            found.append(Block(start, opened["language"], opened["rest"], "".join(f"{x}\n" for x in lines)))
            opened = None
        else:
            lines.append(line.removeprefix(opened["indent"]))
    assert opened is None, "a code block has no end"
    return found


def visible(text):
    """The blocks that a reader sees: those outside HTML comments."""
    return blocks(re.sub(r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL))


def same_output(page, printed):
    """Whether a program printed what its page shows, where ... stands for anything; spaces do not matter."""
    how = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(page.strip() + "\n", printed.strip() + "\n", how)
