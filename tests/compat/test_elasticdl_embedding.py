"""Embedding layers of ElasticDL: their rows are trained by the model's optimizer, here or on servers."""

import sys

import pytest
import torch

import karvan as kv
from karvan.cli.main import main
from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl.preprocessing import Embedding, row_optimizer

MODULE = """
import torch
from elasticdl.python.elasticdl.layers.embedding import Embedding

class CustomModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.item = Embedding(4, combiner="mean", name="item")
        self.out = torch.nn.Linear(4, 1)

    def forward(self, features):
        return self.out(self.item(features["items"])).squeeze(1)

def loss(labels, predictions):
    return torch.nn.functional.mse_loss(predictions, labels)

def optimizer(model, lr=0.05):
    return torch.optim.Adam(model.parameters(), lr)

def feed(records, mode, metadata):
    items = torch.tensor([[int(cell) for cell in record] for record in records])
    features = {"items": items * 2**40}
    return features if mode == "prediction" else (features, (items.sum(1) % 7).float())
"""


@pytest.fixture
def words(tmp_path):
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    (zoo / "embedding_zoo.py").write_text(MODULE)
    data = tmp_path / "data.csv"
    data.write_text("a,b\n" + "".join(f"{n},{n}\n" for n in range(40)))
    path = list(sys.path)
    yield (
        ("--model_zoo", str(zoo), "--model_def", "embedding_zoo.CustomModel", "--minibatch_size", "8"),
        str(data),
    )
    sys.modules.pop("embedding_zoo", None)
    sys.path[:] = path


def run(command, words, *more):
    return main(["run", "--as", "elasticdl", command, *words, *map(str, more)])


def loss_of(text):
    return float(text.split("loss: ")[1].split()[0])


def train(words, data, out, *strategy):
    flags = ("--num_epochs", 30, "--training_data", data, "--output", out)
    return run("train", words, *strategy, *flags)


def test_rows_are_trained_with_the_model(tmp_path, words, capfd):
    words, data = words
    local = ("--distribution_strategy", "Local")
    assert train(words, data, tmp_path / "model", *local) == 0
    (table,) = kv.checkpoint.summary(tmp_path / "model").tables
    assert (table.name, table.rows) == ("item", 40)
    capfd.readouterr()
    load = ("--checkpoint_dir_for_init", tmp_path / "model", "--validation_data", data)
    assert run("evaluate", words, *local, *load) == 0
    assert loss_of(capfd.readouterr().out) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [(), ("--use_async",)], ids=["sync", "async"])
def test_rows_are_on_the_servers_of_a_job(tmp_path, words, capfd, strategy):
    words, data = words
    servers = ("--num_ps_pods", 2, "--num_minibatches_per_task", 1)
    assert train(words, data, tmp_path / "model", *servers, *strategy) == 0
    capfd.readouterr()
    load = ("--checkpoint_dir_for_init", tmp_path / "model", "--validation_data", data)
    assert run("evaluate", words, "--num_ps_pods", 2, *load) == 0
    assert loss_of(capfd.readouterr().out) < 1.0


SUMS = """
import os
import time
from pathlib import Path

import torch
import karvan as kv
from elasticdl.python.elasticdl.layers.embedding import Embedding

notes = Path(os.environ["NOTES"])

class CustomModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.item = Embedding(1, name="item", embeddings_initializer=kv.init.Constant(0.0))
        self.bias = torch.nn.Parameter(torch.zeros(1))  # its gradients are averaged: it counts steps

    def forward(self, ids):
        return self.item(ids).squeeze(1) + self.bias

def loss(labels, predictions):
    return predictions.mean()

def optimizer(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr)

def feed(records, mode, metadata):
    ids = torch.full((len(records),), 7)
    return ids, ids

class Note(kv.callbacks.Callback):
    def on_fit_begin(self, trainer):
        (notes / str(os.getpid())).touch()

    def on_step_end(self, trainer, logs):
        time.sleep(0.01 if len(list(notes.iterdir())) == 2 else 0.3)  # until the other is there

def callbacks():
    return [Note()]
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--grads_to_wait", 2, "--sync_version_tolerance", 100)])
def test_gradients_of_rows_are_added_up_over_the_workers_of_a_step(tmp_path, words, capfd, flags):
    (tmp_path / "zoo" / "embedding_zoo.py").write_text(SUMS)
    (tmp_path / "notes").mkdir()
    records, batches = tmp_path / "records.csv", 120
    records.write_text("a\n" + "1\n" * 8 * batches)
    (words, _), envs = words, ("--envs", f"NOTES={tmp_path / 'notes'}")
    sizes = ("--num_minibatches_per_task", 1, "--training_data", records, "--output", tmp_path / "model")
    assert run("train", words, *envs, *flags, *sizes) == 0
    capfd.readouterr()
    load = ("--checkpoint_dir_for_init", tmp_path / "model", "--validation_data", records)
    assert run("evaluate", words, *envs, *load) == 0
    steps = -kv.checkpoint.find(tmp_path / "model").state()["model"]["model.bias"].item()
    assert steps == batches / 2 if flags else batches / 2 <= steps < batches
    assert loss_of(capfd.readouterr().out) == -(batches + steps)


def test_shapes_of_vectors():
    ids = torch.tensor([[1, 2], [3, 1]])
    each, pooled = Embedding(3, name="user"), Embedding(3, name="user", combiner="sum")
    vectors = each(ids)
    assert vectors.shape == (2, 2, 3)
    assert torch.equal(vectors[0, 0], vectors[1, 1])
    assert each(ids[:, 0]).shape == (2, 3)
    assert torch.equal(pooled(ids), vectors.sum(1))
    with pytest.raises(ContractError, match="combiner sum, mean or sqrtn, got 'max'"):
        Embedding(3, combiner="max")
    with pytest.raises(ContractError, match="expects whole numbers"):
        each(torch.zeros(2))


def test_rows_take_the_options_of_the_models_optimizer():
    parameters = [torch.zeros(1, requires_grad=True)]
    made = row_optimizer(torch.optim.Adagrad(parameters, lr=0.3, initial_accumulator_value=0.1))
    assert isinstance(made, kv.optim.Adagrad)
    assert (made.defaults["lr"], made.defaults["initial_accumulator_value"]) == (0.3, 0.1)
    assert row_optimizer(torch.optim.AdamW(parameters, betas=(0.5, 0.6))).defaults["betas"] == (0.5, 0.6)
    with pytest.raises(ContractError, match="one of SGD, Adam, AdamW, Adagrad, got RMSprop"):
        row_optimizer(torch.optim.RMSprop(parameters))
    assert row_optimizer(torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)).defaults["nesterov"]
    assert row_optimizer(torch.optim.Adam(parameters, amsgrad=True)).defaults["amsgrad"]
    assert row_optimizer(torch.optim.Adagrad(parameters, lr_decay=0.5)).defaults["lr_decay"] == 0.5
    with pytest.raises(ContractError, match=r"no dampening in SGD: expected 0, got 0\.5"):
        row_optimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5))
