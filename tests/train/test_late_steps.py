"""Steps that a device skips by itself, in Triton's interpreter; tests/gpu/test_training_gpu.py has GPUs."""

from dataclasses import replace

import gpu_steps
import pytest
import torch
from store_kinds import also_slowly, make_cuda
from torch import nn
from torch.nn import functional
from train_helpers import batches, everything

import karvan as kv
from karvan.store import MemoryStore
from karvan.train.optimizer_step import OptimizerStep, OptimizerStepSettings, fuse_on_gpu
from karvan.train.precision import Precision

DENSE = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


class Net(nn.Module):
    """Rows on a device, and a net."""

    def __init__(self, store=None):
        super().__init__()
        torch.manual_seed(3)
        tables = {name: kv.Table(4, init=kv.init.Uniform(-0.1, 0.1)) for name in ("user", "item")}
        self.embeddings = kv.EmbeddingEngine(tables, store=store or make_cuda("cpu")())
        self.last = nn.Linear(8, 1)

    def forward(self, batch):
        out = self.embeddings(batch)
        return self.last(torch.cat([out["user"], out["item"]], 1)).squeeze(1)


class Steps:
    """A model with its optimizers, stepped by hand."""

    def __init__(self, dense="Adam", sparse=kv.optim.Adam, store=None, **settings):
        self.net = Net(store)
        self.dense = DENSE[dense](self.net.parameters())
        self.update = OptimizerStep(
            self.dense, sparse(self.net, lr=0.05), OptimizerStepSettings(**settings), Precision()
        )

    def gradients(self, batch, divisor=1, factor=1.0):
        loss = functional.binary_cross_entropy_with_logits(self.net(batch), batch["label"])
        self.update.backward(loss * factor, divisor)

    def state(self):
        """All that a step changes; a lookup counts uses, whatever becomes of the step."""
        found = {k: v for k, v in everything(self.net).items() if "counts" not in k and "last_steps" not in k}
        for number, state in enumerate(self.dense.state.values()):
            found |= {f"dense.{number}.{name}": value for name, value in state.items()}
        return {name: value.clone() for name, value in found.items() if value is not None}


