"""Checks before the first step, so that mistakes are errors and not wrong models.

All but the one for SIGTERM, which asks all ranks, depend only on the program: every rank comes to the same
result, and none waits for another that has raised.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from karvan import distributed
from karvan.checkpoint import Checkpoints
from karvan.data.elastic_dataset import ElasticDataset
from karvan.distributed import Connection
from karvan.distributed.connection import IN_PROCESS
from karvan.embedding.optim.base import SparseOptimizer
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.ragged import Batch
from karvan.train.callbacks import Callback
from karvan.train.loggers import Logger
from karvan.train.losses import ColumnLoss, Sum
from karvan.train.optimizer_step import Frozen, OptimizerStep, engines_of, is_read_only, names_text, tables_of
from karvan.train.stopping import check_not_terminated
from karvan.train.types import Loss

# Common mistakes in a Trainer's arguments: errors before training that say what to write instead.


_FRAMES = ("pandas", "polars", "pyarrow")
_SPARSE = "kv.optim.Adagrad(lr=0.05)"
_DENSE = "torch.optim.Adam, or lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"


def check_data(call: str, data: Any) -> None:
    """Raise unless data may be an iterable of batches."""
    read = "kv.data.read({}, batch_size=1024)"
    kind = type(data).__name__
    if isinstance(data, str | os.PathLike):
        raise TypeError(
            f"{call} expects batches, got the path {os.fspath(data)!r}: give it {read.format(repr(data))}."
        )
    if type(data).__module__.split(".")[0] in _FRAMES:
        frame = "frame.collect()" if kind == "LazyFrame" else "frame"
        raise TypeError(f"{call} expects batches, got a {kind}: give it {read.format(frame)}.")
    has_tensors = isinstance(data, Mapping) and any(
        isinstance(value, torch.Tensor) for value in data.values()
    )
    if isinstance(data, Batch) or has_tensors:
        raise TypeError(
            f"{call} expects several batches, got one {kind}: give it [batch], or {read.format('columns')} "
            "to cut columns of arrays into batches."
        )
    if isinstance(data, Mapping):
        raise TypeError(f"{call} expects batches, got a {kind}: give it {read.format('columns')}.")
    if isinstance(getattr(data, "dataset", data), ElasticDataset):
        raise TypeError(
            f"{call} expects batches that need no acknowledgement, got kv.data.elastic, which is for "
            f"plain loops: give it {read.format('files')}."
        )
    of_samples = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if of_samples and not isinstance(data[0], Mapping):  # but pairs of tensors, for example
        raise TypeError(
            f"{call} expects batches, got the dataset {kind}: give it "
            "torch.utils.data.DataLoader(dataset, batch_size=1024). Its batches should map names to "
            "tensors."
        )
    iterable = isinstance(data, Iterable) or hasattr(data, "__getitem__")
    if isinstance(data, torch.Tensor) or not iterable:
        raise TypeError(
            f"{call} expects batches, such as kv.data.read(…) or a list of kv.Batch, got {_text_of(data)}."
        )


def check_trainer(
    model: Any,
    loss: Any,
    dense: Any,
    sparse: Any,
    metrics: Any,
    callbacks: Any,
    loggers: Any,
    prepare: Any,
    checkpoints: Any,
) -> None:
    """Raise for arguments of a Trainer that are of the wrong kind."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Trainer expects a torch.nn.Module as its model, got {_text_of(model)}.")
    _check_loss(loss)
    _check_optimizers(dense, sparse)
    _check_metrics(metrics)
    _check_list("callbacks", callbacks, Callback, 'kv.callbacks.EarlyStopping("auc")')
    _check_list("loggers", loggers, Logger, 'kv.loggers.CSVLogger("log.csv")')
    if not callable(prepare):
        raise TypeError(f"prepare expects a function of a batch, got {_text_of(prepare)}.")
    if not isinstance(checkpoints, str | os.PathLike | Checkpoints | None):
        raise TypeError(
            f"checkpoints expects a folder or kv.Checkpoints(folder), got {_text_of(checkpoints)}."
        )


def _check_list(what: str, value: Any, kind: type, example: str) -> None:
    if isinstance(value, kind):
        name = type(value).__name__
        raise TypeError(f"{what} expects a list, got a single {name}: give it [{name}(…)].")
    if isinstance(value, str | type) or not isinstance(value, Iterable):
        raise TypeError(f"{what} expects a list such as [{example}], got {_text_of(value)}.")


def _check_loss(loss: Any) -> None:
    example_ = 'kv.losses.BinaryCrossEntropy(label="label")'
    if isinstance(loss, type):
        raise TypeError(f"loss expects a function or an instance, got {_text_of(loss)}.")
    if not callable(loss):
        raise TypeError(
            f"loss expects a function of output and batch, such as {example_}, got {_text_of(loss)}."
        )
    if getattr(loss, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"loss is called with the model's output and the batch, but torch's {name} expects labels: give "
            f'{example_}, or lambda output, batch: loss(output, batch["label"]).'
        )


