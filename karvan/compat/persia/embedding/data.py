"""`persia.embedding.data`: ids, numbers and labels of a batch, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.compat.persia import env

Array = NDArray[Any]

MAX_BATCH_SIZE = 65535
_DTYPES = tuple(map(np.dtype, ("bool", "int8", "int16", "int32", "int64", "float32", "float64", "uint8")))


class IDTypeFeature:
    """A feature with any number of ids in each sample: a 1-D array of uint64 for each."""

    def __init__(self, name: str, data: Sequence[Array]) -> None:
        if not env.PERSIA_SKIP_CHECK_DATA:
            for sample in data:
                _check_ids(name, sample)
        self.name = name
        self.data = data

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.data)


IDTypeFeatureSparse = IDTypeFeature  # its name in earlier versions


class IDTypeFeatureWithSingleID:
    """A feature with exactly one id in each sample: a 1-D array of uint64."""

    def __init__(self, name: str, data: Array) -> None:
        if not env.PERSIA_SKIP_CHECK_DATA:
            _check_ids(name, data)
        self.name = name
        self.data = data

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return len(self.data)


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
        id_type_features: Sequence[IDTypeFeature | IDTypeFeatureWithSingleID],
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
        seen = set()
        for feature in self.id_type_features:
            if not isinstance(feature, IDTypeFeature | IDTypeFeatureWithSingleID):
                raise TypeError(
                    "PersiaBatch expects IDTypeFeature or IDTypeFeatureWithSingleID, "
                    f"got {type(feature).__name__}."
                )
            if feature.name in seen:
                raise ValueError(f"PersiaBatch expects each feature of ids once, got '{feature.name}' twice.")
            seen.add(feature.name)
        for part in (*self.id_type_features, *self.non_id_type_features, *self.labels):
            if part.batch_size != self.batch_size:
                raise ValueError(
                    f"PersiaBatch expects {self.batch_size} samples in '{part.name}', got {part.batch_size}."
                )

    def to_bytes(self) -> bytes:
        """The batch for `from_bytes`, in torch's format."""
        content = BytesIO()
        torch.save(
            {
                "ids": [(each.name, *_ids_parts(each)) for each in self.id_type_features],
                "non_ids": [(each.name, torch.from_numpy(each.data)) for each in self.non_id_type_features],
                "labels": [(each.name, torch.from_numpy(each.data)) for each in self.labels],
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
            [_ids_feature(*each) for each in parts["ids"]],
            [NonIDTypeFeature(values.numpy(), name) for name, values in parts["non_ids"]],
            [Label(values.numpy(), name) for name, values in parts["labels"]],
            requires_grad=parts["requires_grad"],
            meta=parts["meta"],
        )

    @property
    def data(self) -> PersiaBatch:
        """The batch itself, as `send_data` of PERSIA's own core takes it."""
        return self


def _ids_parts(feature: IDTypeFeature | IDTypeFeatureWithSingleID) -> tuple[Tensor, list[int] | None]:
    if isinstance(feature, IDTypeFeatureWithSingleID):
        return torch.from_numpy(feature.data.view(np.int64)), None
    values = np.concatenate([*feature.data, np.zeros(0, np.uint64)])
    return torch.from_numpy(values.view(np.int64)), [len(sample) for sample in feature.data]


def _ids_feature(
    name: str, values: Tensor, lengths: list[int] | None
) -> IDTypeFeature | IDTypeFeatureWithSingleID:
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
