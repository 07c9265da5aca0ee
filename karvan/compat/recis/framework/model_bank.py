"""`load_bank`: starts a model from other checkpoints, by `karvan.checkpoint.warm_start`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from karvan.checkpoint import Checkpoint, CheckpointError, find, warm_start
from karvan.compat.unsupported import UnsupportedError, require_default
from karvan.embedding.optim.base import SparseOptimizer

_log = logging.getLogger("karvan.compat")


@dataclass
class ModelBankEntry:
    """A checkpoint, or a run's folder: which names are loaded, by shell patterns, and under which names.

    oname: a list of {its name: the model's name}. Tables of a new model are empty, so hashtable_clear changes
    nothing. Checkpoints are Karvan's; `karvan import-checkpoint` makes them of RecIS's.
    """

    path: str = ""
    load: Any = field(default_factory=lambda: {"*"})
    exclude: Any = field(default_factory=set)
    is_dynamic: bool = False
    hashtable_clear: bool = True
    ignore_error: bool = False
    skip: bool = False
    oname: Sequence[Mapping[str, str]] = ()

    def __post_init__(self) -> None:
        require_default("model_bank is_dynamic", self.is_dynamic, False, "load a bank before training alone.")
        if not self.path and not self.skip:
            raise ValueError("An entry of model_bank expects a path.")
        if patterns := [old for old in self.renames() if "*" in old]:
            raise UnsupportedError(f"oname with a pattern, '{patterns[0]}',", "name each table or tensor.")

    @classmethod
    def of(cls, given: Any) -> ModelBankEntry:
        """From a path, or a dict as RecIS takes it."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls(given)
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise UnsupportedError(
                f"model_bank with {', '.join(unknown)}", f"expected {', '.join(sorted(known))}."
            )
        return cls(**given)

    def renames(self) -> dict[str, str]:
        """The checkpoint's names → the model's."""
        return {old: new for each in self.oname for old, new in each.items()}


def load_bank(model: nn.Module, bank: Sequence[Any], optimizer: SparseOptimizer | None = None) -> None:
    """Load all entries, the last first: what it has is not loaded from earlier ones."""
    loaded: set[str] = set()
    for entry in reversed([ModelBankEntry.of(each) for each in bank]):
        if entry.skip:
            continue
        try:
            loaded |= _load(model, entry, loaded, optimizer)
        except CheckpointError as error:
            if not entry.ignore_error:
                raise
            _log.warning("An entry of model_bank is skipped: %s", error)


def _load(
    model: nn.Module, entry: ModelBankEntry, loaded: set[str], optimizer: SparseOptimizer | None
) -> set[str]:
    """Load one entry without the model's names that are loaded already; the names that it has loaded."""
    saved = find(entry.path)
    names = {"tables": set(saved.manifest.tables), "dense": _dense_names(saved)}
    renames = entry.renames()
    chosen = {
        kind: [
            name
            for name in sorted(found)
            if any(fnmatchcase(name, pattern) for pattern in entry.load)
            and not any(fnmatchcase(name, pattern) for pattern in entry.exclude)
            and renames.get(name, name) not in loaded
        ]
        for kind, found in names.items()
    }
    taken = {*chosen["tables"], *chosen["dense"]}
    report = warm_start(
        model,
        entry.path,
        tables=chosen["tables"],
        dense=chosen["dense"],
        rename={old: new for old, new in renames.items() if old in taken},
        sparse_optimizer=optimizer,
    )
    _log.info("%s", report)
    return {*report.tables, *report.dense}


def _dense_names(saved: Checkpoint) -> set[str]:
    """The names of the tensors of a checkpoint's model."""
    model = saved.state().get("model", {})
    return {name for name, value in model.items() if isinstance(value, Tensor)}
