"""Batches that were prepared before their forward, recognized by their tensors.

The prepared state is not passed on with the batch, because the user's model is between the feed and the
engine. It may give the engine a new mapping (`{**batch, "hour": hours}`), other ids, or ids that were written
to since. The prepared state is right only for the same tensors, unchanged, so batches are recognized by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any, NamedTuple

from karvan.embedding.feature_inputs import Inputs
from karvan.ragged import REFERENCE, Ragged
from karvan.store.program import Prepared
from karvan.torch_internals import TENSOR_VERSION

_MOST = 8  # the oldest is dropped if more are prepared without being used


class _Entry(NamedTuple):
    tensors: list[_Same]
    inputs: Inputs
    prepared: Prepared


class PreparedBatches:
    """The prepared batches; several threads may put and take."""

    def __init__(self, features: Iterable[str]) -> None:
        self._features = list(features)
        self._entries: deque[_Entry] = deque(maxlen=_MOST)
        self._lock = Lock()

    def hold(self, most: int) -> None:
        """Hold at least so many batches."""
        with self._lock:
            self._entries = deque(self._entries, max(most, self._entries.maxlen or 0))

    def clear(self) -> None:
        """Release all."""
        with self._lock:
            self._entries.clear()

    def put(self, batch: Mapping[str, Any], inputs: Inputs, prepared: Prepared) -> None:
        """Hold a batch's prepared state."""
        entry = _Entry(self._tensors(batch), inputs, prepared)
        with self._lock:
            self._entries.append(entry)

    def take(self, batch: Mapping[str, Any]) -> tuple[Inputs, Prepared] | None:
        """The prepared state of a batch, which serves one forward; None if it was not prepared."""
        if not self._entries:
            return None
        tensors = self._tensors(batch)
        with self._lock:
            for index, entry in enumerate(self._entries):
                if entry.tensors == tensors:
                    del self._entries[index]
                    return entry.inputs, entry.prepared
        return None

    def _tensors(self, batch: Mapping[str, Any]) -> list[_Same]:
        found: list[Any] = [batch.get(REFERENCE)]
        for name in self._features:
            entry = batch.get(name)
            found += [entry.values, entry.offsets, entry.weights] if isinstance(entry, Ragged) else [entry]
        return [_Same(tensor) for tensor in found]


class _Same:
    """A tensor, equal only to itself while nobody writes to it; held, so that no other gets its id."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._version = getattr(tensor, TENSOR_VERSION, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._tensor is other._tensor and self._version == other._version

    def __hash__(self) -> int:
        return id(self._tensor)
