"""Arguments of the wrong kind are errors that name the argument, wherever a number is expected."""

import numpy as np
import pytest
import torch

import karvan as kv


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


def test_numbers_of_numpy_and_torch_are_numbers():
    optimizer = kv.optim.Adam(lr=np.float32(0.5), betas=[np.float64(0.5), torch.tensor(0.5)], eps=1)
    assert optimizer.defaults["lr"] == 0.5
    assert kv.Table(8, length=np.int64(3), combiner="tile").length == 3
    assert kv.eviction.LRU(capacity=np.int32(5)).capacity == 5
    assert kv.optim.Adagrad(lr=0.1, row_wise=np.bool_(True)).defaults["row_wise"]
