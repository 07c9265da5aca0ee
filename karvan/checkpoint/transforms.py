"""Transforms of data in a checkpoint: the statistics of a fitted `FeatureEngine`, by the engine's name.

A transform is anything with `state_dict` and `load_state_dict`. In the state of a checkpoint they are
`{"transforms": {name: state}}`. Beside them are the kinds of the data's columns,
`{":columns": {name: [kind, file]}}`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

from karvan.checkpoint.errors import CheckpointError

KEY = "transforms"
COLUMNS = ":columns"  # a name that no transform has


@runtime_checkable
class Transform(Protocol):
    """A transform that may have state."""

    def state_dict(self) -> dict[str, Any]:
        """Its statistics."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Replace its statistics."""


def name_of(transform: Transform) -> str:
    """The name under which its state is saved: its `name`, or that of its class."""
    name = getattr(transform, "name", None)
    return name if isinstance(name, str) and name else type(transform).__name__


def has_state(transform: object) -> TypeGuard[Transform]:
    """Whether there is something to save. An engine without fitted steps has an empty state."""
    if not isinstance(transform, Transform) or isinstance(transform, type):
        return False
    return any(not isinstance(part, Mapping) or part for part in transform.state_dict().values())


def load_transforms(path: str | os.PathLike[str], state: Mapping[str, Any], *transforms: Transform) -> None:
    """Load what the state of a checkpoint has under their names into transforms; all of them, or none."""
    saved = state.get(KEY, {})
    for transform in transforms:
        if name_of(transform) not in saved:
            raise CheckpointError.mismatch(
                path,
                f"the statistics of transform '{name_of(transform)}'",
                "statistics of " + (", ".join(f"'{name}'" for name in saved) or "no transform"),
            )
    for transform in transforms:
        try:
            transform.load_state_dict(saved[name_of(transform)])
        except (ValueError, RuntimeError) as error:
            name = name_of(transform)
            raise CheckpointError(path, f"its transform '{name}' is another: {error}") from error