def _check_optimizers(dense: Any, sparse: Any) -> None:
    if isinstance(dense, SparseOptimizer) or (isinstance(dense, type) and issubclass(dense, SparseOptimizer)):
        name = dense.__name__ if isinstance(dense, type) else type(dense).__name__
        raise TypeError(f"{name} of kv.optim is for rows: give it as sparse_optimizer={_SPARSE}.")
    if dense is not None and not isinstance(dense, torch.optim.Optimizer) and not callable(dense):
        raise TypeError(f"dense_optimizer expects {_DENSE}, got {_text_of(dense)}.")
    if sparse is None or isinstance(sparse, SparseOptimizer):
        return
    kind = sparse if isinstance(sparse, type) else type(sparse)
    if issubclass(kind, SparseOptimizer):
        raise TypeError(
            f"sparse_optimizer must be one of kv.optim, such as {_SPARSE}, got {_text_of(sparse)}."
        )
    if issubclass(kind, torch.optim.Optimizer):
        raise TypeError(
            f"sparse_optimizer must be one of kv.optim, such as {_SPARSE}. torch's {kind.__name__} is for "
            "parameters: give it as dense_optimizer."
        )
    raise TypeError(f"sparse_optimizer must be one of kv.optim, such as {_SPARSE}, got {_text_of(sparse)}.")


def _check_metrics(metrics: Any) -> None:
    example = 'metrics={"auc": kv.metrics.AUC()}'
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics expects a mapping of names to metrics, {example}, got {_text_of(metrics)}.")
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise TypeError(f"Metric '{name}' must be an instance, got {_text_of(metric)}.")
        if not all(hasattr(metric, call) for call in ("update", "compute", "reset")):
            raise TypeError(f"Metric '{name}' must be a metric, {example}, got {_text_of(metric)}.")


