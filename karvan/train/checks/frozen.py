"""Tables and parameters that a fit does not change."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from karvan.embedding import EmbeddingEngine, TableHandle
from karvan.embedding.admission import ReadOnly

Patterns = str | Iterable[str]


class Frozen:
    """The tables and parameters of a model that are not trained.

    A pattern is the name of a table ("user", or "tower.emb.user" with the path of its engine), of a parameter
    ("net.0.weight") or of a module ("net", which means all parameters and tables in it), with `*` and
    `?` as in file names. The gradients of what is frozen are dropped.
    """

    def __init__(self, model: nn.Module, patterns: Patterns = ()) -> None:
        single = isinstance(patterns, str) or not isinstance(patterns, Iterable)
        listed: list[Any] = [patterns] if single else list(patterns)
        if wrong := [each for each in listed if not isinstance(each, str)]:
            raise TypeError(
                f"frozen expects names of tables and parameters, got {type(wrong[0]).__name__}: "
                'frozen=["user", "net.*"].'
            )
        tables, parameters = tables_of(model), dict(model.named_parameters())
        names = _names_of(model)
        for pattern in listed:
            if not any(_matches(name, pattern) for each in names.values() for name in each):
                raise ValueError(
                    f"frozen names '{pattern}', but the model has no such table, parameter or module. Its "
                    f"tables are: {names_text([t.name for t in tables])}. Its parameters are: "
                    f"{names_text(parameters)}."
                )

        def chosen(part: TableHandle | nn.Parameter) -> bool:
            return any(_matches(name, pattern) for name in names[id(part)] for pattern in listed)

        self.tables = [table for table in tables if chosen(table)]
        self.parameters = {name: each for name, each in parameters.items() if chosen(each)}

    def __bool__(self) -> bool:
        return bool(self.tables or self.parameters)

    def forget(self) -> None:
        """Drop the gradients of what is frozen, which no optimizer uses."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for table in self.tables:
            table.engine_state.take_gradients([table.name])


def tables_of(model: nn.Module) -> list[TableHandle]:
    """The tables of all engines of a model."""
    engines = [module for module in model.modules() if isinstance(module, EmbeddingEngine)]
    return [table for engine in engines for table in engine.tables()]


def is_read_only(table: TableHandle) -> bool:
    """Whether the table was declared as one that gets no new rows."""
    return table.spec.admit == ReadOnly().native()


def names_text(names: Iterable[str], most: int = 8) -> str:
    """Some names as text: the first ones, and how many more there are."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return (", ".join(listed[:most]) or "none") + more


def _names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each table and parameter, by id(); parts of a module that is used twice have two."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for path, module in model.named_modules(remove_duplicate=False):
        for table in module.tables() if isinstance(module, EmbeddingEngine) else ():
            names.setdefault(id(table), []).extend([table.name, f"{path}.{table.name}".lstrip(".")])
    return names


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern is that of the name, or of a module that the name is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
