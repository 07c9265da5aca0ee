"""`load_bank`: starts a model from other checkpoints, by `karvan.checkpoint.warm_start`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from karvan.checkpoint import Checkpoint, CheckpointError, find, warm_start
from karvan.compat.recis.nn import filter_out_sparse_param
from karvan.compat.unsupported import UnsupportedError, require_default
from karvan.embedding.optim.base import SparseOptimizer

_log = logging.getLogger("karvan.compat")
_POSITION = ("io_state", "train_io", "eval_io")  # of the data, which a bank does not have here


@dataclass
class ModelBankEntry:
    """A checkpoint, or a run's folder: which names of the model are loaded, by shell patterns, from which.

    oname: a list of {the model's name: the checkpoint's}, each with one "*" or without. Tables may be written
    as "user", "user*" or "user@*"; an exclude such as "user@*avg*" is the state of its optimizer. Tables of a
    new model are empty, so hashtable_clear changes nothing. Checkpoints are Karvan's;
    `karvan import-checkpoint` makes them of RecIS's.
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
        for name in self.load:
            if name in _POSITION or _part(name) not in ("", "*"):
                raise UnsupportedError(
                    f"model_bank load '{name}'",
                    "load whole tables and tensors; data starts at its beginning.",
                )
        for name in self.exclude:
            if _part(name) in ("id", "embedding"):
                raise UnsupportedError(f"model_bank exclude '{name}'", "exclude the whole table.")
        for new, old in self.renames():
            if new.count("*") != old.count("*") or new.count("*") > 1:
                raise ValueError(
                    f"oname of a model_bank expects one '*' in both names or none, got {new!r} and {old!r}."
                )

    @classmethod
    def of(cls, entry: Any) -> ModelBankEntry:
        """From a path, or a dict as RecIS takes it."""
        if isinstance(entry, cls):
            return entry
        if isinstance(entry, str):
            return cls(entry)
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(entry) - names):
            raise UnsupportedError(
                f"model_bank with {', '.join(unknown)}", f"expected {', '.join(sorted(names))}."
            )
        return cls(**entry)

    def renames(self) -> list[tuple[str, str]]:
        """The model's names → the checkpoint's."""
        return [
            (_whole(new), _whole(old)) for pair_of_names in self.oname for new, old in pair_of_names.items()
        ]

    def source(self, name: str) -> str:
        """The checkpoint's name for a name of the model."""
        for new, old in self.renames():
            if name == new:
                return old
            if "*" in new and fnmatchcase(name, new):
                start, end = new.split("*")
                return old.replace("*", name[len(start) : len(name) - len(end)])
        return name

    def takes(self, name: str) -> bool:
        """Whether a name of the model is loaded."""
        excluded = [_whole(pattern) for pattern in self.exclude if _part(pattern) in ("", "*")]
        return _matches(name, map(_whole, self.load)) and not _matches(name, excluded)

    def takes_state(self, table: str) -> bool:
        """Whether the optimizer's state of a table is loaded, too."""
        return not _matches(
            table, [_whole(pattern) for pattern in self.exclude if _part(pattern) not in ("", "*")]
        )


def _whole(name: str) -> str:
    return name.partition("@")[0]


def _part(name: str) -> str:
    return name.partition("@")[2]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def load_bank(model: nn.Module, bank: Sequence[Any], optimizer: SparseOptimizer | None = None) -> None:
    """Load all entries, the last first: what it has is not loaded from earlier ones."""
    loaded: set[str] = set()
    for entry in reversed([ModelBankEntry.of(item) for item in bank]):
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
    targets = {
        "tables": set(filter_out_sparse_param(model)),
        "dense": {name for name, value in model.state_dict().items() if isinstance(value, Tensor)},
    }
    sources = {"tables": set(saved.manifest.tables), "dense": _dense_names(saved)}
    for name in entry.load:
        if "*" not in name and not any(_whole(name) in names for names in targets.values()):
            raise ValueError(f"load of a model_bank expects names of the model, got '{name}'.")
    matches: set[str] = set()
    for kind, names in targets.items():
        chosen = {name: entry.source(name) for name in sorted(names - loaded) if entry.takes(name)}
        for name in [name for name, source in chosen.items() if source not in sources[kind]]:
            if name in entry.load and not entry.ignore_error:
                raise CheckpointError.mismatch(saved.path, f"'{chosen[name]}' for '{name}'", "none")
            del chosen[name]
        for state in (True, False) if kind == "tables" else (True,):
            some = {name: source for name, source in chosen.items() if entry.takes_state(name) is state}
            matches |= _start(model, entry.path, kind, chosen if kind == "dense" else some, state, optimizer)
    return matches


def _start(
    model: nn.Module,
    path: str,
    kind: str,
    chosen: Mapping[str, str],
    state: bool,
    optimizer: SparseOptimizer | None,
) -> set[str]:
    """Load names of the model from names of a checkpoint, of which each may be the source of several."""
    rest, loaded = dict(chosen), set()
    while rest:
        of = {source: name for name, source in reversed(rest.items())}
        renames = {source: name for source, name in of.items() if source != name}
        sources = sorted(of)
        report = warm_start(
            model,
            path,
            tables=sources if kind == "tables" else (),
            dense=sources if kind == "dense" else (),
            rename=renames,
            optimizer_state=state,
            sparse_optimizer=optimizer,
        )
        _log.info("%s", report)
        loaded |= {*report.tables, *report.dense}
        for name in of.values():
            del rest[name]
    return loaded


def _dense_names(saved: Checkpoint) -> set[str]:
    """The names of the tensors of a checkpoint's model."""
    model = saved.state().get("model", {})
    return {name for name, value in model.items() if isinstance(value, Tensor)}
