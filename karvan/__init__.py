"""Karvan trains recommendation models whose embedding tables outgrow a machine."""

import sys
from typing import TYPE_CHECKING

if sys.platform != "linux":
    raise ImportError(
        f"Karvan needs Linux on x86_64 or aarch64, got {sys.platform}. On Windows use WSL 2, "
        "elsewhere a Linux container, such as Docker's python:3.12-slim."
    )

from karvan.argument_checks import publish

if TYPE_CHECKING:
    from karvan import checkpoint, data, ids, metrics, models, presets, train
    from karvan.checkpoint import Checkpoints
    from karvan.cluster.loader.context import LoaderContext
    from karvan.distributed import connect, disconnect
    from karvan.embedding import EmbeddingEngine, Table, admission, eviction, init, optim
    from karvan.features import Feature, FeatureEngine
    from karvan.ragged import Batch, Ragged
    from karvan.threads import get_num_threads, set_num_threads
    from karvan.train import (
        EvalContext,
        InferContext,
        TrainContext,
        Trainer,
        TrainingJob,
        callbacks,
        loggers,
        losses,
    )

__version__ = "0.1.0"

__all__ = [
    "Trainer",
    "TrainContext",
    "EvalContext",
    "InferContext",
    "TrainingJob",
    "EmbeddingEngine",
    "Table",
    "Feature",
    "FeatureEngine",
    "Batch",
    "Ragged",
    "Checkpoints",
    "connect",
    "disconnect",
    "LoaderContext",
    "set_num_threads",
    "get_num_threads",
    "data",
    "models",
    "losses",
    "optim",
    "metrics",
    "admission",
    "eviction",
    "init",
    "callbacks",
    "loggers",
    "checkpoint",
    "train",
    "ids",
    "presets",
]

# The module of each public name. It is imported at first use, so that programs that only use embeddings do
# not wait for pyarrow, and `karvan --help` not for torch.
publish(
    "karvan",
    {
        "karvan": "checkpoint data ids metrics models presets train",
        "karvan.checkpoint": "Checkpoints",
        "karvan.cluster.loader.context": "LoaderContext",
        "karvan.distributed": "connect disconnect",
        "karvan.embedding": "EmbeddingEngine Table admission eviction init optim",
        "karvan.features": "Feature FeatureEngine",
        "karvan.ragged": "Batch Ragged",
        "karvan.threads": "get_num_threads set_num_threads",
        "karvan.train": "EvalContext InferContext TrainContext Trainer TrainingJob callbacks loggers losses",
    },
)
