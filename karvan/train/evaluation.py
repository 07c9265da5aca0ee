"""Evaluation and prediction, which change nothing."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.activity import activity
from karvan.argument_checks import listed
from karvan.data import Loader
from karvan.data.in_memory import nullable
from karvan.data.leased_data import SharedData
from karvan.distributed import CollectiveChannel, Connection
from karvan.files import replacing
from karvan.label_columns import required_labels
from karvan.ragged import NestedRagged, OptionalRagged, OptionalText, Ragged
from karvan.train.device_placement import Placement
from karvan.train.feed import FedBatch, Feed, RankRounds, feed
from karvan.train.losses import (
    Reported,
    SampleChecks,
    collecting,
    named,
    nonfinite_text,
    split_reports,
    total,
)
from karvan.train.precision import Precision
from karvan.train.results import merged, same_random_state_afterwards
from karvan.train.types import Loss, MetricLike, Prediction, model_input, samples_of


@dataclass(frozen=True)
class ModelSetup:
    """What runs a model on batches."""

    model: nn.Module
    device: torch.device
    connection: Connection
    precision: Precision
    placement: Placement
    prefetch: int

    def infer(self, batch: Any) -> Any:
        """The output for a batch on the model's device, without gradients."""
        with torch.no_grad(), self.placement.forward(), self.precision.context(), self.precision.forward():
            return self.model(model_input(batch))

    def evaluation_feed(self, data: Iterable[Any]) -> Feed:
        """The batches of data, prepared for `infer`; a rank without data gets empty ones for the others."""
        place = partial(self.placement.place, training=False)
        return feed(
            data,
            place,
            prefetch=self.prefetch,
            rounds=RankRounds(self.connection, "evaluate"),
            within=self.placement.feed_context(),
        )


class ExactSum:
    """A sum of floats; infinities and NaN are added as usual.

    It is a few floats that do not overlap (Shewchuk, 1997), whose sum is that of all that were added.
    """

    def __init__(self) -> None:
        self._parts: list[float] = []
        self._special = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        if not math.isfinite(value):
            self._special += value
            return
        parts = []
        for part in self._parts:
            if abs(value) < abs(part):
                value, part = part, value
            high = value + part
            if low := part - (high - value):
                parts.append(low)
            value = high
        self._parts = [*parts, value]

    def parts(self) -> list[float]:
        """Numbers with the same sum, for `total`, here or elsewhere."""
        return [*self._parts, self._special]


def exact_total(parts: Iterable[float]) -> float:
    """The sum of the parts of some sums, rounded once."""
    listed = list(parts)
    finite = [part for part in listed if math.isfinite(part)]
    return math.fsum(finite) + sum(part for part in listed if not math.isfinite(part))


_log = logging.getLogger("karvan.train")


