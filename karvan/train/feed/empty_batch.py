"""Batches without samples, for ranks that wait while others still have data.

An empty batch has the columns of the others: their kinds, dtypes and trailing shapes. A rank that has had a
batch knows them; one that never had learns them from another rank, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from karvan.ragged import Batch, IdsReference, NestedRagged, Ragged
from karvan.train.pair import FEATURES, LABEL, Pair


def describe(batch: Any) -> dict[str, Any]:
    """What `empty` needs to know of a batch, for JSON; an unsupported column is an error in `empty`."""
    try:
        columns = [[name, _describe(name, entry)] for name, entry in batch.items()]
    except TypeError as error:
        return {"refused": str(error)}
    described: dict[str, Any] = {"batch": isinstance(batch, Batch), "columns": columns}
    if isinstance(batch, Pair):
        described["pair"] = [_names(batch.features), _names(batch.labels)]
    return described


def empty(description: Mapping[str, Any]) -> Any:
    """A batch without samples."""
    if "refused" in description:
        raise TypeError(description["refused"])
    entries = {name: _empty(column) for name, column in description["columns"]}
    if "pair" in description:
        features, labels = description["pair"]
        return Pair(_part(FEATURES, features, entries), _part(LABEL, labels, entries))
    return Batch(entries) if description["batch"] else entries


def _names(part: Any) -> list[str] | bool:
    """The names of a pair's features or labels, or whether there are any."""
    return list(part) if isinstance(part, Mapping) else part is not None


def _part(name: str, names: list[str] | bool, entries: Mapping[str, Any]) -> Any:
    if isinstance(names, bool):
        return entries[name] if names else None
    return {each: entries[each] for each in names}


def _describe(name: str, entry: Any) -> dict[str, Any]:
    if isinstance(entry, Tensor):
        return {"kind": "tensor", "values": _like(entry)}
    if isinstance(entry, Ragged):
        weights = None if entry.weights is None else _like(entry.weights)
        offsets = entry.offsets is not None
        return {"kind": "ragged", "values": _like(entry.values), "offsets": offsets, "weights": weights}
    if isinstance(entry, NestedRagged):
        return {"kind": "nested", "values": _like(entry.values)}
    if isinstance(entry, IdsReference):
        return {"kind": "reference"}
    raise TypeError(
        f"Column '{name}': expected a Tensor, Ragged or NestedRagged, got {type(entry).__name__}. A rank "
        "that runs out of data needs an empty batch, and cannot make one of this type."
    )


def _like(tensor: Tensor) -> dict[str, Any]:
    shape = [0, *tensor.shape[1:]] if tensor.dim() else []
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}


def _empty(column: Mapping[str, Any]) -> Any:
    if column["kind"] == "reference":
        return IdsReference(0, "", 0)
    values = _tensor(column["values"])
    if column["kind"] == "tensor":
        return values
    start = torch.zeros(1, dtype=torch.int64)
    if column["kind"] == "nested":
        return NestedRagged(values, start, start.clone())
    weights = None if column["weights"] is None else _tensor(column["weights"])
    return Ragged(values, start if column["offsets"] else None, weights)


def _tensor(like: Mapping[str, Any]) -> Tensor:
    return torch.zeros(like["shape"], dtype=getattr(torch, like["dtype"]))
