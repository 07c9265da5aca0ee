"""A contract whose parameters count how often each record was trained, whichever workers train it.

Records are their numbers. NOTES is a folder in which workers note their steps; PAUSE, seconds after each step
until there is a note that says hurry.
"""

import os
import time
from pathlib import Path

import torch

import karvan as kv

RECORDS = 300
notes = Path(os.environ.get("NOTES", "."))


class CustomModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(RECORDS))

    def forward(self, numbers):
        return Clip.apply(self.times)[numbers]


class Clip(torch.autograd.Function):
    """Makes every gradient exactly one step."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return (gradient != 0).float()


def loss(labels, predictions):
    return predictions.mean() + 1.0


class Counting(torch.optim.Optimizer):
    """Adds 1 to every parameter with a gradient, by however many workers that was divided."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += (parameter.grad != 0).float()


def optimizer(parameters):
    if os.environ.get("KARVAN_MODE") == "async":  # one that servers can run
        return torch.optim.SGD(parameters, lr=1.0, maximize=True)
    return Counting(parameters)


def feed(records, mode, metadata):
    numbers = torch.tensor([int(record) for record in records])
    return numbers if mode == "prediction" else (numbers, numbers)


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        (notes / f"step-{os.getpid()}").write_text(str(trainer.step))
        if not (notes / "hurry").exists():
            time.sleep(float(os.environ.get("PAUSE", "0")))


def callbacks():
    return [Note()]


class PredictionOutputsProcessor:
    def process(self, predictions, worker_id):
        (notes / f"predicted-{time.monotonic_ns()}-{os.getpid()}").write_text(
            "\n".join(str(int(each)) for each in predictions)
        )
