"""PERSIA's batches: ids, numbers and labels as NumPy arrays, and as columns of Karvan, and back.

Columns have ids under the names of their slots, other arrays by number. Batches of the first generation grow:
arrays are added to a `PyPersiaBatchData` one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partialmethod
from io import BytesIO
from queue import Queue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.cluster.loader_stream import LoadedBatch
from karvan.compat.persia import env
from karvan.ragged import Ragged

Array = NDArray[Any]

MAX_BATCH_SIZE = 65535
_DTYPES = tuple(map(np.dtype, ("bool", "int8", "int16", "int32", "int64", "float32", "float64", "uint8")))


class _IDs:
    def __init__(self, name: str, data: Any) -> None:
        if not env.PERSIA_SKIP_CHECK_DATA:
            for ids in [data] if isinstance(self, IDTypeFeatureWithSingleID) else data:
                _check_ids(name, ids)
        self.name = name
        self.data = data

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.data)


class IDTypeFeature(_IDs):
    """A feature with any number of ids in each sample: a 1-D array of uint64 for each."""


class IDTypeFeatureWithSingleID(_IDs):
    """A feature with exactly one id in each sample: a 1-D array of uint64."""


IDTypeFeatureSparse = IDTypeFeature  # its name in earlier versions


class NdarrayDataBase:
    """An array whose first dimension is the samples."""

    DEFAULT_NAME = "ndarray_base"

    def __init__(self, data: Array, name: str | None = None) -> None:
        if not env.PERSIA_SKIP_CHECK_DATA:
            _check_array(name or self.DEFAULT_NAME, data)
        self.data = data
        self._name = name

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return int(self.data.shape[0])

    @property
    def name(self) -> str:
        """The name, or that of all arrays of this kind without one."""
        return self._name or self.DEFAULT_NAME

    def __len__(self) -> int:
        return len(self.data)


class Label(NdarrayDataBase):
    """Targets of the samples."""

    DEFAULT_NAME = "label_anonymous"


class NonIDTypeFeature(NdarrayDataBase):
    """Numbers of the samples."""

    DEFAULT_NAME = "non_id_type_feature_anonymous"


class PersiaBatch:
    """Features and labels of the same samples.

    requires_grad: whether it is trained on, which needs labels. meta: bytes that the trainer receives.
    """

    def __init__(
        self,
        id_type_features: Sequence[_IDs],
        non_id_type_features: Sequence[NonIDTypeFeature] | None = None,
        labels: Sequence[Label] | None = None,
        batch_size: int | None = None,
        requires_grad: bool = True,
        meta: bytes | None = None,
    ) -> None:
        if not id_type_features:
            raise ValueError("PersiaBatch expects at least one feature of ids, got none.")
        if requires_grad and not labels:
            raise RuntimeError(
                "PersiaBatch with requires_grad=True expects labels, got none: add them, or pass "
                "requires_grad=False for a batch that is not trained on."
            )
        if meta is not None and not isinstance(meta, bytes):
            raise TypeError(f"PersiaBatch expects meta as bytes, got {type(meta).__name__}.")
        self.id_type_features = list(id_type_features)
        self.non_id_type_features = list(non_id_type_features or ())
        self.labels = list(labels or ())
        self.batch_size = id_type_features[0].batch_size if batch_size is None else batch_size
        self.requires_grad = requires_grad
        self.meta = meta
        self._check()

    def _check(self) -> None:
        if self.batch_size > MAX_BATCH_SIZE:
            raise ValueError(f"PersiaBatch expects at most {MAX_BATCH_SIZE} samples, got {self.batch_size}.")
        names = set()
        for feature in self.id_type_features:
            if not isinstance(feature, _IDs):
                raise TypeError(
                    "PersiaBatch expects IDTypeFeature or IDTypeFeatureWithSingleID, "
                    f"got {type(feature).__name__}."
                )
            if feature.name in names:
                raise ValueError(f"PersiaBatch expects each feature of ids once, got '{feature.name}' twice.")
            names.add(feature.name)
        parts: list[_IDs | NdarrayDataBase] = [
            *self.id_type_features,
            *self.non_id_type_features,
            *self.labels,
        ]
        for part in parts:
            if part.batch_size != self.batch_size:
                raise ValueError(
                    f"PersiaBatch expects {self.batch_size} samples in '{part.name}', got {part.batch_size}."
                )

    def to_bytes(self) -> bytes:
        """The batch for `from_bytes`, in torch's format."""
        content = BytesIO()
        torch.save(
            {
                "ids": [(feature.name, *_ids_parts(feature)) for feature in self.id_type_features],
                "non_ids": [(part.name, torch.from_numpy(part.data)) for part in self.non_id_type_features],
                "labels": [(label.name, torch.from_numpy(label.data)) for label in self.labels],
                "requires_grad": self.requires_grad,
                "meta": self.meta,
            },
            content,
        )
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> PersiaBatch:
        """The batch of `to_bytes`; anything else is an error, and nothing of it is run."""
        parts = torch.load(BytesIO(content), weights_only=True)
        return cls(
            [_ids_feature(*part) for part in parts["ids"]],
            [NonIDTypeFeature(values.numpy(), name) for name, values in parts["non_ids"]],
            [Label(values.numpy(), name) for name, values in parts["labels"]],
            requires_grad=parts["requires_grad"],
            meta=parts["meta"],
        )

    @property
    def data(self) -> PersiaBatch:
        """The batch itself, as `send_data` of PERSIA's own core takes it."""
        return self


