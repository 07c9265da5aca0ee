"""Data sets of torch whose records workers lease: `ElasticDataset`, and `ElasticImageFolder` of images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.data import default_collate

from karvan.compat.elasticai_api.common.data_shard_service import DataShardService


class ElasticDataset(torch.utils.data.IterableDataset[Any]):
    """Batches of a data set's samples, shard by shard: `for batch in DataLoader(data, batch_size=None)`.

    Report each batch by `service.report_batch_done(len(labels))` before the next one. A batch has records of
    one shard; the last one of a shard may be short.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        data_shard_service: DataShardService,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._dataset = dataset
        self._service = data_shard_service
        self._collate = collate_fn

    def __iter__(self) -> Iterator[Any]:
        size = self._service.batch_size
        while (shard := self._service.fetch_shard()) is not None:
            numbers = shard.numbers()
            for first in range(0, len(numbers), size):
                yield self._collate([self._dataset[number] for number in numbers[first : first + size]])


def __getattr__(name: str) -> Any:
    if name == "ElasticImageFolder":
        return _image_folder()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


@cache
def _image_folder() -> type:
    """The class, which needs torchvision."""
    from torchvision.datasets import ImageFolder

    class ElasticImageFolder(ImageFolder):  # type: ignore[misc]
        """torchvision's ImageFolder; after `set_data_shard_service` its samples are those of records."""

        _data_shard_service: DataShardService | None = None

        def set_data_shard_service(self, data_shard_service: DataShardService) -> None:
            """Give the samples of the records that this service leases, whatever index is asked for."""
            self._data_shard_service = data_shard_service

        def __len__(self) -> int:
            return len(self.samples) if self._data_shard_service is None else sys.maxsize

        def __getitem__(self, index: int) -> Any:
            service = self._data_shard_service
            return super().__getitem__(index if service is None else service.fetch_record_index())

    return ElasticImageFolder