def different(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("dense", also_slowly(DENSE, quick=("Adam", "momentum")))
def test_a_device_makes_the_steps_that_the_host_would_make(dense):
    late, early = Steps(dense), Steps(dense)
    for number, batch in enumerate(batches(3, 6)):
        for steps in (late, early):
            steps.gradients(batch)
        taken = late.update.apply_late()
        if (
            dense == "momentum" and number == 0
        ):  # its buffers are made in the first step, which may be skipped
            assert taken is None
            assert late.update.apply()
        else:
            assert taken.shape == ()
            assert bool(taken)
        assert early.update.apply()
    assert different(late.state(), early.state()) == []
    assert late.update.optimizers["sparse"].table_steps() == {"user": 3, "item": 3}


@pytest.mark.parametrize("dense", also_slowly(DENSE, quick=("Adam", "momentum")))
def test_a_skipped_step_changes_nothing(dense):
    steps, (first, second) = Steps(dense), batches(2, 6)
    steps.gradients(first)
    assert steps.update.apply()
    before = steps.state()
    new = {**second, "user": first["user"], "item": first["item"]}  # no new rows
    steps.gradients(new, factor=torch.inf)
    assert not bool(steps.update.apply_late())
    assert different(before, steps.state()) == []
    steps.gradients(new)
    assert bool(steps.update.apply_late())
    changed = different(before, steps.state())
    assert {"user.vectors", "item.vectors", "last.weight"} <= set(changed)
    assert all(torch.isfinite(value).all() for value in steps.state().values() if value.is_floating_point())


@pytest.mark.parametrize("wrong", ["rows", "dense"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_one_gradient_that_is_not_finite_skips_rows_and_parameters(wrong, value):
    steps, (batch,) = Steps(sparse=kv.optim.SGD), batches(1, 6)
    steps.gradients(batch)
    assert steps.update.apply()
    before = steps.state()
    if wrong == "dense":
        steps.gradients(batch)
        steps.net.last.bias.grad[0] = value
    else:
        output = steps.net(batch)
        hook = steps.net.embeddings(batch)["item"]
        (output.sum() + (hook * torch.where(torch.arange(4) == 2, value, 0.0))[3:4].sum()).backward()
        assert all(torch.isfinite(each.grad).all() for each in steps.net.parameters())
    assert not bool(steps.update.apply_late())
    assert different(before, steps.state()) == []


def test_accumulated_gradients_are_skipped_together():
    late, early = (Steps(gradient_accumulation_steps=2) for _ in range(2))
    data = batches(2, 6)
    for factor in (1.0, torch.inf, 1.0):
        for steps in (late, early):
            steps.gradients(data[0], 2)
            steps.gradients(data[1], 2, factor)
        assert bool(late.update.apply_late()) == early.update.apply() == (factor == 1.0)
        if factor == 1.0:  # for its rows a device has made a step of Adam more than the host
            late.update.optimizers["sparse"].set_table_steps(early.update.optimizers["sparse"].table_steps())
        else:
            assert different(late.state(), early.state()) == []
    assert late.state().keys() == early.state().keys()


def test_the_scale_of_a_loss_may_be_on_the_device():
    plain, scaled = Steps(), Steps()
    scale = torch.tensor(1024.0)
    for number, batch in enumerate(batches(4, 6)):
        for steps, factor in ((plain, 1.0), (scaled, scale)):
            steps.net.embeddings.gradient_scale = factor
            for part in (batch, batches(1, 6)[0])[: 1 + number % 2]:  # a pass alone, and two together
                steps.gradients(part, factor=factor)
            for parameter in steps.net.parameters():
                parameter.grad /= factor
            assert bool(steps.update.apply_late())
    assert different(plain.state(), scaled.state()) == []  # a power of two


def test_the_host_decides_where_a_device_cannot():
    (batch,) = batches(1, 6)
    in_memory = Steps(store=MemoryStore())
    without_fused = Steps()
    without_fused.dense.param_groups[0]["fused"] = None  # as a checkpoint of another program may have it
    others = [Steps(nonfinite=nonfinite) for nonfinite in ("raise", "skip_tables", "apply")]
    for steps in (in_memory, without_fused, *others):
        steps.gradients(batch)
        assert steps.update.apply_late() is None
        assert steps.update.apply()


def test_steps_agree_with_those_of_torch_and_bad_ones_are_skipped():
    """The programs of tests/gpu/test_steps_gpu.py."""
    run, reference = (kind(torch.device("cpu")) for kind in (gpu_steps.Run, gpu_steps.Reference))
    outcomes = []
    for number, batch in enumerate(gpu_steps.batches(3)):
        if number:
            reference.step([batch])
        outcomes.append(bool(run.step([batch if number else gpu_steps.damaged(batch)])))
    assert outcomes == [False, True, True]
    assert run.counts.skipped == 1
    for name, value in reference.state().items():
        torch.testing.assert_close(run.state()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_feature_without_ids_has_nothing_to_check():
    engine = kv.EmbeddingEngine({"seen": kv.Table(2, combiner="ragged")}, store=make_cuda("cpu")())
    weight = torch.ones(2, requires_grad=True)
    dense, sparse = torch.optim.Adam([weight], fused=True), kv.optim.SGD(engine, lr=0.1)
    update = OptimizerStep(dense, sparse, OptimizerStepSettings(), Precision())
    out = engine({"seen": kv.Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))})
    update.backward(out["seen"].values.sum() + weight.sum(), 1)
    assert bool(update.apply_late())
    update.backward(
        engine({"seen": kv.Ragged(torch.arange(0), torch.zeros(2).long())})["seen"].values.sum(), 1
    )
    assert update.apply_late() is None  # there is no gradient at all
    assert update.apply()


def late_trainer(**options):
    """A Trainer that trains on the CPU as it would on a GPU."""
    fit = kv.Trainer(
        Net(),
        square,
        dense_optimizer=DENSE["Adam"],
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        progress="none",
        **options,
    )
    fit.setup = replace(fit.setup, routine=replace(fit.setup.routine, late=True))
    return fit


def broken(batch):
    return kv.Batch({**batch, "label": torch.full_like(batch["label"], torch.nan)})


def square(output, batch):
    return functional.mse_loss(output, batch["label"])


class Taken(kv.callbacks.Callback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, trainer, logs):
        self.steps.append(logs.taken)


def test_a_fit_counts_the_steps_that_a_device_has_skipped(caplog):
    data, seen = batches(4, 6), Taken()
    fit = late_trainer(callbacks=[seen])
    result = fit.fit([data[0], broken(data[1]), data[2], broken(data[3])], max_steps=4)
    assert all(isinstance(taken, torch.Tensor) for taken in seen.steps)
    assert [bool(taken) for taken in seen.steps] == [True, False, True, False]
    assert result.skipped == 2
    assert fit.run_progress.counts.skipped == 2
    assert "Step 2 was skipped: a gradient is not finite. Column 'label' has NaN in 6 of 6" in caplog.text


def test_a_fit_that_a_device_has_skipped_entirely_is_an_error():
    fit = late_trainer()
    with pytest.raises(FloatingPointError, match="All 2 steps were skipped"):
        fit.fit([broken(batch) for batch in batches(2, 6)])


def test_optimizers_on_the_cpu_stay_as_they_are():
    for make in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        made = make(Net().parameters(), lr=0.1)
        fuse_on_gpu(made)
        assert not made.param_groups[0]["fused"]