def _ids_parts(feature: _IDs) -> tuple[Tensor, list[int] | None]:
    ids = _ids(feature)
    return (ids.values, ids.lengths().tolist()) if isinstance(ids, Ragged) else (ids, None)


def _ids_feature(name: str, values: Tensor, lengths: list[int] | None) -> _IDs:
    ids = values.numpy().view(np.uint64)
    if lengths is None:
        return IDTypeFeatureWithSingleID(name, ids)
    return IDTypeFeature(name, np.split(ids, np.cumsum(lengths)[:-1]))


def _check_ids(name: str, ids: object) -> None:
    if not isinstance(ids, np.ndarray):
        raise TypeError(f"Feature '{name}' expects arrays of NumPy, got {type(ids).__name__}.")
    if ids.ndim != 1:
        raise ValueError(f"Feature '{name}' expects ids in one dimension, got shape {ids.shape}.")
    if ids.dtype != np.uint64:
        raise TypeError(f"Feature '{name}' expects ids of uint64, got {ids.dtype}.")


def _check_array(name: str, data: object) -> None:
    if not isinstance(data, np.ndarray):
        raise TypeError(f"'{name}' expects an array of NumPy, got {type(data).__name__}.")
    if data.dtype not in _DTYPES:
        raise TypeError(f"'{name}' expects one of {', '.join(map(str, _DTYPES))}, got {data.dtype}.")
    if data.ndim < 1:
        raise ValueError(f"'{name}' expects a first dimension of samples, got a single number.")


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
        for item in data:
            self.add_dense_f32(item)

    def _add_dense(self, data: Array, *, dtype: str) -> None:
        """Add a 2-D array of one type."""
        if not isinstance(data, np.ndarray) or data.dtype != dtype or data.ndim != 2:
            shown = (
                f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
            )
            raise TypeError(f"Dense data expects a 2-D array of {dtype}, got {shown}.")
        self.add_non_id_type_feature(data)

    add_dense_f32 = partialmethod(_add_dense, dtype="float32")
    add_dense_f64 = partialmethod(_add_dense, dtype="float64")
    add_dense_i32 = partialmethod(_add_dense, dtype="int32")
    add_dense_i64 = partialmethod(_add_dense, dtype="int64")

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

    @property
    def data(self) -> PersiaBatch:
        """The batch, too."""
        return self.batch()


class PersiaBatchDataSender:
    """Takes the batches of a dataset for its DataLoader, at most `size` in advance; 0 is any number."""

    def __init__(self, size: int = 0) -> None:
        self._queue: Queue[Any] = Queue(size)
        self._ended = False

    def send(self, batch: PersiaBatch | PyPersiaBatchData) -> None:
        """Add a batch."""
        if self._ended:
            raise RuntimeError(
                "The iteration over the DataLoader has ended: its batches are not needed any more."
            )
        self._queue.put(batch)

    def take(self) -> Any:
        """The next batch; None after the last one."""
        return self._queue.get()

    def end(self) -> None:
        """There are no more batches."""
        if not self._ended:
            self._queue.put(None)

    def close(self) -> None:
        """Nobody takes batches any more: the next `send` is an error, and one that waits goes on."""
        self._ended = True
        while not self._queue.empty():
            self._queue.get()


