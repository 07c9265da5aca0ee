"""Common mistakes in a Trainer's arguments: errors before training that say what to write instead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from karvan.checkpoint import Checkpoints
from karvan.data.leasing.dataset import ElasticDataset
from karvan.embedding.optim.base import SparseOptimizer
from karvan.ragged import Batch
from karvan.train.callbacks import Callback
from karvan.train.reporting.loggers import Logger

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
    if isinstance(data, Batch) or (isinstance(data, Mapping) and _has_tensors(data)):
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
    if _gives_samples(data):
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


def _check_list(what: str, given: Any, kind: type, example: str) -> None:
    if isinstance(given, kind):
        name = type(given).__name__
        raise TypeError(f"{what} expects a list, got a single {name}: give it [{name}(…)].")
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise TypeError(f"{what} expects a list such as [{example}], got {_text_of(given)}.")


def _check_loss(loss: Any) -> None:
    own = 'kv.losses.BinaryCrossEntropy(label="label")'
    if isinstance(loss, type):
        raise TypeError(f"loss expects a function or an instance, got {_text_of(loss)}.")
    if not callable(loss):
        raise TypeError(f"loss expects a function of output and batch, such as {own}, got {_text_of(loss)}.")
    if getattr(loss, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"loss is called with the model's output and the batch, but torch's {name} expects labels: give "
            f'{own}, or lambda output, batch: loss(output, batch["label"]).'
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


def _gives_samples(data: Any) -> bool:
    """Whether it is a dataset of torch whose items are no batches, such as pairs of tensors."""
    if not isinstance(data, torch.utils.data.Dataset) or isinstance(data, torch.utils.data.IterableDataset):
        return False
    return not isinstance(data[0], Mapping)


def _has_tensors(data: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in data.values())