def _text_of(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: call it, {value.__name__}(…)"
    shown = value is None or isinstance(value, str | bool | int | float)
    return repr(value) if shown else type(value).__name__


# Checks that evaluations give the metrics by which callbacks and keep_best decide.
_HINT = (
    " Look at the evaluation data and at the model's outputs: a NaN in either makes '{name}' NaN. "
    "Metrics such as AUC are also NaN if all labels are equal."
)


class NeededMetrics:
    """The metrics that callbacks need, by their names, and those of keep_best and of schedulers."""

    def __init__(
        self,
        of_callbacks: Mapping[str, Sequence[str]],
        best_metric: str | None,
        of_scheduler: str | None = None,
    ) -> None:
        self._needs = {f"callback {name}": list(metrics) for name, metrics in of_callbacks.items()}
        if of_scheduler is not None:
            self._needs["scheduler ReduceLROnPlateau"] = [of_scheduler]
        if best_metric is not None:
            self._needs["keep_best"] = [best_metric]

    def check_evaluated(self, has_eval_data: bool) -> None:
        """Raise if there are no evaluations, but something needs their metrics."""
        if self._needs and not has_eval_data:
            who, metrics = next(iter(self._needs.items()))
            raise ValueError(
                f"{_named(who, 'The')} needs '{metrics[0]}' of evaluations, but this fit has no eval_data: "
                "give fit(…, eval_data=…)."
            )

    def check_known(self, metrics: Iterable[str], loss: Loss) -> None:
        """Raise if the evaluations of a Trainer with these metrics and this loss lack one."""
        names = ["loss", *metrics]
        named = isinstance(loss, Sum)
        if isinstance(loss, Sum):
            names += [f"loss/{name}" for name in loss.losses]
        for who, needed in self._needs.items():
            for metric in needed:
                # A loss function of the user's own may give losses by any names.
                free = metric.startswith("loss/") and not (named or isinstance(loss, ColumnLoss))
                if metric not in names and not free:
                    raise ValueError(
                        f"{_named(who, 'The')} needs '{metric}', but evaluations give: {', '.join(names)}. "
                        f"Add it to the Trainer's metrics: metrics={{'{metric}': …}}."
                    )

    def require_numbers(self, metrics: Mapping[str, float], step: int, nonfinite: str) -> None:
        """Raise if one is NaN; nonfinite: text about columns with NaN or infinite values, if any."""
        for who, names in self._needs.items():
            for name in names:
                if name in metrics and math.isnan(metrics[name]):
                    raise ValueError(
                        f"The evaluation at step {step} gives NaN for '{name}', but {_named(who, 'the')} "
                        "needs it to decide." + (nonfinite or _HINT.format(name=name))
                    )


def _named(who: str, article: str) -> str:
    return who if who == "keep_best" else f"{article} {who}"


def check_trained(model: nn.Module, update: OptimizerStep, frozen: Frozen, connection: Connection) -> None:
    """Check that all of the model is trained or frozen, and its rows are where training expects them."""
    now = distributed.current()
    if not _same(connection, now):
        raise ValueError(
            f"The Trainer or TrainContext was made under another connection ({_under(connection)}) than "
            f"the present one ({_under(now)}): make it, and its model, after the last kv.connect."
        )
    check_not_terminated(connection.main)
    _check_connected(connection)
    check_connection(model, connection)
    if not update.optimizers:
        raise ValueError(
            "Training needs a dense_optimizer or a sparse_optimizer, got neither: "
            "dense_optimizer=torch.optim.Adam, sparse_optimizer=kv.optim.Adagrad(lr=0.05)."
        )
    _check_tables(model, update, frozen)
    _check_parameters(model, update, frozen)


def _check_connected(connection: Connection) -> None:
    """Check that a program that was started as one of several has called kv.connect."""
    if connection.chosen:
        return
    job = JobEnvironment.read()
    if job.role == Role.TRAINER and job.counts.get(Role.PARAMETER_SERVER) != 0:
        who, kind = "karvan launch has started this program as a trainer", "remote"
    elif "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        who, kind = f"torchrun has started {os.environ['WORLD_SIZE']} processes of this program", "sharded"
    else:
        return
    raise ValueError(
        f"{who}, but it has not called kv.connect, so each process would train all data by itself: call "
        f'kv.connect("{kind}") before the model is made. To train separately on purpose, call '
        'kv.connect("memory").'
    )


def check_connection(model: nn.Module, connection: Connection) -> None:
    """Check that the model's engines were made under the connection that trains them.

    An engine with a `store` from the user is not checked.
    """
    for engine in engines_of(model):
        its = engine.connection
        if its is None or _same(its, connection):
            continue
        names = names_text(table.name for table in engine.tables())
        kind = connection.settings.kind
        if its.settings.kind in IN_PROCESS and kind in IN_PROCESS:
            raise ValueError(
                f"The model was made under {_under(its)}, and its tables ({names}) stay where they are, but "
                f"the program has called {_under(connection)} since: call it first, then make the model."
            )
        if its.settings.kind in IN_PROCESS:
            raise ValueError(
                f'The model was made before kv.connect("{kind}"), so the rows of its tables ({names}) are in '
                f'this process and no other sees them: call kv.connect("{kind}") first, then make the model.'
            )
        raise ValueError(
            f"The rows of the tables {names} belong to a connection that has ended ({_under(its)}). The "
            f"present one is {_under(connection)}: make the model after the last kv.connect."
        )


def _check_tables(model: nn.Module, update: OptimizerStep, frozen: Frozen) -> None:
    updated = {id(table) for table in update.tables}
    frozen_ids = {id(table) for table in frozen.tables}
    missing = [
        table.name
        for table in tables_of(model)
        if id(table) not in updated and id(table) not in frozen_ids and not is_read_only(table)
    ]
    if not missing:
        return
    if "sparse" not in update.optimizers:
        raise ValueError(
            "These tables would not be trained, because there is no sparse_optimizer: "
            f"{names_text(missing)}. Give one, such as sparse_optimizer=kv.optim.Adagrad(lr=0.05), or "
            f"exclude them from training: frozen={_listed(missing)}."
        )
    raise ValueError(
        "These tables would not be trained, because the sparse_optimizer is attached to others: "
        f"{names_text(missing)}. Give an optimizer that is not attached yet, which then gets all tables, or "
        f"exclude them from training: frozen={_listed(missing)}."
    )


def _check_parameters(model: nn.Module, update: OptimizerStep, frozen: Frozen) -> None:
    updated = {id(parameter) for parameter in update.parameters()}
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in updated and name not in frozen.parameters
    ]
    if not missing:
        return
    if "dense" not in update.optimizers:
        raise ValueError(
            "These parameters would not be trained, because there is no dense_optimizer: "
            f"{names_text(missing)}. Give one, such as dense_optimizer=torch.optim.Adam, or exclude them "
            f"from training, by requires_grad=False or frozen={_listed(missing)}."
        )
    raise ValueError(
        "These parameters would not be trained, because the dense_optimizer does not have them: "
        f"{names_text(missing)}. Make it of all parameters of this model, give a function that does, such "
        "as dense_optimizer=torch.optim.Adam, or exclude them from training, by requires_grad=False or "
        f"frozen={_listed(missing)}."
    )


def _listed(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names[:3]) + (", …]" if len(names) > 3 else "]")


def _same(first: Connection, other: Connection) -> bool:
    return first is other or (
        first.settings.kind == other.settings.kind and first.settings.kind in IN_PROCESS
    )


def _under(connection: Connection) -> str:
    kind = connection.settings.kind
    return f'kv.connect("{kind}")'
