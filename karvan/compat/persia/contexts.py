"""Contexts that send and evaluate, names of `persia.ctx`; each is a context of Karvan under PERSIA's names.

| PERSIA | Karvan |
|---|---|
| `DataCtx` | `kv.LoaderContext` |
| `TrainCtx` | `kv.TrainContext` of the net together with its tables; see `training.py` |
| `EmbeddingCtx`, `eval_ctx()` | `kv.EvalContext`, that of the enclosing `TrainCtx` if there is one |

A DataLoader says how stale lookups may be, and it is made inside of a context. So a context connects to its
job and makes its tables at the first thing that needs them: a DataLoader, a batch, a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from io import BytesIO
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.checkpoint import is_imported
from karvan.checkpoint.files import read_bytes
from karvan.cluster.loader.context import LoaderContext
from karvan.cluster.loader_stream import LoaderStream, from_loaders
from karvan.compat.cuda_fallback import device_of
from karvan.compat.persia.batches import (
    PersiaBatch,
    PersiaTrainingBatch,
    PyPersiaBatchData,
    columns_of,
    local_batch,
    meta_of,
    no_ids,
)
from karvan.compat.persia.config import (
    EMBEDDING_CONFIG,
    EmbeddingConfig,
    read_global_config,
    read_slots,
    unsupported,
    warn_of_tuning,
)
from karvan.compat.persia.dumps import Dumps, content_of, write_file
from karvan.compat.persia.embedding import EmbeddedModel, config_of_rows
from karvan.compat.persia.env import connect, join_job, wait_for_roles
from karvan.compat.programs import program_error
from karvan.job.checkpoint_url import local_path
from karvan.job.roles import Role
from karvan.process_end import first_at_exit, not_at_exit
from karvan.protocol.parameter_server import STATS
from karvan.train import EvalContext, TrainContext

Prepared = tuple[list[Tensor], list[Tensor], list[Tensor] | None]

THREADS = "Karvan uses the cores that it has; KARVAN_THREADS sets another number."
_BLOCKS = "a load always blocks."
PREFETCH = 10  # batches that are prepared in advance
_entered: list[BaseCtx] = []


class PreprocessMode(Enum):
    """What the features of a batch are for; those for inference have no labels."""

    TRAIN = 1
    EVAL = 2
    INFERENCE = 3


class BaseCtx:
    """A context; `cnt_ctx()` is the one that was entered last.

    device_id: the GPU of this process; None, or below 0, for the device that the model is on.
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        warn_of_tuning(THREADS, threadpool_worker_size=(threadpool_worker_size, 10))
        self.device_id = None if device_id is None or device_id < 0 else device_id
        self._stack = ExitStack()
        self._inner: EmbeddingCtx | None = None
        self._in_job = join_job()
        read_global_config()  # whose errors come first

    @property
    def device(self) -> torch.device | None:
        """The device of device_id; the CPU if there is no GPU, under `karvan run`."""
        return None if self.device_id is None else device_of(f"cuda:{self.device_id}")

    @property
    def common_context(self) -> CommonContext:
        """What PERSIA's own core offers to a context."""
        return CommonContext(self)

    def wait_servers_ready(self) -> None:
        """Wait until the job's parameter servers and embedding workers are there, if there is a job."""
        if self._in_job:
            wait_for_roles(Role.PARAMETER_SERVER, Role.EMBEDDING_WORKER)

    def embedding(self) -> EmbeddingCtx:
        """The context that looks rows up; for a plain `BaseCtx`, one that evaluates."""
        if self._inner is None:
            self._inner = self._stack.enter_context(
                EmbeddingCtx(PreprocessMode.EVAL, device_id=self.device_id)
            )
        return self._inner

    def __enter__(self) -> Self:
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.remove(self)
        self._stack.__exit__(kind, error, trace)


