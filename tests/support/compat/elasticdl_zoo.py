"""Model zoos of one module, data for them, and the commands of ElasticDL in this process."""

import sys
import textwrap
from contextlib import contextmanager

from karvan.cli.main import main

LOCAL = ("--distribution_strategy", "Local")

_BASE = """
import torch
from elasticdl.python.common.constants import Mode

def custom_model():
    return torch.nn.Linear(1, 1)

def loss(labels, predictions):
    return torch.nn.functional.mse_loss(predictions.reshape(-1), labels.reshape(-1))

def optimizer(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr)

def feed(records, mode, metadata):
    rows = [[float(cell) for cell in record] for record in records]
    features = [row[:1] for row in rows]
    return features if mode == Mode.PREDICTION else (features, [row[1] for row in rows])
"""


@contextmanager
def own_modules(*names):
    """Within it, modules of these names are imported anew; they do not outlive it."""
    before, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if name.split(".")[0] in names:
                del sys.modules[name]


def elasticdl(*words):
    """Run a command; returns its exit code."""
    return main(["run", "--as", "elasticdl", *map(str, words)])


def zoo_of(folder, text):
    """A model zoo of one module: a linear model that learns y = 2 x, and what the text adds or changes."""
    zoo = folder / "zoo"
    zoo.mkdir()
    (zoo / "zoo_model.py").write_text(_BASE + textwrap.dedent(text))
    return ("--model_zoo", zoo, "--model_def", "zoo_model.custom_model")


def csv_of(folder, rows=64, name="data.csv", sep=","):
    """A file of x and y = 2 x."""
    lines = [sep.join(("x", "y"))] + [f"{x / rows}{sep}{2 * x / rows}" for x in range(rows)]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name
