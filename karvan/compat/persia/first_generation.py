"""`TrainCtx` of PERSIA's first generation, in which a program scales its loss itself.

    scaler.scale(loss).backward()
    finite = ctx.on_after_backward(scaler.get_scale(), batch_idx)
    scaler.step(dense_optimizer)

The rows' gradients wait in Karvan's engine from the backward on; `on_after_backward` has the optimizer of the
rows apply them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.cluster.loader_stream.stream import from_loaders
from karvan.compat.persia.bridge.batch_layout import PersiaTrainingBatch, non_ids_of
from karvan.compat.persia.bridge.connection import connect, wait_for_roles
from karvan.compat.persia.bridge.contexts import EmbeddingCtx, PreprocessMode
from karvan.compat.persia.bridge.embedded_model import EmbeddedModel
from karvan.compat.persia.bridge.unsupported import Tuning, unsupported, warn_of_tuning
from karvan.compat.persia.embedding import EmbeddingConfig
from karvan.compat.persia.embedding.optim import Optimizer
from karvan.embedding.optim.base import SparseOptimizer
from karvan.job.roles import Role
from karvan.presets import persia
from karvan.train.step.device_placement import device_of

_LISTENS = "trainers ask for their batches, and listen at no port."


class FirstTrainCtx(EmbeddingCtx):
    """Trains rows; the net, its optimizer and the scale of the loss are the program's.

    grad_scaler: the program's, if it scales its loss. data_queue_size: batches requested in advance.
    """

    def __init__(
        self,
        grad_scaler: torch.amp.GradScaler | None = None,
        emb_initialization: tuple[float, float] = persia.INITIAL_RANGE,
        admit_probability: float = 1.0,
        sparse_optimizer: Optimizer | None = None,
        weight_bound: float = persia.WEIGHT_BOUND,
        *,
        port: int | None = None,
        data_queue_size: int = 10,
        device_id: int | None = None,
        embedding_checkpoint: str | None = None,
    ) -> None:
        if not isinstance(sparse_optimizer, Optimizer):
            raise TypeError(
                "TrainCtx expects a sparse_optimizer of persia.sparse.optim, "
                f"got {type(sparse_optimizer).__name__}."
            )
        warn_of_tuning(Tuning("port", port, None, _LISTENS))
        super().__init__(
            PreprocessMode.TRAIN,
            None,
            EmbeddingConfig(emb_initialization, admit_probability, weight_bound),
            device_id=device_id,
        )
        self._scaler = grad_scaler
        self._rows = sparse_optimizer
        self._optimizer: SparseOptimizer | None = None
        self._queue = data_queue_size
        self._checkpoint = embedding_checkpoint

    def _open(self, staleness: int | None, prefetch: int) -> tuple[Any, EmbeddedModel]:
        connect(staleness)
        if distributed.current().world_size > 1:
            raise unsupported(
                "TrainCtx of the first generation with several trainers",
                "pass model, embedding_optimizer and dense_optimizer, as the second generation does.",
            )
        config = self.embedding_config
        embedded = EmbeddedModel(nn.Identity(), self.slots, config, called=False)
        self._optimizer = self._rows.native(config.bound)
        self._optimizer.attach(embedded)
        embedded.train()
        return nullcontext(embedded), embedded

    def data_loader(self) -> Iterator[PersiaTrainingBatch]:
        """The batches that the job's loaders send; one epoch."""
        self.open(1)
        if self._checkpoint is not None:
            self.load_embedding(self._checkpoint)
            self._checkpoint = None
        workers = distributed.current().workers
        wait_for_roles(Role.LOADER)
        ids = None if workers is None else list(self.slots.slots_config)
        for batch in self.stream(from_loaders(prefetch=self._queue, ids=ids)):
            yield PersiaTrainingBatch(batch)

    def prepare_features(self, batch: PersiaTrainingBatch) -> Any:
        """((numbers, vectors), target) of a batch; several targets are a list."""
        _, embedded = self.open(1)
        engine = embedded.embeddings
        engine.gradient_scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        with embedded.features_only():
            _, vectors = embedded(batch.columns)
        device = self.device or device_of(embedded)
        targets = batch.labels(device)
        dense = [each.to(device) for each in non_ids_of(batch.columns)]
        sparse = [each.to(device) for each in vectors]
        return (dense, sparse), targets[0] if len(targets) == 1 else targets

    def on_after_backward(self, loss_scale: float, batch_idx: int, emb_grad_check_interval: int = 20) -> bool:
        """Apply the rows' gradients, divided by the scale of the loss; False if some are not finite.

        Then the slots that have them are skipped; all are if the loss is scaled, because a scaler skips the
        dense step as well. Gradients are checked for every batch.
        """
        if batch_idx < 0 or emb_grad_check_interval < 1:
            raise ValueError(
                "on_after_backward expects a batch_idx from 0 on and an interval from 1 on, "
                f"got {batch_idx} and {emb_grad_check_interval}."
            )
        _, embedded = self.open(1)
        used = embedded.embeddings.gradient_scale
        if loss_scale != used:
            raise ValueError(
                f"on_after_backward expects the scale that the loss had when its features were prepared, "
                f"{used}, got {loss_scale}: pass the scaler to TrainCtx(grad_scaler=…), and update it after "
                "on_after_backward."
            )
        assert self._optimizer is not None
        finite = self._optimizer.gradients_finite()
        if finite or self._scaler is None:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return finite

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[Tensor] | None]:
        """The second generation's."""
        raise unsupported("forward of the first generation", "use prepare_features, and call the model.")

    def backward(self, loss: Tensor, embedding_gradient_check_frequency: int = 20) -> Tensor:
        """The second generation's."""
        raise unsupported("backward of the first generation", "use on_after_backward.")
