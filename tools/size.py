"""Prints how large each room of the package is, beside its budget: lines of code, and files.

Blank lines, comments and docstrings are not code. The rooms and their budgets are in layers.toml.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parent.parent
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    """The size of a room: lines of code, all lines, and files."""

    code: int = 0
    lines: int = 0
    files: int = 0


def rooms() -> Mapping[str, Mapping[str, object]]:
    """Room → its parts, and its budget of code and files."""
    table: Mapping[str, Mapping[str, object]] = tomllib.loads((_ROOT / "tools" / "layers.toml").read_text())["rooms"]
    return table


def sizes(package: Path = _ROOT / "karvan") -> dict[str, Size]:
    """The size of each room; a module that no room names belongs to the room `base`."""
    room_of = {part: room for room, content in rooms().items() for part in content["parts"]}  # type: ignore[attr-defined]
    total = dict.fromkeys(rooms(), Size())
    for path in package.rglob("*.py"):
        room = room_of.get(path.relative_to(package).with_suffix("").parts[0], "base")
        code, lines = _count(path.read_text())
        before = total[room]
        total[room] = Size(before.code + code, before.lines + lines, before.files + 1)
    return total


def _count(text: str) -> tuple[int, int]:
    """The lines of code, and all lines, of a module."""
    tree = ast.parse(text)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code), text.count("\n")


def main() -> int:
    """Print the table; 1 if a room is above its budget."""
    total, above = Size(), 0
    print(f"{'room':12} {'code':>7} {'budget':>7} {'files':>6} {'budget':>7} {'lines':>8}")
    for room, size in sizes().items():
        budget = rooms()[room]
        over = size.code > budget["code"] or size.files > budget["files"]  # type: ignore[operator]
        above += over
        row = f"{room:12} {size.code:7,} {budget['code']:7,} {size.files:6} {budget['files']:7} {size.lines:8,}"
        print(row + ("  above its budget" if over else ""))
        total = Size(*(a + b for a, b in zip(total, size, strict=True)))
    code, files = (sum(int(str(each[what])) for each in rooms().values()) for what in ("code", "files"))
    print(f"{'sum':12} {total.code:7,} {code:7,} {total.files:6} {files:7} {total.lines:8,}")
    return min(above, 1)


if __name__ == "__main__":
    sys.exit(main())
