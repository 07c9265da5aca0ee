"""`TrainCtx`: the context of `persia.ctx` that trains a model and its rows; and the first generation's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from karvan import distributed
from karvan.compat.persia.batches import PersiaTrainingBatch, non_ids_of
from karvan.compat.persia.config import EmbeddingConfig, unsupported, warn_of_tuning
from karvan.compat.persia.contexts import THREADS, EmbeddingCtx, Prepared, PreprocessMode, check_filenames
from karvan.compat.persia.embedding import EmbeddedModel, Optimizer
from karvan.compat.persia.env import (
    DistributedBaseOption,
    connect,
    get_default_distributed_option,
    get_rank,
    get_world_size,
    wait_for_roles,
)
from karvan.compat.unsupported import unsupported_method
from karvan.embedding.optim.base import SparseOptimizer
from karvan.job.roles import Role
from karvan.presets import persia
from karvan.train import EvalContext, TrainContext
from karvan.train.device_placement import device_of as device_of_model

_QUEUES = "gradients are sent while training continues, as far as embedding_staleness allows."
_FIRST = {"grad_scaler", "sparse_optimizer", "port", "data_queue_size"}  # options of the first generation


class TrainCtx(EmbeddingCtx):
    """Trains a model and its rows.

    mixed_precision: the loss is scaled, for models that compute in half precision; an overflow skips the step
    and divides the scale by grad_scalar_update_factor. distributed_option: see `persia.distributed`.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """A context of the first generation, if its options are."""
        if _FIRST.isdisjoint(options):
            return super().__new__(cls)
        if "dense_optimizer" in options:
            raise unsupported(
                "TrainCtx with dense_optimizer and options of the first generation",
                "sparse_optimizer is called embedding_optimizer, and DataLoader takes embedding_staleness.",
            )
        return FirstTrainCtx(*args, **options)

    def __init__(
        self,
        embedding_optimizer: Optimizer,
        dense_optimizer: torch.optim.Optimizer,
        grad_scalar_update_factor: float = 4,
        backward_buffer_size: int = 10,
        backward_workers_size: int = 8,
        grad_update_buffer_size: int = 60,
        lookup_emb_directly: bool = True,
        mixed_precision: bool = True,
        distributed_option: DistributedBaseOption | None = None,
        *,
        model: nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
    ) -> None:
        super().__init__(
            PreprocessMode.TRAIN,
            model,
            embedding_config,
            threadpool_worker_size=threadpool_worker_size,
            device_id=device_id,
        )
        if not isinstance(embedding_optimizer, Optimizer):
            raise TypeError(
                "TrainCtx expects an embedding_optimizer of persia.embedding.optim, "
                f"got {type(embedding_optimizer).__name__}."
            )
        if not grad_scalar_update_factor > 1:
            raise ValueError(
                f"grad_scalar_update_factor divides the scale, so it must be above 1, "
                f"got {grad_scalar_update_factor}."
            )
        if not lookup_emb_directly:
            raise unsupported("TrainCtx(lookup_emb_directly=False)", "trainers look rows up themselves.")
        warn_of_tuning(_QUEUES, backward_buffer_size=(backward_buffer_size, 10))
        warn_of_tuning(_QUEUES, grad_update_buffer_size=(grad_update_buffer_size, 60))
        warn_of_tuning(THREADS, backward_workers_size=(backward_workers_size, 8))
        self.embedding_optimizer = embedding_optimizer
        self.dense_optimizer = dense_optimizer
        self.mixed_precision = mixed_precision
        self.grad_scalar_update_factor = grad_scalar_update_factor
        self.world_size, self.rank_id = get_world_size(), get_rank()
        self.distributed_option = distributed_option or get_default_distributed_option(device_id)
        device = self.device or next(_parameters(dense_optimizer)).device
        self.grad_scaler = torch.amp.GradScaler(
            device.type, backoff_factor=1 / grad_scalar_update_factor, enabled=mixed_precision
        )

    def _open(self, staleness: int | None, prefetch: int) -> tuple[Any, EmbeddedModel]:
        connect(staleness)
        embedded = self._embed(nn.ParameterList(_parameters(self.dense_optimizer)))
        context = TrainContext(
            embedded,
            sparse_optimizer=self.embedding_optimizer.native(self.embedding_config.bound),
            dense_optimizer=self.dense_optimizer,
            precision=self.grad_scaler,
            label=None,
            nonfinite="skip_tables",
            dense_reduce=self.distributed_option.dense_reduce,
            device=self.device,
            prefetch=prefetch,
        )
        return context, embedded

    @override
    def evaluation(self) -> EvalContext:
        context: TrainContext = self.open()[0]
        return context.eval()

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[Tensor] | None]:
        """The output of the model for a batch, which `backward` then trains on, and the labels."""
        if self.model is None:
            raise ValueError("forward expects a context with a model, got one without: model=….")
        context = self._begin_step(batch)
        output, _ = context.forward(batch.columns)
        return output, batch.labels(context.device)

    @override
    def prepare_features(self, batch: PersiaTrainingBatch) -> Prepared:
        """The program then calls its model, and `backward`."""
        self._begin_step(batch)
        return super().prepare_features(batch)

    def _begin_step(self, batch: PersiaTrainingBatch) -> TrainContext:
        if not batch.requires_grad:
            raise ValueError(
                "TrainCtx expects batches with requires_grad=True, got one without: use it in eval_ctx()."
            )
        context: TrainContext = self.open()[0]
        if context.connection.joint_steps:
            self.dumps.join()
        return context

    def backward(self, loss: Tensor, embedding_gradient_check_frequency: int = 20) -> Tensor:
        """Train on the batch of the last forward; returns the scaled loss.

        Gradients are checked in every step, more often than embedding_gradient_check_frequency asks for.
        """
        if embedding_gradient_check_frequency < 1:
            raise ValueError(
                "embedding_gradient_check_frequency must be at least 1, "
                f"got {embedding_gradient_check_frequency}."
            )
        context, _ = self.open()
        scaled: Tensor = self.grad_scaler.scale(loss.detach())
        context.backward(loss)
        return scaled

    def dump_checkpoint(  # type: ignore[override]  # as in PERSIA
        self,
        dst_dir: str,
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
        **filenames: str,
    ) -> None:
        """Write a checkpoint; `EmbeddingCtx.dump_checkpoint` describes the arguments."""
        check_filenames(dense_model_filename=dense_model_filename, opt_filename=opt_filename)
        names = {"jit_dense_filename": jit_dense_model_filename, **filenames}
        super().dump_checkpoint(dst_dir, blocking=blocking, with_jit_model=with_jit_model, **names)

    def load_checkpoint(  # type: ignore[override]  # as in PERSIA
        self,
        src_dir: str,
        map_location: str | None = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        **filenames: str,
    ) -> None:
        """Read a checkpoint; `EmbeddingCtx.load_checkpoint` describes the arguments."""
        check_filenames(dense_model_filename=dense_model_filename, opt_filename=opt_filename)
        super().load_checkpoint(src_dir, map_location, blocking=blocking, **filenames)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_LISTENS = "trainers ask for their batches, and listen at no port."


