"""`persia.ctx`: contexts that send, train, evaluate; each is a context of Karvan under PERSIA's names.

| PERSIA | Karvan |
|---|---|
| `DataCtx` | `kv.LoaderContext` |
| `TrainCtx` | `kv.TrainContext` of the net together with its tables |
| `EmbeddingCtx`, `eval_ctx()` | `kv.EvalContext`, that of the enclosing `TrainCtx` if there is one |
| `TrainCtx(sparse_optimizer=…)` | the first generation's: see `first_generation.py` |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from karvan.compat.persia.bridge.batch_layout import PersiaTrainingBatch
from karvan.compat.persia.bridge.connection import connect
from karvan.compat.persia.bridge.contexts import (
    THREADS,
    BaseCtx,
    DataCtx,
    EmbeddingCtx,
    Prepared,
    PreprocessMode,
    check_filenames,
    cnt_ctx,
)
from karvan.compat.persia.bridge.contexts import prepare_feature as _prepare_feature
from karvan.compat.persia.bridge.embedded_model import EmbeddedModel
from karvan.compat.persia.bridge.unsupported import Tuning, unsupported, warn_of_tuning
from karvan.compat.persia.distributed import DistributedBaseOption, get_default_distributed_option
from karvan.compat.persia.embedding import EmbeddingConfig
from karvan.compat.persia.embedding.optim import Optimizer
from karvan.compat.persia.env import get_rank, get_world_size
from karvan.compat.persia.first_generation import FirstTrainCtx
from karvan.train import EvalContext, TrainContext

__all__ = [
    "BaseCtx",
    "DataCtx",
    "EmbeddingCtx",
    "InferCtx",
    "PreprocessMode",
    "TrainCtx",
    "_prepare_feature",
    "cnt_ctx",
    "eval_ctx",
    "inference_ctx",
    "init_backend",
]

_QUEUES = "gradients are sent while training continues, as far as embedding_staleness allows."
_FIRST = {"grad_scaler", "sparse_optimizer", "port", "data_queue_size"}  # options of the first generation
_backends: list[DataCtx] = []  # at most one


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
        warn_of_tuning(
            Tuning("backward_buffer_size", backward_buffer_size, 10, _QUEUES),
            Tuning("backward_workers_size", backward_workers_size, 8, THREADS),
            Tuning("grad_update_buffer_size", grad_update_buffer_size, 60, _QUEUES),
        )
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
        config = self.embedding_config
        net = self.model or nn.ParameterList(_parameters(self.dense_optimizer))
        embedded = EmbeddedModel(net, self.slots, config, called=self.model is not None)
        context = TrainContext(
            embedded,
            sparse_optimizer=self.embedding_optimizer.native(config.bound),
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


class InferCtx(EmbeddingCtx):
    """PERSIA's context for a server of inference, which is not supported."""

    def __init__(self, embedding_worker_address_list: Sequence[str], *args: Any, **options: Any) -> None:
        raise unsupported(
            "InferCtx", "use kv.InferContext(model, checkpoint), or inference_ctx(model=…) in a job."
        )


def eval_ctx(*args: Any, **options: Any) -> EmbeddingCtx:
    """A context that evaluates."""
    return EmbeddingCtx(PreprocessMode.EVAL, *args, **options)


def inference_ctx(*args: Any, **options: Any) -> EmbeddingCtx:
    """A context for batches without labels."""
    return EmbeddingCtx(PreprocessMode.INFERENCE, *args, **options)


def init_backend(
    worker_size: int = 20, *, init_output: bool = True, wait_server_ready: bool = True
) -> DataCtx:
    """The first generation's `DataCtx`: `init_backend().send_data(batch)`; one for a process."""
    warn_of_tuning(Tuning("worker_size", worker_size, 20, THREADS))
    if not init_output or not wait_server_ready:
        raise unsupported(
            "init_backend with init_output or wait_server_ready False",
            "it is for programs that send batches, which wait until trainers take them.",
        )
    if not _backends:
        _backends.append(DataCtx())
    return _backends[0]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
