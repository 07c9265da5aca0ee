"""`train`, `evaluate` and `predict` in this process, alone or as a worker of a job.

`ContractModel`, `ContractLoss` and `FunctionMetric` are the parts of a contract as a `kv.Trainer` has them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from karvan import checkpoint
from karvan.checkpoint import Checkpoints
from karvan.compat.elasticdl.contract import ContractError, FunctionNames, Mode, ModelContract, fit_options
from karvan.compat.elasticdl.preprocessing import row_optimizer
from karvan.compat.elasticdl.readers import FeedStep, open_data, parse_params
from karvan.distributed import current
from karvan.job.environment import JobEnvironment
from karvan.metrics import Mean, Metric
from karvan.train.prediction_files import write_predictions
from karvan.train.reporting.loggers import TensorBoardLogger
from karvan.train.step.optimizer_step import engines_of
from karvan.train.trainer import Trainer
from karvan.train.types import Pair, samples_of

_NO_END = sys.maxsize  # epochs


def run(command: str, flags: argparse.Namespace) -> None:
    """Run a command in this process, under its connection."""
    logging.basicConfig(level=flags.log_level, format="%(asctime)s %(levelname)s %(message)s")
    {"train": train, "evaluate": evaluate, "predict": predict}[command](flags, contract_of(flags))


def contract_of(flags: argparse.Namespace) -> ModelContract:
    """The contract of the module that flags name; they may have other names for its parts, too."""
    params, usual = parse_params("--model_params", flags.model_params), vars(FunctionNames())
    names = FunctionNames(**{name: getattr(flags, name, usual[name]) for name in usual})
    return ModelContract(flags.model_zoo, flags.model_def, params, names)


def train(flags: argparse.Namespace, contract: ModelContract) -> None:
    """Train, with evaluations if there is validation data."""
    options = fit_options(contract.callbacks())
    model = contract.make_model()
    optimizer = contract.make_optimizer(model)
    folder = checkpoint_folder(flags)
    trainer = Trainer(
        ContractModel(model),
        ContractLoss(contract.loss),
        dense_optimizer=optimizer,
        sparse_optimizer=row_optimizer(optimizer) if engines_of(model) else None,
        metrics=make_metrics(contract.eval_metrics()),
        scheduler=options.schedulers or None,
        callbacks=options.callbacks,
        loggers=[TensorBoardLogger(flags.tensorboard_log_dir)] if flags.tensorboard_log_dir else [],
        log_every=flags.log_loss_steps,
        progress="plain",
        checkpoints=Checkpoints(folder, keep_last=flags.keep_checkpoint_max or None) if folder else None,
        checkpoint_every=flags.checkpoint_steps or None if folder else None,
        checkpoint_seconds=None,
    )
    if flags.checkpoint_dir_for_init:
        checkpoint.warm_start(trainer.model, flags.checkpoint_dir_for_init)
    data = data_of(flags, contract, flags.training_data, Mode.TRAINING)
    validation = flags.validation_data
    result = trainer.fit(
        data,
        epochs=flags.num_epochs if flags.num_epochs > 0 else _NO_END,
        max_steps=options.max_steps,
        eval_data=data_of(flags, contract, validation, Mode.EVALUATION) if validation else None,
        eval_every=flags.evaluation_steps or None,
    )
    if current().trainers.rank == 0:
        print(result, flush=True)


def evaluate(flags: argparse.Namespace, contract: ModelContract) -> None:
    """Print the loss and the metrics of a trained model."""
    trainer = _trained(flags, contract, ContractLoss(contract.loss))
    data = data_of(flags, contract, flags.validation_data, Mode.EVALUATION)
    metrics = trainer.evaluate(data)
    if current().rank == 0:
        for name, value in metrics.items():
            print(f"{name}: {value:.6g}", flush=True)


def predict(flags: argparse.Namespace, contract: ModelContract) -> None:
    """Pass the predictions of a trained model to the contract's processor, or write them as Parquet."""
    processor = contract.prediction_outputs_processor()
    if (processor is None) == (not flags.output):
        raise ContractError(
            f"predict expects a class {contract.names.prediction_outputs_processor} in the module, which "
            "gets the predictions, or --output, a folder for them as Parquet: expected one of the two, got "
            f"{'both' if flags.output else 'neither'}."
        )
    trainer = _trained(flags, contract, _no_loss)
    data = data_of(flags, contract, flags.prediction_data, Mode.PREDICTION)
    predictions = trainer.predict(data)
    if processor is None:
        write_predictions(predictions, flags.output)
        return
    worker = JobEnvironment.read().index
    for prediction in predictions:
        processor.process(prediction.output, worker)


