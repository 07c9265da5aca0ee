"""Contexts that compute outputs in a loop of the user's own: `EvalContext` and `InferContext` change nothing.

What `TrainContext` (`train_context.py`) has in common with them is here, too: loaders, outputs and labels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from karvan import checkpoint as checkpoints
from karvan.label_columns import refuse_missing, required_values
from karvan.train.assembly import make_model_setup
from karvan.train.dataset import Transforms
from karvan.train.evaluation import ModelSetup, evaluating
from karvan.train.feed import Feed
from karvan.train.preflight import check_data
from karvan.train.results import same_random_state_afterwards
from karvan.train.train_state import check_fits


class ContextLoader:
    """Data in a context; each iteration starts from the beginning, or where the context says."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


Labels: TypeAlias = str | Sequence[str] | None


def full(output: Any) -> Any:
    """The output with half precision as float32, so that its loss is not rounded."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):
        return {name: full(value) for name, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(full, output))
    return type(output)(map(full, output)) if isinstance(output, list | tuple) else output


def names_of(label: Labels) -> list[str]:
    """The columns that `label` means."""
    return [] if label is None else [label] if isinstance(label, str) else list(label)


def labels_of(batch: Mapping[str, Any], label: Labels, device: torch.device) -> Any:
    """The column of that name, or several by name, on a device; None for None."""
    if label is None:
        return None
    if isinstance(label, str):
        return _column(batch, label, device)
    return {name: _column(batch, name, device) for name in label}


def _column(batch: Mapping[str, Any], name: str, device: torch.device) -> Any:
    if name not in batch:
        raise KeyError(
            f"There is no label '{name}' in the batch, which has: {', '.join(map(str, batch.keys()))}. "
            "Name the right column with label=, or set label=None if there is none."
        )
    return refuse_missing(name, batch[name]).to(device)


class EvalContext:
    """Evaluate a model in a loop of your own.

    Inside, the model is in eval mode, no row is inserted, and keys without a row give zeros. Afterwards the
    mode of every module and the state of random generators are restored. With several ranks, each takes its
    share of the data, and all call `forward` for every batch of a loader.

    Args:
        model: A torch module. It is called with a batch.
        label: The column, or columns, that `forward` returns with the output; None for none.
        precision: "fp32", "bf16", "fp16" or "auto".
        device: Where the model is placed.
        prefetch: How many batches are read while one is computed.

    Example:
        >>> model = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> data = kv.data.read(
        ...     {"user": [1, 2], "item": [7, 8], "label": [1.0, 0.0]}, batch_size=2
        ... )
        >>> with kv.EvalContext(model) as context:
        ...     for batch in context.loader(data):
        ...         output, labels = context.forward(batch)
        >>> output.shape, labels
        (torch.Size([2]), tensor([1., 0.]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label: Labels = "label",
        precision: str = "fp32",
        device: torch.device | str | None = None,
        prefetch: int = 2,
    ) -> None:
        self._begin(make_model_setup(model, precision, device, prefetch), Transforms(), label)

    @classmethod
    def of(cls, runs: ModelSetup, transforms: Transforms, label: Labels) -> Self:
        """Make a context that shares the parts of another one.

        Args:
            runs: The model and how it runs.
            transforms: The transforms of the data.
            label: The column, or columns, that `forward` returns with the output.

        Returns:
            The context.
        """
        context = cls.__new__(cls)
        context._begin(runs, transforms, label)
        return context

    def _begin(self, runs: ModelSetup, transforms: Transforms, label: Labels) -> None:
        self._runs = runs
        self._transforms = transforms
        self._label = label
        self._stack: ExitStack | None = None
        self._feed: Feed | None = None
        self._loader_batch: Any = None  # the batch that the loader gave last
        self.model = runs.model
        self.device = runs.device

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError(f"This {type(self).__name__} has been entered already.")
        with ExitStack() as stack:
            stack.enter_context(same_random_state_afterwards())
            stack.enter_context(evaluating(self.model))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        feed, self._feed, self._loader_batch = self._feed, None, None
        assert stack is not None
        with stack:
            if feed is not None:
                feed.__exit__(kind, error, trace)

    def loader(self, data: Iterable[Any]) -> ContextLoader:
        """Return the batches of data, read and prepared in advance.

        Args:
            data: Any iterable of batches.

        Returns:
            An iterable of batches.
        """
        self._require("loader")
        check_data("loader", data)
        return ContextLoader(lambda: self._batches(data))

    def _batches(self, data: Iterable[Any]) -> Iterator[Any]:
        self._require("A loader")
        if self._feed is not None:
            raise RuntimeError(
                "Another loader of this context has not come to its end: expected one at a time."
            )
        runs = self._runs
        self._transforms.use(data)
        self._transforms.match_loaders()
        required = required_values(data, names_of(self._label))
        with required, runs.evaluation_feed(data) as batches:
            self._feed = batches
            try:
                for fed in batches:
                    runs.placement.receive(fed.batch)
                    self._loader_batch = fed.batch
                    if fed.samples or runs.connection.world_size == 1:
                        yield fed.batch
                    else:  # it is only for the other ranks
                        runs.infer(fed.batch)
            finally:
                self._feed = self._loader_batch = None

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Compute the model's output for a batch.

        Args:
            batch: A batch of the loader, one made from it, or any other.

        Returns:
            The output, as float32 where it was computed in half precision, and the labels.
        """
        output, used = self._output("forward", batch)
        return output, labels_of(used, self._label, self.device)

    def _output(self, method: str, batch: Any) -> tuple[Any, Any]:
        self._require(method)
        if batch is not self._loader_batch:  # it may not be the loader's
            batch = self._runs.placement.place(batch, training=False)
            self._runs.placement.receive(batch)
        return full(self._runs.infer(batch)), batch

    def _require(self, method: str) -> None:
        if self._stack is None:
            raise RuntimeError(
                f"{method} was called outside of the context: expected it inside of "
                f"`with {type(self).__name__}(…) as ctx:`."
            )


class InferContext(EvalContext):
    """Predict with a model in a loop of your own.

    It needs no optimizer, and ignores the optimizers' state in the checkpoint. Transforms of data passed to
    `loader` take their statistics from it. On parameter servers, the checkpoint replaces the content of the
    tables. No row is ever inserted.

    Args:
        model: A torch module. It is called with a batch.
        checkpoint: A checkpoint, or a run's folder for its newest one. Without it, the model and its rows are
            used as they are.
        label: The column, or columns, that `forward` returns with the output; None for none.
        precision: "fp32", "bf16", "fp16" or "auto".
        device: Where the model is placed.
        prefetch: How many batches are read while one is computed.

    Raises:
        CheckpointError: The checkpoint does not fit this model, or is damaged.

    Example:
        >>> model = kv.models.DLRM([], ids=["user", "item"], dim=8)
        >>> with kv.InferContext(model) as context:
        ...     batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}
        ...     output = context.predict(batch)
        >>> output.shape
        torch.Size([2])
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        label: Labels = None,
        precision: str = "fp32",
        device: torch.device | str | None = None,
        prefetch: int = 2,
    ) -> None:
        super().__init__(model, label=label, precision=precision, device=device, prefetch=prefetch)
        self.step: int | None = None  # that of the checkpoint
        if checkpoint is not None:
            checkpoint_ = checkpoints.find(checkpoint)
            state = checkpoint_.load(model)
            if "model" not in state:
                raise checkpoints.CheckpointError.mismatch(
                    checkpoint_.path, "a model's state", ", ".join(state)
                )
            check_fits(model, state, checkpoint_.path)
            model.load_state_dict(state["model"])
            self._transforms.load(state)
            self.step = checkpoint_.step

    def predict(self, batch: Any) -> Any:
        """Compute the model's output for a batch.

        Args:
            batch: A batch. It needs no labels.

        Returns:
            The output on the model's device, as float32 where it was computed in half precision.
        """
        return self._output("predict", batch)[0]
