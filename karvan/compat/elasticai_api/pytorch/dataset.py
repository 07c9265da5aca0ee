"""`ElasticDataset`: a data set of torch whose records workers lease, as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
