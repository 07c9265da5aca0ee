"""What the models share: tables of their ids, numbers side by side, nets of fully connected layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from karvan.argument_checks import listed
from karvan.embedding import Table, init
from karvan.embedding.table import POOLED
from karvan.models.layers import Layers
from karvan.ragged import OptionalRagged, is_text

Names: TypeAlias = Sequence[str] | Mapping[str, int]
Tables: TypeAlias = Table | Mapping[str, Table] | None

_log = logging.getLogger("karvan.models")

# With numbers up to 1e5 a DeepFM ended at a loss of 43, with the same ones up to 1 at 0.57.
_LARGEST = 1e5


def names_in(ids: Sequence[str]) -> list[str]:
    """The ids as a list; a single name would become a list of its letters."""
    if isinstance(ids, str):
        raise ValueError(f"Expected a list of different ids, got {ids!r}: give it [{ids!r}].")
    return list(ids)


def tables_of(ids: Sequence[str], dim: int, table: Tables, spread: float | None = None) -> dict[str, Table]:
    """A table of `dim` columns for each id.

    table: a template for all; or the tables of some ids by name; None for means of rows that start within
    ±`spread`, by default 1 / sqrt(dim), so that products of vectors are large enough to learn from.
    """
    if isinstance(ids, str) or len(set(ids)) != len(ids):
        raise ValueError(f"Expected a list of different ids, got {ids!r}.")
    spread = dim**-0.5 if spread is None else spread
    default = Table(dim, combiner="mean", init=init.Uniform(-spread, spread))
    if table is None or isinstance(table, Table):
        tables = dict.fromkeys(ids, table or default)
    else:
        if unknown := set(table) - set(ids):
            raise ValueError(
                f"There is a table for {', '.join(sorted(unknown))}, but ids are {', '.join(ids)}."
            )
        tables = {name: table.get(name, default) for name in ids}
    for name, part in tables.items():
        if part.dim != dim:
            raise ValueError(f"The table of '{name}' has dim {part.dim}, but the model has dim {dim}.")
        if part.combiner not in POOLED:
            raise ValueError(
                f"The table of '{name}' must pool its ids by {', '.join(POOLED)}, but has combiner "
                f"'{part.combiner}'."
            )
    return tables


def widened(tables: Mapping[str, Table], columns: int) -> dict[str, Table]:
    """The same tables with more columns."""
    return {name: replace(table, dim=table.dim + columns) for name, table in tables.items()}


class Numbers(nn.Module):
    """The numbers of a batch side by side, (B, width).

    names: those of single numbers (B,); or a mapping from names to widths, for tensors (B, width).
    """

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.widths = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 1)
        if isinstance(names, str) or len(self.widths) != len(names):
            raise ValueError(f"Expected a list of different numbers, got {names!r}.")
        self.width = sum(self.widths.values())
        self._is_checked = False

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, width), float32."""
        columns = [self._column(batch, name) for name in self.widths]
        if self.training and not self._is_checked and not torch.compiler.is_compiling():
            self._is_checked = True
            self._warn_of_large(columns)
        if columns and self.width == len(columns) and all(column.dim() == 1 for column in columns):
            return torch.stack(columns, 1)
        widths = self.widths.values()
        return torch.cat([column.view(-1, width) for column, width in zip(columns, widths, strict=True)], 1)

    def _column(self, batch: Mapping[str, Any], name: str) -> Tensor:
        if name not in batch:
            raise KeyError(f"Number '{name}' is not in the batch, which has: {listed(name, batch)}")
        column, width = batch[name], self.widths[name]
        if (
            not isinstance(column, Tensor)
            or column.dim() not in (1, 2)
            or (len(column) and column.shape[1:].numel() != width)
        ):
            if isinstance(column, OptionalRagged):
                missing = column.rows - column.values.shape[0]
                raise ValueError(
                    f"Number '{name}' has missing values: {missing} in the {column.rows} samples of this "
                    f"batch. Choose a value for them: kv.data.Fixed('{name}', default=0) while reading, or "
                    f"kv.Feature('{name}').fill_missing(0)."
                )
            if is_text(column):
                raise ValueError(
                    f"Number '{name}' is text in the batch. If it names something, turn it into ids by "
                    f"kv.Feature('{name}').hash(\"farm\") in a FeatureEngine, and name it in `ids` of the "
                    f"model. If it is numbers, parse them by kv.Feature('{name}').to_numbers(default=0)."
                )
            shape = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
            raise ValueError(f"Number '{name}' must be a tensor (B, {width}), but is {shape}.")
        return column if column.dtype is torch.float32 else column.float()

    def _warn_of_large(self, columns: Iterable[Tensor]) -> None:
        """Warn of numbers in the first batch that are too large to learn from, such as timestamps."""
        for name, column in zip(self.widths, columns, strict=True):
            values = column.detach().abs()
            large = values[values > _LARGEST]
            if len(large):
                _log.warning(
                    "Number '%s' has values up to %.2g in the first batch. A net does not learn from numbers "
                    "that large: the loss becomes huge. Scale it by a step: kv.Feature('%s').normalise() or "
                    '.log1p(). Of a timestamp, take the hour or the weekday as an id: see "Dates" in the '
                    "guide to features.",
                    name,
                    large.max().item(),
                    name,
                )

    def extra_repr(self) -> str:
        """The names."""
        return ", ".join(self.widths)


def beside(numbers: Numbers, batch: Mapping[str, Any], vectors: Iterable[Tensor]) -> Tensor:
    """Numbers and vectors side by side."""
    return torch.cat([*([numbers(batch)] if numbers.width else []), *vectors], 1)


def mlp(width: int, hidden: Sequence[int], out: int | None = None, *, dropout: float = 0.0) -> Layers:
    """Layers with ReLU, and a last one without it if `out` is given."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    if out is not None:
        layers.append(nn.Linear(width, out))
    return Layers(*layers)
