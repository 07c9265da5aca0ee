"""`persia.prelude`: the batches of PERSIA's first generation, to which arrays are added one by one."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from typing import Any

import numpy as np

from karvan.compat.persia.embedding.data import Array, IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch

Feature = tuple[str, Sequence[Array]]


class PyPersiaBatchData:
    """A batch that grows; the document's older names (dense, sparse, target) mean the same as its newer ones.

    `batch()` is what it has, as a `PersiaBatch`; a batch without labels is not trained on.
    """

    def __init__(self) -> None:
        self._ids: list[IDTypeFeature] = []
        self._non_ids: list[NonIDTypeFeature] = []
        self._labels: list[Label] = []

    def add_non_id_type_feature(self, data: Array) -> None:
        """Add numbers of all samples."""
        self._non_ids.append(NonIDTypeFeature(data))

    def add_dense(self, data: Sequence[Array]) -> None:
        """Add several 2-D arrays of float32."""
        for each in data:
            self.add_dense_f32(each)

    def add_dense_f32(self, data: Array) -> None:
        """Add an array of float32."""
        self._add_dense(data, "float32")

    def add_dense_f64(self, data: Array) -> None:
        """Add an array of float64."""
        self._add_dense(data, "float64")

    def add_dense_i32(self, data: Array) -> None:
        """Add an array of int32."""
        self._add_dense(data, "int32")

    def add_dense_i64(self, data: Array) -> None:
        """Add an array of int64."""
        self._add_dense(data, "int64")

    def _add_dense(self, data: Array, dtype: str) -> None:
        if not isinstance(data, np.ndarray) or data.dtype != dtype or data.ndim != 2:
            shown = (
                f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
            )
            raise TypeError(f"Dense data expects a 2-D array of {dtype}, got {shown}.")
        self.add_non_id_type_feature(data)

    def add_id_type_features(self, features: Sequence[Feature]) -> None:
        """Add features: for each its name, and an array of uint64 ids for each sample."""
        self._ids += [IDTypeFeature(name, data) for name, data in features]

    add_sparse = add_id_type_features

    def add_label(self, data: Array) -> None:
        """Add targets of all samples."""
        self._labels.append(Label(data))

    add_target = add_label

    def batch(self) -> PersiaBatch:
        """The batch."""
        return PersiaBatch(self._ids, self._non_ids, self._labels, requires_grad=bool(self._labels))


class PersiaBatchDataSender:
    """Takes the batches of a dataset for its DataLoader, at most `size` in advance; 0 is any number."""

    def __init__(self, size: int = 0) -> None:
        self._queue: Queue[Any] = Queue(size)
        self._left = False

    def send(self, batch: PersiaBatch | PyPersiaBatchData) -> None:
        """Add a batch."""
        if self._left:
            raise RuntimeError(
                "The iteration over the DataLoader has ended: its batches are not needed any more."
            )
        self._queue.put(batch)

    def take(self) -> Any:
        """The next batch; None after the last one."""
        return self._queue.get()

    def end(self) -> None:
        """There are no more batches."""
        if not self._left:
            self._queue.put(None)

    def close(self) -> None:
        """Nobody takes batches any more: the next `send` is an error, and one that waits goes on."""
        self._left = True
        while not self._queue.empty():
            self._queue.get()


PyPersiaBatchDataSender = PersiaBatchDataSender
