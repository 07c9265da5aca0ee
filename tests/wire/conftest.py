"""Tests of the wire use the bad network of the benchmarks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
