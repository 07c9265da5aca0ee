"""Arguments of the wrong kind are errors that name the argument, what is expected and what was received."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch

import karvan as kv
from karvan.argument_checks import meant


def _engine():
    return kv.EmbeddingEngine({"user": kv.Table(4)})


WRONG = {
    "a rate as text": (
        lambda: kv.optim.Adagrad(lr="0.1"),
        "Adagrad expects a number as lr, got '0.1'",
    ),
    "a rate of a group": (
        lambda: kv.optim.Adam([{"params": _engine(), "lr": "0.1"}]),
        "Adam expects a number as lr, got '0.1'",
    ),
    "a flag as a rate": (lambda: kv.optim.SGD(lr=True), "SGD expects a number as lr, got True"),
    "no rate": (lambda: kv.optim.FTRL(lr=None), "FTRL expects a number as lr, got None"),
    "a limit": (lambda: kv.optim.AdamW(lr=0.1, clip_norm="1"), "expects a number as clip_norm, got '1'"),
    "betas": (lambda: kv.optim.Adam(lr=0.1, betas=("0.9", 0.99)), "expects a number as betas, got '0.9'"),
    "text as a flag": (
        lambda: kv.optim.Adagrad(row_wise="no"),
        "expects True or False as row_wise",
    ),
    "a dimension": (lambda: kv.Table("8"), "Table expects an integer as dim, got '8'"),
    "a dimension that is a flag": (lambda: kv.Table(True), "Table expects an integer as dim, got True"),
    "a length": (lambda: kv.Table(8, combiner="tile", length="3"), "expects an integer as length, got '3'"),
    "a count": (lambda: kv.admission.MinCount("2"), "MinCount expects an integer as n, got '2'"),
    "a share": (lambda: kv.admission.Probability("0.5"), "Probability expects a number as p, got '0.5'"),
    "a capacity": (lambda: kv.eviction.LRU(capacity="9"), "LRU expects an integer as capacity, got '9'"),
    "steps": (lambda: kv.eviction.Age(True), "Age expects an integer as steps, got True"),
    "a deviation": (lambda: kv.init.Normal(std="0.01"), "Normal expects a number as std, got '0.01'"),
    "a clipping": (
        lambda: kv.Trainer(torch.nn.Linear(1, 1), lambda output, batch: output, clip_norm="1"),
        "Trainer expects a number as clip_norm, got '1'",
    ),
    "a patience": (lambda: kv.callbacks.EarlyStopping("auc", "2"), "expects an integer as patience, got '2'"),
    "bins": (lambda: kv.metrics.AUC(bins="9"), "AUC expects an integer as bins, got '9'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_the_wrong_kind_is_an_error_that_names_it(case):
    call, text = WRONG[case]
    with pytest.raises(TypeError, match=text):
        call()


_IDS = torch.tensor([1, 2, 3])
_FRAME = pd.DataFrame({"user": [1, 2]})


def _trainer(**options):
    options = {"dense_optimizer": torch.optim.SGD} | options
    return kv.Trainer(torch.nn.Linear(1, 1), lambda output, batch: output.mean(), **options)


def _scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


# What ended in an error of our internals, or in none.
UNCLEAR = {
    "a modulus": (lambda: kv.ids.mod(_IDS, 1.5), "modulus must be an integer, but is 1.5"),
    "buckets": (lambda: kv.ids.bucket(_IDS, 1.5), "bucket expects an integer as size, got 1.5"),
    "a group": (lambda: kv.ids.prefix(_IDS, "a", 8), "prefix expects an integer as group, got 'a'"),
    "ids of numpy": (lambda: kv.ids.mod(_IDS.numpy(), 8), r"ndarray: give it torch.tensor\(ids\)"),
    "hashed numbers": (lambda: kv.ids.farm([1, 2]), "kv.ids.mod, prefix and hash_stack take ids"),
    "torch's order of sizes": (lambda: kv.Table(100, 16), "Table expects text as name, got 16"),
    "a number as a feature": (lambda: kv.EmbeddingEngine({5: kv.Table(4)}), "names of features.*got 5"),
    "no ids": (lambda: _engine()({"user": None}), "is None in the batch"),
    "three betas": (lambda: kv.optim.Adam(lr=0.1, betas=(0.9, 0.9, 0.9)), "two numbers as betas"),
    "one beta": (lambda: kv.optim.Adam(lr=0.1, betas=0.9), "expects two numbers as betas, got 0.9"),
    "an infinite rate": (lambda: kv.optim.SGD(lr=float("inf")), "must be finite and not negative, got inf"),
    "a label": (lambda: kv.metrics.AUC(label=5), "AUC expects text as label, got 5"),
    "tensors": (lambda: kv.metrics.AUC().update(_IDS, _IDS), r"add\(scores, labels\) takes tensors"),
    "a length": (lambda: kv.Feature("h").truncate("50"), "Feature.truncate expects an integer as length"),
    "a remainder": (lambda: kv.Feature("h").mod("3"), "Feature.mod expects an integer as modulus, got '3'"),
    "a limit": (lambda: kv.Feature("x").clip(low="a"), "Feature.clip expects a number as low, got 'a'"),
    "a misspelled bucket": (lambda: kv.Feature("q").hash("farm", bukcet=3), "Did you mean 'bucket'"),
    "one feature": (lambda: kv.FeatureEngine(kv.Feature("a")), r"give it \[kv.Feature\('a'\)\]"),
    "a batch": (lambda: kv.FeatureEngine([kv.Feature("a")])(5), "expects a batch, .* got int"),
    "one column": (lambda: kv.data.read(_FRAME, 2, columns="user"), r"give it \['user'\]"),
    "a number as a column": (lambda: kv.data.read(_FRAME, 2, columns=[5]), "expects names, .* got 5"),
    "options": (lambda: kv.data.read("x.csv", 2, options=["a"]), r"options expects a mapping .* got \['a'\]"),
    "a transform": (lambda: kv.data.read(_FRAME, 2, transform="x"), "transform expects a function"),
    "a transform without a result": (
        lambda: next(iter(kv.data.read(_FRAME, 2, transform=lambda batch: None))),
        "transform must give a batch, .* but gave None",
    ),
    "a capacity": (lambda: kv.connect("memory", capacity="3"), "connect expects an integer as capacity"),
    "loggers": (lambda: _trainer(loggers="jsonl"), r"loggers expects a list such as .* got 'jsonl'"),
    "one logger": (lambda: _trainer(loggers=kv.loggers.CSVLogger("x")), r"give it \[CSVLogger\(…\)\]"),
    "no logger": (lambda: _trainer(loggers=[object()]), "loggers must be Loggers, .* got object"),
    "callbacks": (lambda: _trainer(callbacks="ema"), "callbacks expects a list .* got 'ema'"),
    "a prepare": (lambda: _trainer(prepare="x"), "prepare expects a function of a batch, got 'x'"),
    "frozen": (lambda: _trainer(frozen=5), "frozen expects names of tables and parameters, got int"),
    "a scheduler": (lambda: _trainer(scheduler={"dense": "cosine"}), "scheduler expects .* got 'cosine'"),
    "a scheduler of another optimizer": (
        lambda: _trainer(scheduler=_scheduler(torch.optim.SGD([torch.zeros(1)], 0.1))),
        "changes the learning rates of another optimizer",
    ),
    "a scheduler too early": (lambda: _scheduler(kv.optim.SGD(lr=0.1)), r"call attach\(engine\)"),
    "a copy": (lambda: copy.copy(kv.optim.SGD(_engine(), lr=0.1)), "neither copied nor pickled"),
    "a device": (lambda: _trainer(device=0.5), "device expects .* got 0.5"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_mistake_is_an_error_of_the_call_and_not_of_what_is_inside(case):
    call, text = UNCLEAR[case]
    with pytest.raises((TypeError, ValueError, AttributeError), match=text):
        call()


@pytest.mark.parametrize(
    ("wrong", "names", "right"),
    [
        ("admission", ["missing", "admit", "evict"], "admit"),
        ("initializer", ["init", "dim"], "init"),
        ("dimension", ["missing", "dim"], "dim"),
        ("Auc", ["GAUC", "AUC"], "AUC"),
    ],
)
def test_the_name_that_is_meant_begins_alike_or_is_the_most_alike(wrong, names, right):
    assert meant(wrong, names) == f" Did you mean '{right}'?"
    assert meant("weight", ["label", "group"]) == ""


def test_an_optimizer_without_tables_can_be_shown_copied_and_pickled():
    optimizer = kv.optim.Adagrad(lr=0.5)
    assert "Adagrad(lr=0.5, " in repr(optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.attach(_engine())
        assert other.param_groups[0]["lr"] == 0.5


def test_metrics_take_arrays_and_lists():
    auc = kv.metrics.AUC()
    auc.add([0.1, 0.9], np.array([0, 1]), weights=[1.0, 2.0])
    assert auc.compute() == 1.0


def test_numbers_of_numpy_and_torch_are_numbers():
    optimizer = kv.optim.Adam(lr=np.float32(0.5), betas=[np.float64(0.5), torch.tensor(0.5)], eps=1)
    assert optimizer.defaults["lr"] == 0.5
    assert kv.Table(8, length=np.int64(3), combiner="tile").length == 3
    assert kv.eviction.LRU(capacity=np.int32(5)).capacity == 5
    assert kv.eviction.LRU(capacity=1e9).capacity == 10**9
    with pytest.raises(TypeError, match=r"LRU expects an integer as capacity, got 1\.5"):
        kv.eviction.LRU(capacity=1.5)
    assert kv.optim.Adagrad(lr=0.1, row_wise=np.bool_(True)).defaults["row_wise"]
