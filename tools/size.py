"""Prints how large each room of the package is, beside its budget: lines of code, and files.

Blank lines, comments and docstrings are not code. The rooms and their budgets are in layers.toml.
"""

import ast
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parent.parent
ROOMS: dict[str, dict[str, Any]] = tomllib.loads((_ROOT / "tools" / "layers.toml").read_text())["rooms"]


class Size(NamedTuple):
    """The size of a room: lines of code, files, and all lines."""

    code: int
    files: int
    lines: int

    def plus(self, code: int, files: int, lines: int) -> "Size":
        """Both together."""
        return Size(self.code + code, self.files + files, self.lines + lines)


def sizes(parse: Callable[[str], ast.Module] = ast.parse) -> dict[str, Size]:
    """The size of each room; a module that no room names belongs to the room `base`."""
    package = _ROOT / "karvan"
    room_of = {part: room for room, content in ROOMS.items() for part in content["parts"]}
    made = dict.fromkeys(ROOMS, Size(0, 0, 0))
    for path in package.rglob("*.py"):
        room = room_of.get(path.relative_to(package).with_suffix("").parts[0], "base")
        text = path.read_text()
        made[room] = made[room].plus(_code(text, parse(text)), 1, text.count("\n"))
    return made


def _code(text: str, tree: ast.Module) -> int:
    """The lines of code of a module."""
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # also the blank lines of a text, and those with #
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            docstrings.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines - docstrings)


def main() -> int:
    """Print the table; 1 if a room is above its budget."""
    total, above = Size(0, 0, 0), False
    print(f"{'room':12} {'code':>7} {'budget':>7} {'files':>6} {'budget':>7} {'lines':>8}")
    for room, size in sizes().items():
        code, files = ROOMS[room]["code"], ROOMS[room]["files"]
        over = size.code > code or size.files > files
        note = "  above its budget" if over else ""
        print(f"{room:12} {size.code:7,} {code:7,} {size.files:6} {files:7} {size.lines:8,}{note}")
        total, above = total.plus(*size), above or over
    code, files = (sum(room[what] for room in ROOMS.values()) for what in ("code", "files"))
    print(f"{'sum':12} {total.code:7,} {code:7,} {total.files:6} {files:7} {total.lines:8,}")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
