"""Runs the code cells of a notebook in one process, in order, and prints what each cell's last line gives."""

import ast
import json
import sys
from pathlib import Path


def run(path):
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(Path(path).read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), f"{Path(path).name}, cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{Path(path).name}, cell {number}", "exec"), names)
        if last is not None:
            value = eval(
                compile(ast.Expression(last.value), f"{Path(path).name}, cell {number}", "eval"), names
            )
            if value is not None:
                print(value if isinstance(value, str) else repr(value))


if __name__ == "__main__":
    run(sys.argv[1])