def data_of(flags: argparse.Namespace, contract: ModelContract, origin: str, mode: str) -> Any:
    """The batches of some data, as the contract's feed prepares them."""
    per_task = flags.minibatch_size * flags.num_minibatches_per_task
    params = parse_params("--data_reader_params", flags.data_reader_params)
    opened = open_data(origin, mode, params, contract.custom_data_reader, per_task)
    feed, numbers = contract.feed
    step = FeedStep(feed, mode, opened.metadata, opened.records_of, numbers=numbers)
    return opened.read(flags.minibatch_size, per_task, mode == Mode.TRAINING, step)


def checkpoint_folder(flags: argparse.Namespace) -> str:
    """Where a training saves; without --checkpoint_dir, in the folder of its output."""
    return str(getattr(flags, "checkpoint_dir", "") or flags.output)


def export(flags: argparse.Namespace) -> None:
    """Save the model of the newest checkpoint into --output, if that is another folder."""
    if not (flags.output and flags.checkpoint_dir):
        return
    contract = contract_of(flags)
    trainer = Trainer(ContractModel(contract.make_model()), _no_loss)
    loaded = trainer.load(flags.checkpoint_dir)
    checkpoint.save(flags.output, {"model": trainer.model.state_dict()}, trainer.model, step=loaded.step)


def _trained(flags: argparse.Namespace, contract: ModelContract, loss: Callable[..., Any]) -> Trainer:
    model = ContractModel(contract.make_model())
    trainer = Trainer(model, loss, metrics=make_metrics(contract.eval_metrics()), progress="none")
    trainer.load(flags.checkpoint_dir_for_init)
    return trainer


def _no_loss(output: Any, batch: Any) -> Any:
    raise AssertionError("A Trainer that predicts computes no loss.")


class ContractModel(nn.Module):
    """A model whose several outputs have names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any) -> Any:
        """The predictions; several are a mapping."""
        output = self.model(features)
        if isinstance(output, tuple | list):
            return {f"output_{number}": value for number, value in enumerate(output)}
        return output


class ContractLoss:
    """`loss(labels, predictions)` as a loss of (output, batch)."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self._loss = loss

    def __call__(self, output: Any, batch: Pair) -> Any:
        """The mean; losses of samples are averaged, as ElasticDL does."""
        loss = self._loss(batch.labels, output)
        return loss.mean() if isinstance(loss, Tensor) and loss.dim() else loss


class FunctionMetric(Mean):
    """The mean of a function of (labels, predictions): a number for each sample, or one for the batch."""

    def __init__(self, function: Callable[[Any, Any], Any], output: str | None = None) -> None:
        super().__init__(output=output)
        self._function = function

    @override
    def update(self, output: Any, batch: Any) -> None:
        self.add_selection(self.select(output, batch))

    @torch.no_grad()
    @override
    def select(self, output: Any, batch: Any) -> dict[str, Tensor]:
        """The function's numbers, of which one for the batch counts for each sample."""
        predictions = output if self.output is None else self._scores(output)
        labels = batch.labels
        if self.output is not None and isinstance(labels, Mapping):
            labels = labels.get(self.output, labels)
        values = torch.as_tensor(self._function(labels, predictions)).detach().double()
        if not values.dim():
            values = values.expand(samples_of(batch))
        return {"scores": values.reshape(-1), "labels": torch.zeros_like(values.reshape(-1))}


def make_metrics(metrics: Mapping[str, tuple[str | None, Any]]) -> dict[str, Any]:
    """The metrics of `eval_metrics_fn`: functions, or metrics of Karvan, whose label is "label"."""
    built: dict[str, Any] = {}
    for name, (output, metric) in metrics.items():
        if isinstance(metric, Metric):
            built[name] = metric
        elif hasattr(metric, "update_state") or not callable(metric):
            raise ContractError(
                f"eval_metrics_fn must give functions of (labels, predictions), or metrics of kv.metrics, "
                f"got {type(metric).__name__} for '{name}'."
            )
        else:
            built[name] = FunctionMetric(metric, output)
    return built
