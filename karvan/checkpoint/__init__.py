"""Checkpoints: a run's state, tables and dense, in a folder that appears complete or not at all.

`Checkpoints` manages those of a run; a Trainer has one. `save` and `start` write a single one; `Checkpoint`
opens one, and `find` the newest of a run. `warm_start` loads parts of one into another model. `import_recis`
and `import_persia` convert those of another system. `summary`, `row` and `verify` inspect one.

The `state` of a checkpoint is any tree of dicts (with keys of str or int), lists, tuples, text, numbers, None
and tensors, such as a `state_dict()`. The model's tables are saved in addition to it.
"""

from karvan.argument_checks import publish
from karvan.checkpoint.checkpoint import Checkpoint
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.foreign_persia import import_persia
from karvan.checkpoint.foreign_recis import import_recis
from karvan.checkpoint.foreign_writing import ImportReport
from karvan.checkpoint.manager import Checkpoints, find, resume_at, save, start
from karvan.checkpoint.safetensors_file import Damage
from karvan.checkpoint.survey import (
    HotKey,
    KeyRow,
    Summary,
    Survey,
    TableSummary,
    is_imported,
    row,
    summary,
    survey,
    verify,
)
from karvan.checkpoint.warm_start import WarmStart, warm_start
from karvan.checkpoint.writer import Pending

__all__ = [
    "Checkpoints",
    "Checkpoint",
    "find",
    "save",
    "start",
    "Pending",
    "resume_at",
    "warm_start",
    "WarmStart",
    "summary",
    "Summary",
    "TableSummary",
    "HotKey",
    "row",
    "KeyRow",
    "verify",
    "Damage",
    "survey",
    "Survey",
    "import_persia",
    "import_recis",
    "ImportReport",
    "is_imported",
    "CheckpointError",
    "DamagedCheckpointError",
]

publish("karvan.checkpoint")
