"""Checkpoints of tables and tensors, over `karvan.checkpoint`: stock `safetensors` opens them.

`load_bank` starts a model from other checkpoints, by `karvan.checkpoint.warm_start`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.checkpoint import CheckpointError, find, save, warm_start
from karvan.compat.recis.nn import SparseParameter, engines_of, filter_out_sparse_param
from karvan.compat.unsupported import UnsupportedError, require_default
from karvan.embedding.optim.base import SparseOptimizer

__all__ = ["CheckpointReader", "Loader", "Saver"]


class CheckpointReader:
    """Reads a checkpoint of Karvan, or the newest of a run's folder.

    Tables are "user@id" and "user@embedding", in the same order; tensors have their names.
    """

    def __init__(self, path: str) -> None:
        self._saved = find(path)

    @cached_property
    def _dense(self) -> dict[str, Tensor]:
        return _tensors(self._saved.state(), "tensors", "model")

    def tensor_names(self) -> list[str]:
        """All names."""
        tables = [f"{name}@{part}" for name in self._saved.manifest.tables for part in ("id", "embedding")]
        return [*tables, *self._dense]

    def read_tensor(self, name: str) -> Tensor:
        """A tensor."""
        table, _, part = name.rpartition("@")
        if (entry := self._saved.manifest.tables.get(table)) is not None and part in ("id", "embedding"):
            rows = list(self._saved.parts(table))
            keys = [np.zeros(0, np.int64), *(part.keys for part in rows)]
            vectors = [np.zeros((0, entry.dim), np.float32), *(part.vectors for part in rows)]
            return torch.from_numpy(np.concatenate(keys if part == "id" else vectors))
        if name not in self._dense:
            raise KeyError(f"{self._saved.path} has no tensor '{name}'.")
        return self._dense[name]

    def tensor_shape(self, name: str) -> list[int]:
        """Its sizes."""
        return list(self.read_tensor(name).shape)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Its dtype."""
        return self.read_tensor(name).dtype


class Loader:
    """Loads the rows of `hashtables`, and into `tensors` those of the same names.

    Checkpoints are Karvan's; those of any number of ranks can be loaded.
    """

    def __init__(
        self,
        checkpoint_path: str,
        hashtables: Mapping[str, SparseParameter] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        parallel: int = 16,
        filter_func: Any = None,
    ) -> None:
        require_default("parallel", parallel, 16, "leave it out.")
        require_default("filter_func", filter_func, None, "use TrainingArguments(model_bank=…).")
        self._path, self._tensors = checkpoint_path, dict(tensors or {})
        self._engines = engines_of(hashtables or {})

    @torch.no_grad()
    def load(self) -> None:
        """Load."""
        saved = _tensors(find(self._path).load(self._engines), "tensors", "model")
        if missing := [name for name in self._tensors if name not in saved]:
            raise KeyError(f"{self._path} has no tensor '{missing[0]}'.")
        for name, tensor in self._tensors.items():
            tensor.copy_(saved[name])


class Saver:
    """Saves `hashtables`, all tables of their engines, and `tensors`, into a new folder.

    All ranks save together: shard_index and shard_num are the rank and the number of ranks. `parallel` is how
    many threads write.
    """

    def __init__(
        self,
        shard_index: int = 0,
        shard_num: int = 1,
        parallel: int = 8,
        path: str = ".",
        hashtables: Mapping[str, SparseParameter] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        filter_func: Any = None,
    ) -> None:
        connection = distributed.current()
        if (shard_index, shard_num) != (connection.rank, connection.world_size):
            raise UnsupportedError(
                f"shard {shard_index} of {shard_num} on rank {connection.rank} of {connection.world_size}",
                "each rank saves its own rows.",
            )
        require_default("filter_func", filter_func, None, "save fewer tables or tensors.")
        self._path, self._writers, self._tensors = path, parallel, dict(tensors or {})
        self._engines = engines_of(hashtables or {})

    def save(self) -> None:
        """Save, and wait until the checkpoint is complete."""
        save(self._path, {"tensors": self._tensors}, self._engines, writers=self._writers)


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
        "dense": set(_tensors({"model": model.state_dict()}, "model")),
    }
    sources = {"tables": set(saved.manifest.tables), "dense": set(_tensors(saved.state(), "model"))}
    for name in entry.load:
        if "*" not in name and not any(_whole(name) in names for names in targets.values()):
            raise ValueError(f"load of a model_bank expects names of the model, got '{name}'.")
    start = partial(warm_start, model, entry.path, sparse_optimizer=optimizer)
    matches: set[str] = set()
    for kind, names in targets.items():
        chosen = {name: entry.source(name) for name in sorted(names - loaded) if entry.takes(name)}
        for name in [name for name, source in chosen.items() if source not in sources[kind]]:
            if name in entry.load and not entry.ignore_error:
                raise CheckpointError.mismatch(saved.path, f"'{chosen[name]}' for '{name}'", "none")
            del chosen[name]
        stateless = {name for name in chosen if kind == "tables" and not entry.takes_state(name)}
        for state in (True, False):
            some = {name: source for name, source in chosen.items() if (name not in stateless) is state}
            matches |= _start(partial(start, optimizer_state=state), kind, some)
    return matches


def _start(start: Callable[..., Any], kind: str, chosen: Mapping[str, str]) -> set[str]:
    """Load names of the model from names of a checkpoint, of which each may be the source of several."""
    rest, loaded = dict(chosen), set()
    while rest:
        of = {source: name for name, source in reversed(rest.items())}
        renames = {source: name for source, name in of.items() if source != name}
        report = start(rename=renames, **{"tables": (), "dense": (), kind: sorted(of)})
        _log.info("%s", report)
        loaded |= {*report.tables, *report.dense}
        for name in of.values():
            del rest[name]
    return loaded


def _tensors(state: Mapping[str, Any], *parts: str) -> dict[str, Tensor]:
    """The tensors by name in the first of some parts of a checkpoint's state that is there."""
    values: Mapping[str, Any] = next((state[part] for part in parts if part in state), {})
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
