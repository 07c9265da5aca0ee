"""`Metric`: the base of all metrics, which selects and checks their tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from karvan.argument_checks import listed
from karvan.label_columns import check_weights, label_of_head, refuse_missing
from karvan.ragged import Ragged

State: TypeAlias = dict[str, Tensor]


class Metric(ABC):
    """The base class of metrics: a number about scores and labels, gathered batch by batch.

    Tensors may be on any device and of any dtype; sums are float64.

    Args:
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Example:
        >>> mean, other = kv.metrics.Mean(), kv.metrics.Mean()
        >>> mean.add(torch.tensor([1.0, 2.0]))
        >>> other.add(torch.tensor([6.0]))
        >>> mean.merge(other.state())
        >>> mean.compute()
        3.0
    """

    higher_is_better: ClassVar[bool]
    short_name: ClassVar[str]  # its name in reports unless a config names it; stored in histories
    label_is_of_loss = False  # whether a Trainer has set it; another Trainer then sets it anew
    group: str | None = None  # the column by which samples are grouped, for metrics of groups

    def __init__(
        self,
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
    ) -> None:
        self.label = label
        self.output = output
        self.weight = weight
        self.logits = logits
        self.reset()

    def __init_subclass__(cls) -> None:
        if "short_name" not in vars(cls):
            cls.short_name = cls.__name__.lower()

    @torch.no_grad()
    def update(self, output: Tensor | Mapping[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Add a batch and the model's output for it.

        Args:
            output: The model's output.
            batch: The batch, with labels and what else the metric needs.

        Raises:
            KeyError: The batch or the output lacks a name.
            ValueError: Scores and labels have different shapes.
        """
        self.add_selection(self.select(output, batch))

    def select(self, output: Tensor | Mapping[str, Tensor], batch: Mapping[str, Any]) -> State:
        """Return what `update` needs of a batch, so that it can be counted elsewhere.

        Args:
            output: The model's output.
            batch: The batch.

        Returns:
            Tensors for `add_selection`.
        """
        scores = self._scores(output)
        selection = {"scores": scores}
        for role, name in (
            ("labels", self.label or "label"),
            ("weights", self.weight),
            ("groups", self.group),
        ):
            if name is not None:
                selection[role] = self._column(batch, name, role.removesuffix("s"))
                self._check_beside(role, selection[role], scores)
        return selection

    @torch.no_grad()
    def add_selection(self, selection: Mapping[str, Tensor]) -> None:
        """Add what `select` returned, here or in another process.

        Args:
            selection: The tensors.
        """
        scores = selection["scores"]
        self.add(
            scores.double().sigmoid() if self.logits else scores,
            selection["labels"],
            selection.get("weights"),
            selection.get("groups"),
        )

    @torch.no_grad()
    def add(
        self, scores: Tensor, labels: Tensor, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Add samples.

        Args:
            scores: The scores as the metric needs them; `logits` does not apply.
            labels: The labels.
            weights: The weights; by default 1.
            groups: The groups, for metrics of groups.
        """
        scores = torch.as_tensor(scores).detach().reshape(-1).double()
        labels = self._beside("labels", labels, scores).double()
        if weights is not None:
            weights = torch.as_tensor(weights)
            if weights.is_cpu:  # on a GPU a check would wait for it; a Trainer checks batches before
                check_weights(weights, self.weight)
            weights = self._beside("weights", weights, scores).double()
        if groups is not None:
            groups = self._beside("groups", groups, scores).long()
        if scores.numel():
            self._add(scores, labels, weights, groups)

    @abstractmethod
    def _add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        """Add at least one sample; all tensors are (n,) on one device, float64 and, for groups, int64."""

    @abstractmethod
    def compute(self) -> float:
        """Compute the number.

        Returns:
            The number; NaN where there is none, as without samples or where a score was NaN.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all samples."""

    @abstractmethod
    def state(self) -> State:
        """Copy everything gathered.

        Returns:
            Flat tensors on the CPU.
        """

    @abstractmethod
    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add what another metric of the same settings has gathered, for example on another rank.

        Args:
            state: What its `state` returned.

        Raises:
            ValueError: The state is of other settings.
        """

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace everything gathered.

        Args:
            state: What `state` of another metric returned.
        """
        before = self.state()
        self.reset()
        try:
            self.merge(state)
        except ValueError:
            self.merge(before)
            raise

    def _scores(self, output: Tensor | Mapping[str, Tensor]) -> Tensor:
        if isinstance(output, Tensor):
            if self.output is not None:
                raise ValueError(
                    f"{type(self).__name__} expects an output '{self.output}', but the model gave one tensor."
                )
            return output.detach()
        names = ", ".join(map(str, output)) or "none"
        if self.output is None:
            raise ValueError(
                f"{type(self).__name__} expects output=, the name of one of the model's outputs: {names}."
            )
        if self.output not in output:
            raise KeyError(f"{type(self).__name__}: no output '{self.output}' among the model's: {names}.")
        return output[self.output].detach()

    def _check_beside(self, role: str, tensor: Tensor, scores: Tensor) -> None:
        if tensor.numel() != scores.numel():
            raise ValueError(
                f"Expected {scores.numel()} {role}, one for each score, got {tuple(tensor.shape)}."
            )
        if role == "groups" and tensor.is_floating_point():
            raise TypeError(f"{type(self).__name__} expects groups of integers, got {tensor.dtype}.")

    def _beside(self, role: str, tensor: Tensor, scores: Tensor) -> Tensor:
        tensor = torch.as_tensor(tensor)
        self._check_beside(role, tensor, scores)
        return tensor.detach().reshape(-1).to(scores.device)

    def _column(self, batch: Mapping[str, Any], name: str, role: str) -> Tensor:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{type(self).__name__}.update expects the model's output and its batch, got "
                f"{type(batch).__name__}: add(scores, labels) takes tensors."
            )
        if name not in batch:
            raise KeyError(
                f"{type(self).__name__} expects the {role} '{name}' in the batch, which has: "
                f"{listed(name, batch)} Name the right column: {type(self).__name__}({role}=…)."
            )
        entry = batch[name]
        if isinstance(entry, Ragged) and entry.offsets is None:
            entry = entry.values
        entry = refuse_missing(name, entry)
        if not isinstance(entry, Tensor):
            kind = "lists or strings" if isinstance(entry, Ragged) else type(entry).__name__
            raise TypeError(
                f"{type(self).__name__} expects the {role} '{name}' to be a tensor with one value per sample,"
                f" got {kind}. Strings become ids in the loader, before a metric sees them: kv.data.read(…, "
                f"transform=kv.FeatureEngine([kv.Feature('{name}').hash('farm')]))."
            )
        return entry

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.compute():.6g})"


def check_state(metric: Metric, expected: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
    """Raise unless `received` has the entries of `expected`, each with as many dimensions."""
    if set(expected) != set(received):
        raise ValueError(
            f"A state of {type(metric).__name__} has {', '.join(expected)}; got {', '.join(received)}."
        )


def set_labels(metrics: Mapping[str, Any], loss: Any) -> None:
    """Give metrics without a label the loss's; a ValueError for one where the loss has several."""
    for name, metric in metrics.items():
        if not isinstance(metric, Metric) or not (metric.label is None or metric.label_is_of_loss):
            continue
        labels = label_of_head(loss, metric.output) or ["label"]  # a user's function names none
        if len(labels) > 1:
            raise ValueError(
                f"The metric '{name}' does not say which label it counts, and the loss has several: "
                f"{', '.join(labels)}. Name one of them: {type(metric).__name__}(label='{labels[0]}')."
            )
        [metric.label], metric.label_is_of_loss = labels, True
