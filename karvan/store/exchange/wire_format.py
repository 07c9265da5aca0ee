"""Messages between a remote store and its servers: tables and rules in JSON, vectors as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.distributed.settings import WIRES
from karvan.store.types import RULE_NUMBERS, Rule, TableSpec, Vectors


def spec_to_json(spec: TableSpec) -> dict[str, Any]:
    """A table, as `spec_from_json` reads it."""
    return asdict(spec)


def spec_from_json(spec: Mapping[str, Any]) -> TableSpec:
    """The table that `spec_to_json` has written."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in spec.items()
    }
    return TableSpec(**fields)


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """A rule, as `rule_from_json` reads it."""
    numbers = {name: float(getattr(rule, name)) for name in RULE_NUMBERS}
    return {"kind": rule.kind, **numbers, "accumulate_last": rule.accumulate_last}


def rule_from_json(fields: Mapping[str, Any]) -> Rule:
    """The rule that `rule_to_json` has written; anything else is an error now, before a row changes."""
    rule = Rule(fields["kind"], **{name: fields[name] for name in RULE_NUMBERS})
    rule.native()
    return rule


def to_wire(floats: Tensor, wire: str) -> NDArray[Any]:
    """Floats as they are sent; two-byte numbers are sent as uint16."""
    if wire == "float32":
        return floats.numpy()
    return floats.to(WIRES[wire]).view(torch.int16).numpy().view(np.uint16)


def from_wire(array: NDArray[Any], wire: str) -> Vectors:
    """The floats that were sent; read-only."""
    if wire == "float32":
        return array
    bits = torch.from_numpy(array.copy().view(np.int16))
    return bits.view(WIRES[wire]).float().numpy()
