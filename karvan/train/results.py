"""The numbers of a fit: of a step, of a report, and at the end; and the states of all ranks, put together.

Ranks gather metrics, losses and the states of their random generators without pickle.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan.checkpoint.state_tree import pack, unpack
from karvan.display import duration_text, html_table
from karvan.distributed import CollectiveChannel
from karvan.train.losses import split_reports
from karvan.train.types import MetricLike

# The state of all random generators that a training step may draw from, as a tree of tensors.


def random_state() -> dict[str, Any]:
    """Of torch, on the CPU and on GPUs in use, of numpy and of Python."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "numpy": {
            "kind": legacy["bit_generator"],
            "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    legacy = state["numpy"]
    key = legacy["key"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], key, legacy["pos"], legacy["has_gauss"], legacy["gauss"]))
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))


@contextmanager
def same_random_state_afterwards() -> Iterator[None]:
    """Restore the generators afterwards, whatever was drawn inside."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def seed_random(*numbers: int) -> None:
    """Seed all generators by these numbers, so that what follows depends on nothing else."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def gather_state(channel: CollectiveChannel, state: Any) -> list[Any]:
    """The trees of all ranks, in their order: dicts, lists, numbers, text and tensors."""
    return [state] if channel.world_size == 1 else [unpack(data) for data in channel.gather(pack(state))]


def merged(channel: CollectiveChannel, metrics: Mapping[str, MetricLike]) -> dict[str, float]:
    """The metrics over the samples of all ranks."""
    if channel.world_size == 1 or not metrics:
        return {name: metric.compute() for name, metric in metrics.items()}
    states = gather_state(channel, {name: metric.state() for name, metric in metrics.items()})
    return {
        name: joined(metric, [state[name] for state in states]).compute() for name, metric in metrics.items()
    }


def joined(metric: MetricLike, states: list[Any]) -> MetricLike:
    """A copy of this metric that combines these states."""
    copied = copy.deepcopy(metric)
    merge = require_merge(copied)
    copied.reset()
    for state in states:
        merge(state)
    return copied


def require_merge(metric: MetricLike) -> Callable[[Any], None]:
    """The metric's `merge`, or a TypeError if it has none."""
    merge: Callable[[Any], None] | None = getattr(metric, "merge", None)
    if merge is None:
        raise TypeError(
            f"{type(metric).__name__} has no merge(state): a metric needs it to train on several ranks."
        )
    return merge


def summed(channel: CollectiveChannel, values: Mapping[str, float]) -> dict[str, float]:
    """Numbers by name, added up in the order of ranks; a rank may lack some."""
    sums: dict[str, float] = {}
    for rank_values in channel.gather_json(dict(values)):
        for name, value in rank_values.items():
            sums[name] = sums.get(name, 0) + value
    return sums


