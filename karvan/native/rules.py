"""The rules of sparse optimizers, from the table that the native core is compiled with.

They are known without the core, too: the GPU's kernels do not need it.
"""

import re
from pathlib import Path

_SOURCE = (Path(__file__).parent / "rules.inc").read_text()

_ROWS = re.findall(r"RULE\((\w+), (\d), (\d)\)", _SOURCE)

# The rules by number: floats of optimizer state for each column of a vector, and more floats for the row.
RULES = {name: (int(columns), int(row)) for name, columns, row in _ROWS}
FLOATS = tuple(re.findall(r"NUMBER\((\w+), ", _SOURCE))  # the numbers of each rule
