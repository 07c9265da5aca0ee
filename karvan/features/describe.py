"""The steps of a chain as text, to check that fitted statistics belong to the same steps.

The text is the same in every process and with every version of NumPy and torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from karvan.features.ops.base import ChainStep
from karvan.features.ops.numbers import Log1p

_LONGEST = 32  # values of a setting that are written out; longer ones become a digest


def describe_chain(columns: Iterable[str], steps: Iterable[ChainStep]) -> str:
    """What a chain starts from, and its steps, for example `price.clip(0, 10).log1p()`."""
    names = list(columns)
    start = names[0] if len(names) == 1 else f"({', '.join(names)})"
    return ".".join([start, *map(describe_step, steps)])


def describe_step(step: ChainStep) -> str:
    """A step's name and settings; defaults at the end of the settings are omitted."""
    if isinstance(step, Log1p) and step.clip is not None:
        return f"{describe_step(step.clip)}.{describe_step(Log1p())}"
    settings: list[Any] = []
    if dataclasses.is_dataclass(step):
        fields = [field for field in dataclasses.fields(step) if not field.metadata.get("derived")]
        settings = [getattr(step, field.name) for field in fields]
        while settings and settings[-1] == fields[len(settings) - 1].default:
            settings.pop()
    return f"{step.name}({', '.join(map(_text, settings))})"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, tuple | list):
        texts = [_text(each) for each in value]
        if len(texts) <= _LONGEST:
            return f"[{', '.join(texts)}]"
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
        return f"[{len(texts)} values, digest {digest}]"
    return describe_step(value) if isinstance(value, ChainStep) else type(value).__name__