class DataCtx(BaseCtx):
    """Sends batches to the trainers of the job; the end of the context, or of the program, ends the epoch.

    Slots of PERSIA_EMBEDDING_CONFIG that a batch does not have are sent without ids. Without the variable,
    every batch has to have all slots of the trainers.
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        super().__init__(threadpool_worker_size, device_id)
        if not self._in_job:
            raise RuntimeError(
                "DataCtx sends batches to the trainers of a job, and this process belongs to none: expected "
                "a program that persia-launcher data-loader or karvan launch has started, or "
                "PERSIA_NATS_URL, the address of the job's registry."
            )
        wait_for_roles(Role.EMBEDDING_WORKER)
        self._slots = list(read_slots().slots_config) if os.environ.get(EMBEDDING_CONFIG) else []
        self._loader = LoaderContext()
        self._stack.push(self._loader)
        first_at_exit(self._end)  # of a program that does not enter the context
        self._stack.callback(not_at_exit, self._end)

    def _end(self) -> None:
        error = program_error()
        self._stack.__exit__(None if error is None else type(error), error, None)

    def send_data(self, data: PersiaBatch | PyPersiaBatchData) -> None:
        """Send a batch; waits while the queue of its trainer is full."""
        batch = data.data
        absent = dict.fromkeys(self._slots, no_ids(batch.batch_size))
        self._loader.send({**absent, **columns_of(batch)}, meta_of(batch))


class EmbeddingCtx(BaseCtx):
    """Vectors of batches, and the output of a model for them; rows are not changed."""

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        model: nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        *,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
    ) -> None:
        super().__init__(threadpool_worker_size, device_id)
        self.preprocess_mode = preprocess_mode
        self.model = model
        self._given_config = embedding_config
        self._embedded: EmbeddedModel | None = None
        self._context: EvalContext | TrainContext | None = None
        self._dumps: Dumps | None = None
        self.prefetch = 0  # batches that are prepared in advance; the first DataLoader decides
        self._shares_rows = False  # with the enclosing context, whose dumps these are

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self._dumps is None or self._shares_rows:
            super().__exit__(kind, error, trace)
            return
        with ExitStack() as stack:
            stack.push(super().__exit__)
            self._dumps.join()
            self._dumps.wait()

    def embedding(self) -> EmbeddingCtx:
        """This context."""
        return self

    @property
    def embedding_config(self) -> EmbeddingConfig:
        """How rows start, and their limits.

        As given, or as of the enclosing context, or as the rows of the model were made, or the defaults.
        """
        if self._given_config is not None:
            return self._given_config
        outer = self._outer()
        if outer is not None:
            return outer.embedding_config
        return config_of_rows(self.model) or EmbeddingConfig()

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[Tensor] | None]:
        """The output of the model for a batch, and the labels."""
        if self.model is None:
            raise ValueError("forward expects a context with a model, got one without: model=….")
        non_ids, embeddings, labels = self.prepare_features(batch)
        with torch.no_grad():
            return self.model(non_ids, embeddings), labels

    def prepare_features(self, batch: PersiaTrainingBatch) -> Prepared:
        """The numbers of a batch, its vectors in the order of its features, and its labels."""
        context, embedded = self.open()
        with embedded.features_only():
            (non_ids, embeddings), _ = context.forward(batch.columns)
        has_labels = self.preprocess_mode is not PreprocessMode.INFERENCE
        return non_ids, embeddings, batch.labels(context.device) if has_labels else None

    def open(self, staleness: int | None = None, prefetch: int = PREFETCH) -> tuple[Any, EmbeddedModel]:
        """Karvan's context, and the model with its tables; made by the first call."""
        if self._context is None:
            if self not in _entered:
                raise RuntimeError(
                    f"{type(self).__name__} is used outside of the context: expected it inside of `with`."
                )
            self.prefetch = prefetch
            self._context, self._embedded = self._open(staleness, prefetch)
            self._stack.enter_context(self._context)
            if self._dumps is None:
                self._dumps = Dumps(self._context, self._embedded)
                self._dumps.check_targets()
        assert self._embedded is not None
        return self._context, self._embedded

    @property
    def dumps(self) -> Dumps:
        """Saves and loads the model and its rows."""
        self.open()
        assert self._dumps is not None
        return self._dumps

    def _open(self, staleness: int | None, prefetch: int) -> tuple[Any, EmbeddedModel]:
        outer = self._outer()
        if outer is not None and self.model in (None, outer.model):
            self._dumps, self._shares_rows = outer.dumps, True
            self.prefetch = outer.prefetch
            return outer.evaluation(), outer.open()[1]
        connect(staleness)
        embedded = self._embed(nn.Identity())
        return EvalContext(embedded, label=None, device=self.device, prefetch=prefetch), embedded

    def _embed(self, parameters: nn.Module) -> EmbeddedModel:
        """Make the tables of the model; without one, of what has the parameters of the net."""
        called = self.model is not None
        return EmbeddedModel(self.model or parameters, read_slots(), self.embedding_config, called=called)

    def evaluation(self) -> EvalContext:
        """A context that evaluates the model with its rows as they are now."""
        return EvalContext(self.open()[1], label=None, device=self.device)

    def _outer(self) -> EmbeddingCtx | None:
        """The context in which this one was entered, if it has rows, too."""
        before = _entered[: _entered.index(self)] if self in _entered else _entered
        return next((context for context in reversed(before) if isinstance(context, EmbeddingCtx)), None)

    def batches(self, data: Any) -> Iterator[PersiaTrainingBatch]:
        """The batches of data that gives Karvan's."""
        context, _ = self.open()
        self.dumps.join()
        for batch in context.loader(data):
            yield PersiaTrainingBatch(batch)

    def stream(self, **options: Any) -> LoaderStream:
        """The batches of loaders, which this context leaves at its end, so that they can end.

        options: of `from_loaders`.
        """
        ids = None if distributed.current().workers is None else list(read_slots().slots_config)
        data = from_loaders(ids=ids, **options)
        if not isinstance(data, LoaderStream):
            raise unsupported("A job with sharding: dynamic", "use sharding: static.")
        self._stack.callback(data.close)
        return data

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Set how rows start, and their limits, before there are any."""
        if self._context is not None and embedding_config != self.embedding_config:
            raise RuntimeError(
                "The tables have been made already: expected configure_embedding_parameter_servers before "
                "the first DataLoader, batch or checkpoint of the context."
            )
        self._given_config = embedding_config

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch | PyPersiaBatchData, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """A batch of this process, for `forward` or `prepare_features`."""
        if device_id is not None and device_id != self.device_id:
            raise unsupported(
                f"device_id={device_id} of a single batch",
                f"features are made where the model is; this context has device_id={self.device_id}.",
            )
        return PersiaTrainingBatch(local_batch(persia_batch.data))

    def get_embedding_from_bytes(self, data: bytes, device_id: int | None = None) -> PersiaTrainingBatch:
        """The same for the bytes of a batch."""
        return self.get_embedding_from_data(PersiaBatch.from_bytes(data), device_id)

    def dump_checkpoint(
        self,
        dst_dir: str,
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Save the model, its optimizers and all rows as a checkpoint of Karvan.

        with_jit_model: also write the net as TorchScript, to the file jit_dense_filename of dst_dir.
        A trainer that calls it alone waits until the others have come to their next batch, and all save.
        """
        if with_jit_model and self.model is None:
            raise ValueError("with_jit_model expects a context with a model, got one without: model=….")
        check_filenames(dense_filename=dense_filename)
        method = "dump_checkpoint" if isinstance(self.open()[0], TrainContext) else "dump_model"
        script = jit_dense_filename if with_jit_model else None
        self.dumps.make(method, folder=str(dst_dir), blocking=blocking, script=script)

    def load_checkpoint(
        self,
        src_dir: str,
        map_location: str | None = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
    ) -> None:
        """Load what `dump_checkpoint` has saved, or the newest checkpoint of a run, on all trainers.

        Of a checkpoint that `karvan import-checkpoint` has made, load the net and the rows, as PERSIA does.
        Tensors are loaded to where the model is, and loading always blocks.
        """
        check_filenames(dense_filename=dense_filename)
        warn_of_tuning("tensors are loaded to where the model is.", map_location=(map_location, None))
        warn_of_tuning(_BLOCKS, blocking=(blocking, True))
        trains = isinstance(self.open()[0], TrainContext) and not is_imported(src_dir)
        self.dumps.make("load_checkpoint" if trains else "load_model", folder=str(src_dir))

    def dump_embedding(self, dst_dir: str, blocking: bool = True) -> None:
        """Save all rows; see `dump_checkpoint` for several trainers."""
        self.dumps.make("dump_embedding", folder=str(dst_dir), blocking=blocking)

    def load_embedding(self, src_dir: str, blocking: bool = True) -> None:
        """Load all rows."""
        warn_of_tuning(_BLOCKS, blocking=(blocking, True))
        self.dumps.make("load_embedding", folder=str(src_dir))

    def dump_torch_state_dict(
        self,
        torch_instance: nn.Module | torch.optim.Optimizer,
        dst_dir: str,
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Write the state of a model or an optimizer to a file, or the model as TorchScript."""
        write_file(dst_dir, file_name, content_of(torch_instance, is_jit))

    def load_torch_state_dict(
        self, torch_instance: nn.Module | torch.optim.Optimizer, src_dir: str, map_location: Any = None
    ) -> None:
        """Load the state in the file src_dir into a model or an optimizer; nothing in the file is run."""
        state = torch.load(BytesIO(read_bytes(local_path(src_dir))), map_location, weights_only=True)
        torch_instance.load_state_dict(state)

    def wait_for_dump_embedding(self) -> None:
        """Wait until the rows are saved."""
        self.dumps.wait()

    def wait_for_load_embedding(self) -> None:
        """Nothing to do: `load_embedding` has waited."""

    def get_embedding_size(self) -> list[int]:
        """The number of rows on each parameter server; without servers, of this process."""
        engine = self.open()[1].embeddings
        sizes = engine.sizes()  # which waits for what is in flight
        servers = None if engine.connection is None else engine.connection.servers
        if servers is None:
            return [sum(sizes.values())]
        answers = servers.call(STATS, {"tables": list(sizes)})
        return [sum(table["rows"] for table in answer.head.stats.values()) for answer in answers]

    def clear_embeddings(self) -> None:
        """Remove all rows."""
        self.dumps.make("clear_embeddings")


class CommonContext:
    """What programs call on `ctx.common_context`, PERSIA's core; for the rest contexts have methods."""

    def __init__(self, context: BaseCtx) -> None:
        self._context = context

    def init_nats_publisher(self, world_size: int | None = None) -> None:
        """Nothing to do: a context has joined its job."""

    def wait_servers_ready(self) -> None:
        """Wait until all servers answer."""
        self._context.wait_servers_ready()

    def configure_embedding_parameter_servers(
        self,
        initialize_lower: float,
        initialize_upper: float,
        admit_probability: float,
        enable_weight_bound: bool,
        weight_bound: float,
    ) -> None:
        """Send initialization and admission of rows to the servers."""
        config = EmbeddingConfig(
            (initialize_lower, initialize_upper),
            admit_probability,
            weight_bound if enable_weight_bound else 0.0,
        )
        self._context.embedding().configure_embedding_parameter_servers(config)

    def __getattr__(self, name: str) -> Any:
        raise unsupported(f"common_context.{name}", "contexts have methods for what programs need.")


def _prepare_feature(batch: PersiaTrainingBatch, mode: PreprocessMode = PreprocessMode.TRAIN) -> Prepared:
    """The features of a batch in the context that was entered last, which has to be of that mode."""
    context = cnt_ctx()
    if not isinstance(context, EmbeddingCtx) or context.preprocess_mode is not mode:
        raise RuntimeError(f"_prepare_feature expects to be inside of a context of {mode}.")
    return context.prepare_features(batch)


def cnt_ctx() -> BaseCtx | None:
    """The context that was entered last."""
    return _entered[-1] if _entered else None


def check_filenames(**names: str) -> None:
    """Raise if a file of a checkpoint has another name than PERSIA's default."""
    for name, filename in names.items():
        default = "opt.pt" if name.startswith("opt") else "dense.pt"
        if filename != default:
            raise unsupported(
                f"{name}={filename!r}", "the net and its optimizer are part of Karvan's checkpoint."
            )


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


_backends: list[DataCtx] = []  # at most one


def init_backend(
    worker_size: int = 20, *, init_output: bool = True, wait_server_ready: bool = True
) -> DataCtx:
    """The first generation's `DataCtx`: `init_backend().send_data(batch)`; one for a process."""
    warn_of_tuning(THREADS, worker_size=(worker_size, 20))
    if not init_output or not wait_server_ready:
        raise unsupported(
            "init_backend with init_output or wait_server_ready False",
            "it is for programs that send batches, which wait until trainers take them.",
        )
    if not _backends:
        _backends.append(DataCtx())
    return _backends[0]
