"""`copy_data_to_device`: tensors in nested collections on another device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any


def copy_data_to_device(data: Any, device: Any, *args: Any, **options: Any) -> Any:
    """The same lists, tuples, mappings and dataclasses with everything that has `to` on the device."""

    def copy(value: Any) -> Any:
        return copy_data_to_device(value, device, *args, **options)

    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(copy, data))
    if isinstance(data, list | tuple):
        return type(data)(map(copy, data))
    if isinstance(data, Mapping):
        made = {name: copy(value) for name, value in data.items()}
        return defaultdict(data.default_factory, made) if isinstance(data, defaultdict) else type(data)(made)  # type: ignore[call-arg]
    if hasattr(data, "to"):
        return data.to(device, *args, **options)
    if is_dataclass(data) and not isinstance(data, type):
        made = {each.name: copy(getattr(data, each.name)) for each in fields(data) if each.init}
        return replace(data, **made)
    return data
