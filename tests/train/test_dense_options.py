"""dense_reduce, average_every and find_unused_parameters of one process, and what is refused."""

import pytest
import torch
from train_helpers import batches, everything, model, trainer

import karvan as kv
from karvan.dense.communication import DenseCommunication
from karvan.distributed import Connection

OPTIONS = [
    {"dense_reduce": "bf16"},
    {"dense_reduce": "fp16"},
    {"dense_reduce": "powersgd"},
    {"dense_reduce": kv.train.PowerSGD(rank=2, start_step=0)},
    {"average_every": 3},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "average_every": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_process_sends_nothing_and_has_the_bits_it_has_without(options, tmp_path):
    def fit(folder, **options):
        made = trainer(model(), checkpoints=tmp_path / folder, **options)
        made.fit(batches(5))
        return everything(made.model)

    expected, found = fit("plain"), fit("given", **options)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loop_of_one_process_accepts_them_too(options):
    given = {"dense_optimizer": torch.optim.Adam, "sparse_optimizer": kv.optim.Adagrad(lr=0.1)}
    with kv.TrainContext(model(), **given, **options) as ctx:
        for batch in ctx.loader(batches(2)):
            output, labels = ctx.forward(batch)
            ctx.backward((output - labels).square().mean())
    assert ctx.step == 2


WRONG = [
    ({"dense_reduce": "int8"}, ValueError, r"one of these or a kv.train.PowerSGD, got 'int8': mean, bf16"),
    ({"dense_reduce": "bf-16"}, ValueError, "Did you mean 'bf16'"),
    ({"dense_reduce": None}, ValueError, "got None"),
    ({"average_every": 0}, ValueError, "average_every must be at least 1, but is 0"),
    ({"average_every": 1.5}, TypeError, "expects an integer as average_every"),
    ({"average_every": True}, TypeError, "expects an integer as average_every"),
    ({"find_unused_parameters": "yes"}, TypeError, "expects True or False as find_unused_parameters"),
    ({"average_every": 2, "dense_reduce": "bf16"}, ValueError, "expected one of the two"),
    ({"dense_reduce": "powersgd", "find_unused_parameters": True}, ValueError, "would be lost in steps"),
    (
        {"dense_reduce": "bf16", "dense_optimizer": None, "frozen": ["net", "last"]},
        ValueError,
        "dense_reduce is for dense parameters, but there is no dense_optimizer",
    ),
    (
        {"average_every": 2, "dense_optimizer": None, "frozen": ["net", "last"]},
        ValueError,
        "average_every is for dense parameters, but there is no dense_optimizer",
    ),
]


@pytest.mark.parametrize(("options", "kind", "says"), WRONG)
def test_what_makes_no_sense_is_refused(options, kind, says):
    with pytest.raises(kind, match=says):
        trainer(model(), **options)
    given = {"dense_optimizer": torch.optim.Adam, "sparse_optimizer": kv.optim.Adagrad(lr=0.1)}
    with pytest.raises(kind, match=says):
        kv.TrainContext(model(), **(given | options))


@pytest.mark.parametrize("options", [{"rank": 0}, {"start_step": -1}])
def test_powersgd_expects_counts(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least"):
        kv.train.PowerSGD(**options)


@pytest.mark.parametrize("options", [{"dense_reduce": "powersgd"}, {"average_every": 2}])
def test_a_scaled_loss_has_no_memory_and_no_steps_alone(options):
    communication = DenseCommunication(**options)
    with pytest.raises(ValueError, match="cannot be used with precision 'fp16'"):
        communication.check(Connection(), scaled=True, only_rows=False)
    communication.check(Connection(), scaled=False, only_rows=False)


def test_half_precision_may_have_gradients_in_half_precision():
    DenseCommunication("fp16").check(Connection(), scaled=True, only_rows=False)
    DenseCommunication(find_unused_parameters=True).check(Connection(), scaled=True, only_rows=True)


def test_a_trainer_that_only_evaluates_accepts_them():
    made = trainer(model(), dense_optimizer=None, sparse_optimizer=None, dense_reduce="bf16")
    assert "loss" in made.evaluate(batches(2))