PyPersiaBatchDataSender = PersiaBatchDataSender


_NON_ID = "persia.non_id."
_LABEL = "persia.label."


def columns_of(batch: PersiaBatch) -> dict[str, Tensor | Ragged]:
    """The columns of a batch, for `kv.LoaderContext.send` or a `Batch`."""
    columns: dict[str, Tensor | Ragged] = {feature.name: _ids(feature) for feature in batch.id_type_features}
    for prefix, parts in ((_NON_ID, batch.non_id_type_features), (_LABEL, batch.labels)):
        columns |= {f"{prefix}{number}": _tensor(part.data) for number, part in enumerate(parts)}
    return columns


def meta_of(batch: PersiaBatch) -> dict[str, Any]:
    """What columns do not say, for JSON."""
    return {
        "ids": [feature.name for feature in batch.id_type_features],
        "non_ids": [part.name for part in batch.non_id_type_features],
        "labels": [part.name for part in batch.labels],
        "requires_grad": batch.requires_grad,
        "meta": None if batch.meta is None else batch.meta.decode("latin-1"),
    }


def local_batch(batch: PersiaBatch) -> LoadedBatch:
    """A batch of this process, as one that a loader would have sent."""
    loaded = LoadedBatch.trusted(dict(columns_of(batch)), batch.batch_size)
    loaded.meta = meta_of(batch)
    return loaded


class PersiaTrainingBatch:
    """A batch as a DataLoader gives it: for `forward` or `prepare_features` of a context."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns
        self._meta: Mapping[str, Any] = getattr(columns, "meta", None) or {}

    @property
    def ids(self) -> Sequence[str] | None:
        """The features of ids in their order; None in a batch without samples, which may not know it."""
        return self._meta.get("ids")

    @property
    def requires_grad(self) -> bool:
        """Whether it is for training."""
        return bool(self._meta.get("requires_grad", True))

    @property
    def meta(self) -> bytes | None:
        """What the batch was sent with."""
        text = self._meta.get("meta")
        return None if text is None else text.encode("latin-1")

    @property
    def non_id_type_names(self) -> list[str]:
        """The names of the arrays of numbers."""
        return list(self._meta.get("non_ids", ()))

    @property
    def label_names(self) -> list[str]:
        """The names of the labels."""
        return list(self._meta.get("labels", ()))

    def labels(self, device: torch.device) -> list[Tensor]:
        """The labels on a device."""
        return [label.to(device) for label in _numbered(self.columns, _LABEL)]


def non_ids_of(columns: Mapping[str, Any]) -> list[Tensor]:
    """The arrays of numbers of a batch."""
    return _numbered(columns, _NON_ID)


def no_ids(samples: int) -> Ragged:
    """The column of a slot that a batch does not have."""
    return Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(samples + 1, dtype=torch.int64))


def _numbered(columns: Mapping[str, Any], prefix: str) -> list[Tensor]:
    tensors: list[Tensor] = []
    while (entry := columns.get(f"{prefix}{len(tensors)}")) is not None:
        tensors.append(entry)
    return tensors


def _ids(feature: _IDs) -> Tensor | Ragged:
    if isinstance(feature, IDTypeFeatureWithSingleID):
        return _tensor(feature.data.view(np.int64))
    offsets = np.cumsum([0, *map(len, feature.data)], dtype=np.int64)
    values = np.concatenate(feature.data) if len(feature.data) else np.zeros(0, np.uint64)
    return Ragged(torch.from_numpy(values.view(np.int64)), torch.from_numpy(offsets))


def _tensor(array: Array) -> Tensor:
    contiguous = np.ascontiguousarray(array)
    return torch.from_numpy(contiguous if contiguous.flags.writeable else contiguous.copy())
