"""`column_from_settings`: a column from the data section of a job or of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from karvan.data.columns.declarations import Column, Fixed, Raw, Varlen

KINDS: Mapping[str, type[Column]] = {"fixed": Fixed, "varlen": Varlen, "raw": Raw}
_DTYPES = {"int64": torch.int64, "float32": torch.float32, "float64": torch.float64, "bool": torch.bool}


def column_from_settings(settings: Any) -> Column | str:
    """A column from its name, or from a mapping with `name`, `kind` (fixed) and the arguments of its kind.

    A ValueError says what is wrong.
    """
    if isinstance(settings, str):
        return settings
    if (
        not isinstance(settings, Mapping)
        or "name" not in settings
        or settings.get("kind", "fixed") not in KINDS
    ):
        raise ValueError(
            f"data.columns expects names, or mappings with a name and a kind of {', '.join(KINDS)}, "
            f"got {settings}."
        )
    arguments = dict(settings)
    name, kind = settings["name"], arguments.pop("kind", "fixed")
    allowed = [field.name for field in fields(KINDS[kind])]
    for argument in arguments:
        if argument not in allowed:
            raise ValueError(
                f"data.columns: column '{name}' of kind {kind} has no '{argument}'; it has: "
                f"{', '.join(allowed)}."
            )
    dtype = arguments.get("dtype")
    if dtype is not None:
        if dtype not in _DTYPES:
            raise ValueError(
                f"data.columns: column '{name}' expects a dtype of {', '.join(_DTYPES)}, got {dtype!r}."
            )
        arguments["dtype"] = _DTYPES[dtype]
    try:
        return KINDS[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"data.columns.{name}: {error}") from error
