"""What somebody gets wrong in the first hour, and the one line that says what to write instead."""

from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from train_helpers import batches, model, records, trainer

import karvan as kv
from karvan.train.callbacks import EarlyStopping

COLUMNS = {name: column.numpy() for name, column in records(32).items()}
TEXT = "kv.Feature('user').hash(\"farm\") in a FeatureEngine, or read it with columns=[kv.data.Varlen("

ELASTIC = kv.data.elastic("clicks/*.parquet", 4, master="127.0.0.1:1")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pd.DataFrame(COLUMNS), "got a DataFrame: give it kv.data.read(frame, batch_size=1024)"),
        (pl.DataFrame(COLUMNS), "got a DataFrame: give it kv.data.read(frame, batch_size=1024)"),
        (COLUMNS, "got a dict: give it kv.data.read(columns, batch_size=1024)"),
        ("clicks/*.parquet", "got the path 'clicks/*.parquet': give it kv.data.read('clicks/*.parquet', "),
        (Path("a.csv"), "got the path 'a.csv': give it kv.data.read("),
        (batches(1)[0], "expects several batches, got one Batch: give it [batch]"),
        (records(4), "expects several batches, got one dict: give it [batch]"),
        (torch.utils.data.TensorDataset(torch.ones(3)), "give it torch.utils.data.DataLoader(dataset"),
        (ELASTIC, "expects batches that need no acknowledgement, got kv.data.elastic"),
        (ELASTIC.loader(), "expects batches that need no acknowledgement, got kv.data.elastic"),
        (torch.ones(3), "expects batches, such as kv.data.read(…) or a list of kv.Batch, got Tensor"),
        (None, "expects batches, such as kv.data.read(…) or a list of kv.Batch, got None"),
        (17, "got 17"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_that_is_no_batches_is_refused_before_anything_happens(data, message, tmp_path):
    fit = trainer(checkpoints=tmp_path / "run")
    for call in ("fit", "evaluate", "predict"):
        with pytest.raises(TypeError) as told:
            getattr(fit, call)(data)
        assert message in str(told.value)
        assert str(told.value).startswith(f"{call} expects")
    if data is not None:
        with pytest.raises(TypeError, match="eval_data expects"):
            fit.fit(batches(2), eval_data=data)
    optimizers = {"dense_optimizer": torch.optim.SGD, "sparse_optimizer": kv.optim.SGD(lr=0.1)}
    with kv.TrainContext(model(), **optimizers) as context:
        with pytest.raises(TypeError, match="loader expects"):
            context.loader(data)
        with context.eval() as evaluation, pytest.raises(TypeError, match="loader expects"):
            evaluation.loader(data)
    assert (fit.step, (tmp_path / "run").exists()) == (0, False)


class Endless:
    """Data that has no `__iter__`, only `__getitem__`, can be iterated in Python."""

    def __getitem__(self, index):
        return batches(2)[index]


class Batches(torch.utils.data.Dataset):
    """A dataset whose items are batches."""

    def __getitem__(self, index):
        return batches(2)[index]


class Stream(torch.utils.data.IterableDataset):
    """A dataset that is iterated."""

    def __iter__(self):
        return iter(batches(2))


@pytest.mark.parametrize(
    "data",
    [
        *(Endless(), Batches(), Stream(), (batch for batch in batches(2)), tuple(batches(2))),
        torch.utils.data.DataLoader(batches(2), batch_size=None),
    ],
    ids=lambda data: type(data).__name__,
)
def test_any_iterable_of_batches_is_taken(data):
    assert trainer().fit(data, epochs=np.int64(1)).step == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": kv.losses.BinaryCrossEntropy}, "got the class BinaryCrossEntropy: call it"),
        ({"loss": nn.BCEWithLogitsLoss}, "got the class BCEWithLogitsLoss: call it"),
        (
            {"loss": nn.BCEWithLogitsLoss()},
            'expects labels: give kv.losses.BinaryCrossEntropy(label="label")',
        ),
        ({"loss": functional.mse_loss}, 'lambda output, batch: loss(output, batch["label"])'),
        ({"loss": "bce"}, "loss expects a function of output and batch"),
        ({"loss": None}, "loss expects a function of output and batch"),
        (
            {"metrics": {"auc": kv.metrics.AUC}},
            "Metric 'auc' must be an instance, got the class AUC: call it",
        ),
        ({"metrics": [kv.metrics.AUC()]}, 'metrics={"auc": kv.metrics.AUC()}, got list'),
        ({"metrics": kv.metrics.AUC()}, 'metrics={"auc": kv.metrics.AUC()}, got AUC'),
        ({"metrics": {"auc": "auc"}}, "Metric 'auc' must be a metric"),
        ({"dense_optimizer": kv.optim.Adagrad(lr=0.1)}, "is for rows: give it as sparse_optimizer"),
        ({"dense_optimizer": kv.optim.Adagrad}, "is for rows: give it as sparse_optimizer"),
        ({"dense_optimizer": "adam"}, "dense_optimizer expects torch.optim.Adam, or lambda"),
        ({"sparse_optimizer": torch.optim.Adam}, "Adam is for parameters"),
        (
            {"sparse_optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters())},
            "Adam is for parameters: give it as dense_optimizer",
        ),
        ({"sparse_optimizer": kv.optim.Adagrad}, "got the class Adagrad: call it"),
        ({"sparse_optimizer": "adagrad"}, "kv.optim, such as kv.optim.Adagrad(lr=0.05), got 'adagrad'"),
        ({"callbacks": EarlyStopping("auc")}, "got a single EarlyStopping: give it [EarlyStopping(…)]"),
        ({"callbacks": [EarlyStopping]}, 'such as EarlyStopping("auc"), got EarlyStopping'),
        ({"checkpoints": True}, "checkpoints expects a folder or kv.Checkpoints(folder), got True"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            "'step_size'. Give it lambda optimizer: StepLR(optimizer, …)",
        ),
    ],
)
def test_an_argument_of_the_wrong_kind_says_what_to_give(options, message):
    with pytest.raises(TypeError) as told:
        trainer(**options)
    assert message in str(told.value)