class NonFinite:
    """The batches of one evaluation or prediction whose result is NaN or infinite."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._batches = 0
        self._wrong = 0
        self.columns = ""  # which columns of the first such batch have NaN or infinite values

    def see(self, batch: Any, fine: bool) -> None:
        """Count a batch."""
        self._batches += 1
        if not fine:
            self._wrong += 1
            self.columns = self.columns or nonfinite_text([batch])

    def warn(self) -> None:
        """Log one warning if there were any."""
        if self._wrong:
            _log.warning(
                "%s of %d of %d batches has NaN or infinite values.%s",
                self._what,
                self._wrong,
                self._batches,
                self.columns,
            )


def has_no_nan(output: Any) -> bool:
    """Whether an output, or none of several by name, has a NaN."""
    if isinstance(output, Mapping):
        return all(has_no_nan(value) for value in output.values())
    if isinstance(output, tuple | list):
        return all(has_no_nan(value) for value in output)
    return not (isinstance(output, Tensor) and bool(torch.isnan(output).any()))


Averaged = Callable[[nn.Module], AbstractContextManager[None]]
"""Makes the context in which a model is evaluated: with averages of its parameters, if there are any."""


@dataclass
class EvaluationSums:
    """What this rank has evaluated so far: metrics, losses times samples, and how many samples."""

    metrics: Mapping[str, MetricLike]
    checks: SampleChecks
    losses: dict[str, ExactSum] = field(default_factory=dict)
    samples: int = 0
    nonfinite: NonFinite = field(default_factory=lambda: NonFinite("The loss"))


@dataclass
class Evaluator:
    """Runs a model on data without training it."""

    runs: ModelSetup
    loss: Loss
    averaged: Averaged
    nonfinite: str = ""  # which columns had NaN or infinite values in the last evaluation

    def evaluate(self, data: Iterable[Any], metrics: Mapping[str, MetricLike]) -> dict[str, float]:
        """Losses, as means over samples, and metrics, by new copies of them; over the data of all ranks.

        Trainers that come and go each evaluate a share of `SharedData`, and all of any other data.
        """
        channel, group = self.runs.connection.main, self.runs.connection.group
        if group is not None and isinstance(data, SharedData):
            channel = group.channel
            data = data.share(channel.rank, channel.world_size)
        if isinstance(data, Loader):
            data.restart()
        sums = self.begin(metrics)
        self.add(sums, data, data)
        return self.results(sums, channel)

    def begin(self, metrics: Mapping[str, MetricLike]) -> EvaluationSums:
        """An evaluation without batches yet."""
        fresh = {name: copy.deepcopy(metric) for name, metric in metrics.items()}
        for metric in fresh.values():
            metric.reset()
        return EvaluationSums(fresh, SampleChecks(self.loss, fresh.values()))

    def add(
        self,
        sums: EvaluationSums,
        data: Iterable[Any],
        batches_of_data: Iterable[Any],
        most: int | None = None,
    ) -> None:
        """Evaluate some or all batches of data; at most so many on each rank."""
        required = required_labels(data, self.loss, sums.metrics.values())
        with (
            activity.task("evaluate"),
            required,
            same_random_state_afterwards(),
            self.runs.evaluation_feed(batches_of_data) as batches,
        ):
            for batch, output, reported in self._outputs(islice(batches, most)):
                count = samples_of(batch)
                with torch.no_grad():
                    sums.checks(batch)
                    losses = self.loss(output, batch)
                    means = {name: loss.cpu() for name, loss in named(losses, total(losses)).items()}
                    for name, loss in means.items():
                        sums.losses.setdefault(name, ExactSum()).add(float(loss) * count)
                    fine = all(bool(torch.isfinite(loss).all()) for loss in means.values())
                    for name, value in reported.entries(sums.metrics).items():
                        sums.losses.setdefault(name, ExactSum()).add(float(value) * count)
                    sums.nonfinite.see(batch, fine)
                    for metric in sums.metrics.values():
                        metric.update(output, batch)
                sums.samples += count

    def try_first(self, data: Iterable[Any] | None, metrics: Mapping[str, MetricLike]) -> None:
        """Evaluate the first batch of data that gives it again, so that mistakes in it show before training.

        All ranks call it with data of the same kind.
        """
        if not _gives_again(data):
            return
        assert data is not None
        if isinstance(data, Loader):
            data = data.single_pass()  # which leaves the position of the loader as it is
        self.add(self.begin(metrics), data, data, most=1)

    def results(self, sums: EvaluationSums, channel: CollectiveChannel) -> dict[str, float]:
        """The results of the batches of all ranks; a collective. Nothing changes, so it may be repeated."""
        sums.nonfinite.warn()
        sums.checks.warn_without_weight()
        self.nonfinite = sums.nonfinite.columns
        sums_of_losses = {name: loss.parts() for name, loss in sums.losses.items()}
        totals = channel.gather_json({"samples": sums.samples, "losses": sums_of_losses})
        samples = sum(total["samples"] for total in totals)
        if not samples:
            raise ValueError(
                "The evaluation expects data with at least one sample, got none. If the data is a generator, "
                "it gives its batches only once: give a list, a torch DataLoader or a kv.data.Loader."
            )
        names = dict.fromkeys(name for total in totals for name in total["losses"])
        means = {
            name: exact_total(part for total in totals for part in total["losses"].get(name, ())) / samples
            for name in names
        }
        losses, reports = split_reports(means)
        return {**losses, **reports, **merged(channel, sums.metrics)}

    def predict(self, data: Iterable[Any], columns: Iterable[str]) -> Iterator[Prediction]:
        """Outputs on the CPU, with columns of the batch; of this rank's data."""
        predictor = self.predictor(columns)
        if isinstance(data, Loader):
            data.restart()
        with self.runs.evaluation_feed(data) as batches:
            for batch, output, _ in self._outputs(batches):
                yield predictor.prediction(batch, output)
        predictor.end()

    def predictor(self, columns: Iterable[str]) -> Predictor:
        """Predicts batch by batch."""
        return Predictor(self.runs, list(columns), self.averaged)

    def _outputs(self, batches: Iterable[FedBatch]) -> Iterator[tuple[Any, Any, Reported]]:
        for fed in batches:
            with collecting() as reported:
                output = _output(self.runs, fed.batch, self.averaged)
            if fed.samples or self.runs.connection.world_size == 1:  # or it was for other ranks
                yield fed.batch, output, reported


