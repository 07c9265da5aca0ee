"""FBGEMM's tables on the GPU, alone and under TorchRec: a fixed number of rows, ids mapped to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from gpu_lines.device import Device


def is_available(device: Device) -> bool:
    """Whether FBGEMM and TorchRec can be measured on this device."""
    return device.is_gpu and find_spec("fbgemm_gpu") is not None and find_spec("torchrec") is not None


def train_step(
    rows: int,
    dim: int,
    batches: Sequence[dict[str, Tensor]],
    optimizer: str,
    pooled: bool,
) -> Callable[[int], None]:
    """A step of lookup, backward and update over one table for each name of the batches.

    optimizer: a name of FBGEMM's `OptimType`. pooled: sums of one id, or one vector for each id.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    names = list(batches[0])
    count = len(batches[0][names[0]])
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * len(names),
        optimizer=getattr(OptimType, optimizer),
        learning_rate=0.01,
        pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    ids = [torch.cat([batch[name] for name in names]) for batch in batches]
    device = ids[0].device
    offsets = torch.arange(len(names) * count + 1, device=device)
    shape = (count, len(names) * dim) if pooled else (len(names) * count, dim)
    gradient = torch.randn(shape, device=device)

    def step(number: int) -> None:
        tables(ids[number % len(ids)], offsets).backward(gradient)

    return step


def torchrec_step(rows: int, dim: int, batches: Sequence[dict[str, Tensor]]) -> Callable[[int], None]:
    """A step of TorchRec's collection of bags in one process, with a fused Adagrad."""
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    names = list(batches[0])
    count, device = len(batches[0][names[0]]), batches[0][names[0]].device
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[name])
        for name in names
    ]
    bags = FusedEmbeddingBagCollection(tables, torch.optim.Adagrad, {"lr": 0.01}, device=device)
    lengths = torch.ones(len(names) * count, dtype=torch.int32, device=device)
    features = [
        KeyedJaggedTensor(names, torch.cat([batch[name] for name in names]), lengths=lengths)
        for batch in batches
    ]
    gradient = torch.randn(count, len(names) * dim, device=device)

    def step(number: int) -> None:
        bags(features[number % len(features)]).values().backward(gradient)

    return step


def rows_of(batches: Sequence[dict[str, Tensor]]) -> tuple[int, list[dict[str, Tensor]]]:
    """The batches with keys mapped to rows, and how many rows the largest table needs."""
    most, mapped = 0, [dict[str, Tensor]() for _ in batches]
    for name in batches[0]:
        keys, rows = torch.cat([batch[name] for batch in batches]).unique(return_inverse=True)
        most = max(most, len(keys))
        for batch, part in zip(mapped, rows.chunk(len(batches)), strict=True):
            batch[name] = part
    return most, mapped
