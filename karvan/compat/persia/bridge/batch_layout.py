"""PERSIA's batches as Karvan's, and back: ids under the names of their slots, other arrays by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan.cluster.loader_stream.stream import LoadedBatch
from karvan.compat.persia.embedding.data import Array, IDTypeFeature, IDTypeFeatureWithSingleID, PersiaBatch
from karvan.ragged import Ragged

_NON_ID = "persia.non_id."
_LABEL = "persia.label."


def columns_of(batch: PersiaBatch) -> dict[str, Tensor | Ragged]:
    """The columns of a batch, for `kv.LoaderContext.send` or a `Batch`."""
    columns: dict[str, Tensor | Ragged] = {each.name: _ids(each) for each in batch.id_type_features}
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
    made = LoadedBatch.trusted(dict(columns_of(batch)), batch.batch_size)
    made.meta = meta_of(batch)
    return made


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
    found: list[Tensor] = []
    while (entry := columns.get(f"{prefix}{len(found)}")) is not None:
        found.append(entry)
    return found


def _ids(feature: IDTypeFeature | IDTypeFeatureWithSingleID) -> Tensor | Ragged:
    if isinstance(feature, IDTypeFeatureWithSingleID):
        return _tensor(feature.data.view(np.int64))
    samples = feature.data
    offsets = np.zeros(len(samples) + 1, np.int64)
    np.cumsum([len(sample) for sample in samples], out=offsets[1:])
    values = np.concatenate(samples) if len(samples) else np.zeros(0, np.uint64)
    return Ragged(torch.from_numpy(values.view(np.int64)), torch.from_numpy(offsets))


def _tensor(array: Array) -> Tensor:
    contiguous = np.ascontiguousarray(array)
    return torch.from_numpy(contiguous if contiguous.flags.writeable else contiguous.copy())