@dataclass
class Predictor:
    """Predictions of batches that are ready, with columns of each."""

    runs: ModelSetup
    columns: Sequence[str]
    averaged: Averaged

    def __post_init__(self) -> None:
        self._seen = NonFinite("The output")

    def output(self, batch: Any) -> Any:
        """What the model gives for a batch."""
        return _output(self.runs, batch, self.averaged)

    def prediction(self, batch: Any, output: Any) -> Prediction:
        """The output of a batch on the CPU, with its columns."""
        if missing := [name for name in self.columns if name not in batch]:
            raise KeyError(
                f"There is no column '{missing[0]}' in the batch, which has: {listed(missing[0], batch)}"
            )
        on_cpu = _to_cpu(output)
        self._seen.see(batch, has_no_nan(on_cpu))
        return Prediction(on_cpu, {name: _to_cpu(batch[name]) for name in self.columns})

    def end(self) -> None:
        """There are no more batches: warn of outputs that were not finite."""
        self._seen.warn()


def _output(runs: ModelSetup, batch: Any, averaged: Averaged) -> Any:
    runs.placement.receive(batch)
    with evaluating(runs.model), averaged(runs.model):  # only here: between batches the caller's code runs
        return runs.infer(batch)


def _gives_again(data: object) -> bool:
    """Whether data gives its first batch again after it was iterated over, whoever counts iterations."""
    if isinstance(data, torch.utils.data.DataLoader):
        iterates = data.generator is not None or isinstance(data.dataset, torch.utils.data.IterableDataset)
        return not iterates and not data.num_workers
    return isinstance(data, list | tuple | Loader)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Ragged | NestedRagged):
        return value.to("cpu")
    if isinstance(value, Mapping):
        return {name: _to_cpu(entry) for name, entry in value.items()}
    return value


# Predictions as Parquet files.
#
# In a job whose trainers lease the records, files have the numbers of batches. A batch that is predicted
# again, because its trainer died before it had asked for the next one, replaces its file by one with the same
# content.


def write_predictions(
    predictions: Iterable[Prediction], folder: str | os.PathLike[str], *, sigmoid: bool = False
) -> int:
    """Write what `Trainer.predict` yields into a folder, one Parquet file for each batch.

    A file has the requested columns, then `prediction`, or a column for each output of a model with several.
    It is named part-00000012.parquet by the number of its batch, or rank-00000-00000012.parquet by rank and
    number where records are not leased. Each file is complete or absent.

    Args:
        predictions: The iterator of `Trainer.predict`.
        folder: Where the files are written; it is created if necessary.
        sigmoid: Whether to write probabilities instead of logits.

    Returns:
        How many rows this process has written.

    Raises:
        ValueError: A column has the name of an output, or is of a kind that cannot be written.

    Example:
        >>> users = {"user": torch.tensor([7, 8])}
        >>> predictions = [kv.train.Prediction(torch.zeros(2), users)]
        >>> kv.train.write_predictions(predictions, "predictions", sigmoid=True)
        2
    """
    into = Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    rank, rows = distributed.current().rank, 0
    for place, prediction in enumerate(predictions):
        records = prediction.records
        name = f"rank-{rank:05d}-{place:08d}" if records is None else f"part-{records.number:08d}"
        batch = record_batch(prediction, sigmoid=sigmoid)
        with replacing(into / f"{name}.parquet") as file:
            pq.write_table(pa.Table.from_batches([batch]), file)
        rows += batch.num_rows
    return rows


def record_batch(prediction: Prediction, *, sigmoid: bool = False) -> pa.RecordBatch:
    """The columns of a batch, followed by the model's outputs."""
    output = prediction.output
    outputs = dict(output) if isinstance(output, Mapping) else {"prediction": output}
    if both := outputs.keys() & prediction.columns.keys():
        raise ValueError(
            f"The model has an output '{min(both)}', so there cannot be a column of that name as well."
        )
    arrays = {name: _array(name, column) for name, column in prediction.columns.items()}
    arrays |= {name: _array(name, _numbers(values, sigmoid)) for name, values in outputs.items()}
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _numbers(output: Tensor, sigmoid: bool) -> Tensor:
    output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    return output.sigmoid() if sigmoid else output


def _array(name: str, column: Any) -> pa.Array:
    if isinstance(column, Tensor):
        if column.dim() <= 1:
            return pa.array(column.numpy())
        flat = pa.array(column.reshape(-1).numpy())
        return pa.FixedSizeListArray.from_arrays(flat, column[0].numel() if len(column) else 1)
    if isinstance(column, OptionalRagged | OptionalText):
        return nullable(column)
    if isinstance(column, Ragged):
        if column.offsets is None:
            return _array(name, column.values)
        if column.values.dtype == torch.uint8:  # text
            return pa.array([bytes(row).decode(errors="replace") for row in column.to_lists()])
        offsets = pa.array(column.offsets.numpy(), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, pa.array(column.values.numpy()))
    if isinstance(column, NestedRagged):
        return pa.array(column.to_lists())
    raise ValueError(
        f"Column '{name}' cannot be written: expected numbers, lists or text, got {type(column).__name__}."
    )
