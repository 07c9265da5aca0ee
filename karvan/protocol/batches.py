"""Batches in messages: how a head describes its arrays; see `karvan/cluster/batch_messages.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.wire.errors import RefusedError
from karvan.wire.message import Array
from karvan.wire.schema.kinds import Integer, MapOf, OneOf, Plain, Text, TupleOf, shown

# The number of parts of each kind of entry; "plain" and "reference" have none.
_PARTS = {"tensor": 1, "ragged": 3, "optional": 3, "optional text": 3, "nested": 3, "padded": 2}
_REFERENCE = TupleOf(Integer(0, 2**20), Text(200), Integer(0, 2**48))

NAME = Text(1000)
BATCH = MapOf(TupleOf(OneOf(*_PARTS, "plain", "reference"), Plain()), 2**16, NAME)


def check_batch(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    """A RefusedError unless every part is an array of the message, and every array is exactly one part."""
    used: list[int] = []
    for name, (kind, content) in head["batch"].items():
        if kind == "reference":
            _REFERENCE.check(content, f"batch[{name!r}]")
        if kind not in _PARTS:
            continue
        if not isinstance(content, list) or len(content) != _PARTS[kind] or content[0] is None:
            raise RefusedError(
                f"expected the {_PARTS[kind]} parts of a {kind}, '{name}', got {shown(content)}."
            )
        for part in content:
            if part is not None:
                used.append(_array_number(name, part, arrays))
    if sorted(used) != list(range(len(arrays))):
        raise RefusedError(f"expected a batch with each of {len(arrays)} arrays once, got {used[:20]}.")


def _array_number(name: str, part: Any, arrays: Sequence[Array]) -> int:
    match part:
        case [int(number), str(bits)] if type(number) is int and bits in ("", "bfloat16"):
            if not 0 <= number < len(arrays):
                raise RefusedError(f"expected one of {len(arrays)} arrays for '{name}', got number {number}.")
            if bits and arrays[number].dtype.name != "uint16":
                raise RefusedError(f"expected '{name}' as uint16, got {arrays[number].dtype.name}.")
            return number
    raise RefusedError(f"expected the number of an array and its bits for '{name}', got {shown(part)}.")
