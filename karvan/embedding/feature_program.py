"""The features of an engine as the store needs them, and as JSON for embedding workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from karvan.embedding.feature_inputs import mode_of
from karvan.embedding.table import POOLED, HashStack, Table
from karvan.store import LookupProgram
from karvan.store.types import FeatureSpec


def make_program(features: Mapping[str, Table]) -> LookupProgram:
    """The program of some features, with their description."""
    return LookupProgram(
        [
            FeatureSpec(
                feature,
                table.name or feature,
                dim=table.dim,
                mode=mode_of(table),
                combiner=table.combiner if table.combiner in POOLED else "sum",
                stack=1 if table.hash_stack is None else table.hash_stack.rounds,
            )
            for feature, table in features.items()
        ],
        {feature: _to_json(feature, table) for feature, table in features.items()},
    )


def features_from_json(described: Mapping[str, Any]) -> dict[str, Table]:
    """The features of a program's description: the layout of their ids, without initialisers and policies."""
    made = {}
    for feature, (name, dim, combiner, length, stack, *rest) in described.items():
        use_weights, missing, padding = rest
        hash_stack = None if stack is None else HashStack(*stack)
        made[feature] = Table(
            dim,
            name,
            combiner,
            length,
            hash_stack=hash_stack,
            use_weights=use_weights,
            missing=missing,
            padding_idx=padding,
        )
    return made


def _to_json(feature: str, table: Table) -> list[Any]:
    stack = None if table.hash_stack is None else [table.hash_stack.rounds, table.hash_stack.size]
    layout = [table.name or feature, table.dim, table.combiner, table.length, stack]
    return [*layout, table.use_weights, table.missing, table.padding_idx]
