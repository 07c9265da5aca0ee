"""Optimizers as plain values."""

import json

import pytest
import torch
from dense_helpers import MAKERS, make_model

from karvan.dense.wire_format import describe, make_optimizer


@pytest.mark.parametrize("name", MAKERS)
def test_descriptions_are_json_and_make_the_same_optimizer(name):
    optimizer = MAKERS[name](make_model().parameters())
    described = json.loads(json.dumps(describe(optimizer)))
    made = make_optimizer(described, [torch.zeros(2, 2)])
    assert type(made) is type(optimizer)
    assert describe(made) == described
    assert make_optimizer(described, []).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_description_has_the_options_of_now():
    optimizer = torch.optim.AdamW(
        [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=torch.tensor(0.5), betas=(0.5, 0.75)
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    described = describe(optimizer)
    assert described["name"] == "AdamW"
    assert (described["options"]["lr"], described["options"]["betas"]) == (0.25, [0.5, 0.75])


def test_optimizers_that_a_server_cannot_run():
    class Mine(torch.optim.SGD):
        pass

    weight = torch.zeros(1)
    with pytest.raises(ValueError, match=r"Adam, AdamW.*but the optimizer is .*Mine"):
        describe(Mine([weight]))
    with pytest.raises(ValueError, match=r"but the optimizer is .*LBFGS"):
        describe(torch.optim.LBFGS([weight]))
    groups = [{"params": [weight]}, {"params": [torch.zeros(1)], "momentum": 0.5}]
    with pytest.raises(ValueError, match=r"'momentum' is 0 in group 0 and 0\.5 in group 1"):
        describe(torch.optim.SGD(groups))
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [torch.zeros(1)]}], lr=0.1)
    optimizer.param_groups[1]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"'lr' is 0\.1 in group 0 and 0\.2 in group 1"):
        describe(optimizer)


@pytest.mark.parametrize(
    ("description", "error"),
    [
        ({"name": "Adamm", "options": {}}, r"out of ASGD, Ada.*got 'Adamm'"),
        ({"name": "Optimizer", "options": {}}, r"got 'Optimizer'"),
        ({"name": "LBFGS", "options": {}}, r"got 'LBFGS'"),
        ({"name": "lr_scheduler", "options": {}}, r"got 'lr_scheduler'"),
        (
            {"name": "SGD", "options": {"lrr": 1, "params": []}},
            r"SGD has no option 'lrr', 'params'.*lr, momentum",
        ),
        ({"name": "SGD", "options": {"lr": -1}}, r"SGD does not take.*Invalid learning rate: -1"),
        ({"name": "Adam", "options": {"betas": [0.9, 2]}}, r"Adam does not take.*Invalid beta"),
        ({"name": "Adam", "options": {"lr": "much"}}, r"Adam does not take"),
        ({"name": "SGD"}, r"Expected an optimizer as"),
        ({"name": "SGD", "options": {}, "code": ""}, r"Expected an optimizer as"),
        ("SGD", r"Expected an optimizer as"),
    ],
)
def test_wrong_descriptions_say_what_was_expected(description, error):
    for parameters in ([torch.zeros(2)], []):
        with pytest.raises(ValueError, match=error):
            make_optimizer(description, parameters)