def test_a_class_is_no_model():
    with pytest.raises(TypeError, match="got the class Linear: call it"):
        kv.Trainer(nn.Linear, kv.losses.BinaryCrossEntropy(), dense_optimizer=torch.optim.Adam)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1 or None, got 0"),
        ({"epochs": "3"}, TypeError, "expects an integer as epochs, got '3'"),
        ({"epochs": 1.5}, TypeError, "expects an integer as epochs, got 1.5"),
        ({"max_steps": True}, TypeError, "expects an integer as max_steps, got True"),
    ],
)
def test_a_wrong_length_of_training_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        trainer().fit(batches(2), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"device='cuda' expects a GPU and a torch .*, but .*: omit device"):
        trainer(device="cuda")
    with pytest.raises(ValueError, match="device='cuda:1' expects a GPU"):
        kv.TrainContext(model(), dense_optimizer=torch.optim.SGD, device=torch.device("cuda:1"))


def test_a_device_that_does_not_exist_is_told():
    with pytest.raises(ValueError, match='device expects "cpu", "cuda" or "cuda:1", got \'gpu\''):
        trainer(device="gpu")


def test_text_as_ids_says_how_to_hash_it():
    engine = kv.EmbeddingEngine({"user": kv.Table(4)})
    for ids in (["a", "b"], np.array(["a", "b"]), pd.Series(["a", "b"])):
        with pytest.raises(TypeError) as told:
            engine({"user": ids})
        assert TEXT in str(told.value)
    text = {**COLUMNS, "user": np.array([f"u{user}" for user in COLUMNS["user"]])}
    with pytest.raises(TypeError) as told:
        trainer().fit(kv.data.read(text, 16))
    assert TEXT in str(told.value)
    lists = {**COLUMNS, "user": np.array([f"{user} 7" for user in COLUMNS["user"]])}
    with pytest.raises(TypeError) as told:
        trainer().fit(kv.data.read(lists, 16))
    assert """kv.Feature('user').split(" ").to_ids()""" in str(told.value)
    # What the message says works.
    hashed = kv.FeatureEngine([kv.Feature("user").hash("farm")])
    assert trainer().fit(kv.data.read(text, 16, transform=hashed)).step == 2
    columns = [kv.data.Varlen("user", hash="farm"), *(name for name in text if name != "user")]
    assert trainer().fit(kv.data.read(text, 16, columns=columns)).step == 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.arange(3), "kv.data.read makes batches of tensors"),
        (torch.arange(3).to(torch.complex64), r"Convert them: batch\['user'\].long\(\)"),
        (
            torch.rand(3),
            r"Numbers become ids by kv.Feature\('user'\).bucketize.*Int64.*Fixed\('user', dtype=",
        ),
    ],
)
def test_ids_of_another_type_say_what_to_do(ids, message):
    with pytest.raises(TypeError, match=message):
        kv.EmbeddingEngine({"user": kv.Table(4)})({"user": ids})


def test_an_engine_says_what_it_is_made_of_and_called_with():
    with pytest.raises(TypeError, match=r"Feature 'user' expects a kv.Table, .* got int"):
        kv.EmbeddingEngine({"user": 16})
    with pytest.raises(TypeError, match=r"expects a mapping of features to tables, .* got list"):
        kv.EmbeddingEngine(["user"])
    with pytest.raises(TypeError, match=r"such as kv.Batch\({'user': ids}\), got Tensor"):
        kv.EmbeddingEngine({"user": kv.Table(4)})(torch.tensor([1]))


def test_a_wrong_name_is_told_with_the_nearest_one():
    def asks(call, error=KeyError):
        with pytest.raises(error, match=r"Did you mean '(label|user)'\?"):
            call()

    asks(lambda: trainer(loss=kv.losses.BinaryCrossEntropy(label="lable")).fit(batches(2)))
    asks(lambda: trainer(metrics={"auc": kv.metrics.AUC(label="lable")}).fit(batches(2)))
    asks(lambda: list(trainer().predict(batches(1), columns=["usre"])))
    asks(lambda: kv.EmbeddingEngine({"usre": kv.Table(4)})(batches(1)[0]))
    asks(lambda: model().embeddings.table("usr"))
    asks(lambda: kv.data.read(COLUMNS, 16, columns=["usr"]), kv.data.DataError)


def test_one_name_in_place_of_a_list_is_refused():
    with pytest.raises(TypeError, match=r"columns expects a list of names, got 'user': give it \['user'\]"):
        trainer().predict(batches(1), columns="user")
    with pytest.raises(ValueError, match=r"Expected a list of different ids, got 'user': give it \['user'\]"):
        kv.models.DLRM(["price"], "user")


class Wide(nn.Module):
    """Gives some numbers for each sample."""

    def __init__(self, width):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"user": kv.Table(4)})
        self.net = nn.Linear(4, width)

    def forward(self, batch):
        return self.net(self.embeddings(batch)["user"])


def test_an_output_of_one_column_meets_its_labels_and_a_wider_one_is_told():
    assert trainer(Wide(1), metrics={"auc": kv.metrics.AUC()}).fit(batches(2)).step == 2
    with pytest.raises(ValueError, match=r"shape \[16, 2\], got \[16\]: the model should give one number"):
        trainer(Wide(2)).fit(batches(2))
