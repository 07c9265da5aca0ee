"""Batches that were prepared before their forward, recognized by their tensors.

The prepared state is not passed on with the batch, because the user's model is between the feed and the
engine. It may give the engine a new mapping (`{**batch, "hour": hours}`), other ids, or ids that were written
to since. The prepared state is right only for the same tensors, unchanged, so batches are recognized by them.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any, NamedTuple

from karvan.embedding.feature_inputs import Inputs
from karvan.ragged import REFERENCE, NestedRagged, Ragged
from karvan.store.program import Prepared
from karvan.torch_internals import TENSOR_VERSION

_MOST = 8  # the oldest is dropped if more are prepared without being used


class _Entry(NamedTuple):
    tensors: list[Any]  # held, so that no other tensor gets the id of one
    versions: list[Any]  # of their writes
    inputs: Inputs
    prepared: Prepared

    def is_of(self, tensors: list[Any]) -> bool:
        """Whether these are the same tensors, and nobody has written to them."""
        return (
            len(self.tensors) == len(tensors)
            and all(map(operator.is_, self.tensors, tensors))
            and self.versions == _versions(tensors)
        )


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
        tensors = self._tensors(batch)
        entry = _Entry(tensors, _versions(tensors), inputs, prepared)
        with self._lock:
            self._entries.append(entry)

    def take(self, batch: Mapping[str, Any]) -> tuple[Inputs, Prepared] | None:
        """The prepared state of a batch, which serves one forward; None if it was not prepared."""
        if not self._entries:
            return None
        tensors = self._tensors(batch)
        with self._lock:
            for index, entry in enumerate(self._entries):
                if entry.is_of(tensors):
                    del self._entries[index]
                    return entry.inputs, entry.prepared
        return None

    def _tensors(self, batch: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = [batch.get(REFERENCE)]
        for name in self._features:
            entry = batch.get(name)
            if isinstance(entry, Ragged):
                found += [entry.values, entry.offsets, entry.weights]
            elif isinstance(entry, NestedRagged):
                found += [entry.values, entry.inner, entry.outer]
            else:
                found.append(entry)
        return found


def _versions(tensors: list[Any]) -> list[Any]:
    return [getattr(tensor, TENSOR_VERSION, None) for tensor in tensors]