@dataclass(frozen=True)
class StepLogs:
    """One optimizer step, as callbacks get it.

    Attributes:
        step: The number of the step.
        epoch: The index of the epoch.
        samples: How many samples are in the step, over all ranks.
        losses: The losses of this rank by name, as tensors; float() reads one. They are NaN if it had no
            samples.
        taken: Whether the step was taken or skipped. Where a GPU decides, it is a tensor: bool() reads it,
            and waits.
        reports: What the model has reported by `kv.train.report`, by name.

    Example:
        >>> logs = kv.train.StepLogs(7, 0, 512, {"loss": torch.tensor(0.5)}, True)
        >>> float(logs.losses["loss"])
        0.5
    """

    step: int
    epoch: int
    samples: int
    losses: Mapping[str, Tensor]
    taken: bool | Tensor
    reports: Mapping[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        losses, reports = split_reports(self.losses)
        object.__setattr__(self, "losses", losses)
        object.__setattr__(self, "reports", reports)


@dataclass(frozen=True)
class Report:
    """Numbers about training or an evaluation at a step, as loggers and progress get them.

    Attributes:
        kind: "train" or "eval".
        step: The step of the report.
        epoch: The index of the epoch.
        values: The numbers by name.
        samples: How many samples were trained so far.
        time: The Unix time of the report.
        memory_of: Whose memory `values["memory"]` is: "process", "4 processes" or "GPU".

    Example:
        >>> report = kv.train.Report("eval", 100, 0, {"auc": 0.75})
        >>> report.labels()
        {'kind': 'eval', 'step': 100, 'epoch': 0}
    """

    kind: str
    step: int
    epoch: int
    values: Mapping[str, float]
    samples: int | None = None
    time: float | None = None
    memory_of: str = "process"

    def labels(self) -> dict[str, str | int | float]:
        """Return what the values describe, without unknown fields.

        Returns:
            The fields other than `values`, by name.
        """
        limits = {"samples": self.samples, "time": self.time}
        reached = {name: value for name, value in limits.items() if value is not None}
        return {"kind": self.kind, "step": self.step, "epoch": self.epoch, **reached}


@dataclass(frozen=True)
class FitResult:
    """Where a fit ended.

    Attributes:
        step: All steps of the run.
        epoch: How many epochs of this data are complete.
        samples: How many samples were trained.
        skipped: How many steps of this call were skipped.
        trained: How many steps this call made.
        seconds: How long this call took.
        stopped: None if it reached its end, "interrupt" (Ctrl-C), "terminate" (SIGTERM), or the reason of a
            callback.
        checkpoint: The path of the last checkpoint, if one was saved.
        metrics: The metrics of training since the start of the epoch.
        evaluation: The losses and metrics of the last evaluation.
        evaluated: The step of that evaluation.
        bad_records: How many records the job has skipped because they raise errors; see `skip_bad_records` of
            job.yaml.

    Example:
        >>> result = kv.train.FitResult(
        ...     step=100, epoch=1, samples=51200, skipped=0, trained=100, seconds=9.5,
        ...     stopped=None, checkpoint="out/run/step-000000000100",
        ... )
        >>> print(result)
        Trained 100 steps in 9.5 s: now at step 100, 1 epoch, 51,200 samples
          checkpoint  out/run/step-000000000100
    """

    step: int
    epoch: int
    samples: int
    skipped: int
    trained: int
    seconds: float
    stopped: str | None
    checkpoint: str | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated: int = -1
    bad_records: int = 0

    def __str__(self) -> str:
        """A summary in a few lines; `repr` has everything."""
        return "\n  ".join([self._headline(), *(f"{word:<12}{text}" for word, text in self._summary())])

    def _repr_html_(self) -> str:
        lines = [(word, text.replace("  ", ", ")) for word, text in self._summary()]
        return html_table(self._headline(), (), lines)

    def _headline(self) -> str:
        skipped = f", {self.skipped:,} of them skipped" if self.skipped else ""
        return (
            f"Trained {self.trained:,} steps in {duration_text(self.seconds)}{skipped}: "
            f"now at step {self.step:,}, {self.epoch} epoch{'s' * (self.epoch != 1)}, "
            f"{self.samples:,} samples"
        )

    def _summary(self) -> list[tuple[str, str]]:
        lines = []
        if self.stopped:
            lines.append(("stopped", self.stopped))
        if self.bad_records:
            lines.append(("bad records", f"{self.bad_records:,} skipped"))
        earlier = "" if self.evaluated == self.step else f"  (at step {self.evaluated:,})"
        for word, values, note in (("training", self.metrics, ""), ("evaluation", self.evaluation, earlier)):
            if values:
                shown = "  ".join(f"{name} {value:.5g}" for name, value in values.items())
                lines.append((word, shown + note))
        if self.checkpoint:
            lines.append(("checkpoint", self.checkpoint))
        return lines


@dataclass
class TrainingCounts:
    """How far training is. It is part of a checkpoint, so it holds nothing that depends on time."""

    step: int = 0
    epoch: int = 0  # epochs of this data that are complete
    batches: int = 0  # of the epoch that is in progress
    passed: int = 0  # steps that were skipped because the ranks whose turn it was had no data left
    start_step: int = 0  # the step at which training on this data started
    samples: int = 0
    skipped: int = 0  # steps whose gradients were not finite
    evaluated: int = -1  # the step of the last evaluation
    evaluation: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints."""
        return {**vars(self), "evaluation": dict(self.evaluation)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        vars(self).update(state)


class ReportWindow:
    """The mean of each loss since the last report."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, losses: Mapping[str, Tensor], share: float = 1.0) -> None:
        """Count the losses of a step, of which this rank has a share."""
        for name, loss in losses.items() if share else ():
            value = loss.double() if share == 1 else loss.double() * share
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._count += 1

    def means(self, channel: CollectiveChannel) -> dict[str, float]:
        """The means over all ranks, of reports of the model too; nothing if nothing was counted."""
        sums = summed(channel, {name: float(total) for name, total in self._sums.items()})
        losses, reports = split_reports(sums)
        return {**{name: total / self._count for name, total in losses.items()}, **reports}

    def reset(self) -> None:
        """Start the next window."""
        self._sums, self._count = {}, 0

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints."""
        return {"sums": {name: float(total) for name, total in self._sums.items()}, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        # Scalars on the CPU can be combined with tensors on any device.
        self._sums = {name: torch.tensor(total, dtype=torch.float64) for name, total in state["sums"].items()}
        self._count = state["count"]

    def load_share(self, states: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Restore the states of another number of ranks: rank 0 gets all of it."""
        sums: dict[str, float] = {}
        for state in states if rank == 0 else ():
            for name, total in state["sums"].items():
                sums[name] = sums.get(name, 0.0) + total
        self.load_state_dict({"sums": sums, "count": states[0]["count"]})