class FirstTrainCtx(EmbeddingCtx):
    """Trains rows; the net, its optimizer and the scale of the loss are the program's.

        scaler.scale(loss).backward()
        finite = ctx.on_after_backward(scaler.get_scale(), batch_idx)
        scaler.step(dense_optimizer)

    The rows' gradients wait in Karvan's engine from the backward on; `on_after_backward` has the optimizer of
    the rows apply them.

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
        warn_of_tuning(_LISTENS, port=(port, None))
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
        embedded = self._embed(nn.Identity())
        self._optimizer = self._rows.native(self.embedding_config.bound)
        self._optimizer.attach(embedded)
        embedded.train()
        return nullcontext(embedded), embedded

    def data_loader(self) -> Iterator[PersiaTrainingBatch]:
        """The batches that the job's loaders send; one epoch."""
        self.open(1)
        if self._checkpoint is not None:
            self.load_embedding(self._checkpoint)
            self._checkpoint = None
        wait_for_roles(Role.LOADER)
        for batch in self.stream(prefetch=self._queue):
            yield PersiaTrainingBatch(batch)

    def prepare_features(self, batch: PersiaTrainingBatch) -> Any:
        """((numbers, vectors), target) of a batch; several targets are a list."""
        _, embedded = self.open(1)
        engine = embedded.embeddings
        engine.gradient_scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        with embedded.features_only():
            _, vectors = embedded(batch.columns)
        device = self.device or device_of_model(embedded)
        targets = batch.labels(device)
        dense = [tensor.to(device) for tensor in non_ids_of(batch.columns)]
        sparse = [vector.to(device) for vector in vectors]
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

    forward = unsupported_method(
        "forward of the first generation of PERSIA", "use prepare_features, and call the model."
    )
    backward = unsupported_method("backward of the first generation of PERSIA", "use on_after_backward.")
