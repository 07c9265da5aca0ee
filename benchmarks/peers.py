"""The peers of the sparse step: FBGEMM's CPU tables, TorchRec and plain torch, fed ids of rows.

All rows are written once before anything is timed, so that no peer pays for first touching its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
from workload import Ids, Shape

LEARNING_RATE = 0.05


def require_fbgemm() -> None:
    """Exit with the command that installs FBGEMM if it does not load."""
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError) as error:
        raise SystemExit(
            f"FBGEMM does not load ({error}); run: pip install --no-deps -r benchmarks/requirements.txt"
        ) from None


class Fbgemm:
    """FBGEMM table-batched embedding on the CPU with fused element-wise Adagrad."""

    def __init__(self, shape: Shape, batches: list[Ids]) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        spec = (shape.table_rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * shape.features,
            optimizer=OptimType.EXACT_ADAGRAD,
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM if shape.pooled else PoolingMode.NONE,
        )
        self.module.init_embedding_weights_uniform(-0.01, 0.01)
        for (accumulator,) in self.module.split_optimizer_states():
            accumulator.zero_()
        self._batches = [self._batch(ids, shape) for ids in batches]

    def stepper(self) -> Callable[[], None]:
        """Return a function that runs one step on the next batch."""
        batches = cycle(self._batches)

        def step() -> None:
            indices, offsets, gradient = next(batches)
            self.module(indices, offsets).backward(gradient)

        return step

    @staticmethod
    def _batch(ids: Ids, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        indices = torch.cat([torch.from_numpy(values) for values in ids.values])
        starts, base = [], 0
        for offsets in ids.offsets:
            starts.append(torch.from_numpy(offsets[:-1] + base))
            base += int(offsets[-1])
        starts.append(torch.tensor([base]))
        # Pooled features lie side by side, unpooled ones one after the other.
        gradient = torch.cat(ids.gradients, dim=1 if shape.pooled else 0)
        return indices, torch.cat(starts), gradient


class TorchRec:
    """TorchRec's collection of bags in one process, with FBGEMM's tables and fused Adagrad under it."""

    def __init__(self, shape: Shape, batches: list[Ids]) -> None:
        from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        names = [f"f{i}" for i in range(shape.features)]
        tables = [
            EmbeddingBagConfig(
                num_embeddings=shape.table_rows, embedding_dim=shape.dim, name=name, feature_names=[name]
            )
            for name in names
        ]
        self.module = FusedEmbeddingBagCollection(
            tables, torch.optim.Adagrad, {"lr": LEARNING_RATE}, device=torch.device("cpu")
        )
        for weight in self.module.state_dict().values():
            weight.uniform_(-0.01, 0.01)
        self._batches = [
            (
                KeyedJaggedTensor(
                    names,
                    torch.cat([torch.from_numpy(values) for values in ids.values]),
                    lengths=torch.cat([torch.from_numpy(offsets).diff().int() for offsets in ids.offsets]),
                ),
                torch.cat(ids.gradients, dim=1),
            )
            for ids in batches
        ]

    def stepper(self) -> Callable[[], None]:
        """Return a function that runs one step on the next batch."""
        batches = cycle(self._batches)

        def step() -> None:
            features, gradient = next(batches)
            self.module(features).values().backward(gradient)

        return step


class TorchBags:
    """One `torch.nn.EmbeddingBag(sparse=True)` per feature with `torch.optim.Adagrad`."""

    def __init__(self, shape: Shape, batches: list[Ids]) -> None:
        weights = (
            torch.empty(shape.table_rows, shape.dim).uniform_(-0.01, 0.01) for _ in range(shape.features)
        )
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(*weight.shape, mode="sum", sparse=True, _weight=weight)
            for weight in weights
        )
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, said aloud: else it warns
        self._optimizer = torch.optim.Adagrad(self.bags.parameters(), lr=LEARNING_RATE)
        self._batches = [
            (
                [torch.from_numpy(values) for values in ids.values],
                [torch.from_numpy(offsets[:-1].copy()) for offsets in ids.offsets],
                ids.gradients,
            )
            for ids in batches
        ]

    def stepper(self) -> Callable[[], None]:
        """Return a function that runs one step on the next batch."""
        batches = cycle(self._batches)

        def step() -> None:
            values, offsets, gradients = next(batches)
            outputs = [bag(v, o) for bag, v, o in zip(self.bags, values, offsets, strict=True)]
            torch.autograd.backward(outputs, gradients)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        return step
