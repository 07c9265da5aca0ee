"""What the ranks do in `test_dense_communication.py`: fits with each way to keep dense parameters equal."""

import os
import signal
from pathlib import Path

import torch
from torch import nn

import karvan as kv
from karvan import distributed
from karvan.train.data_parallel import PowerSGDReduction

POWER = {"rank": 1, "start_step": 0}


class Net(nn.Module):
    """Layers large enough for PowerSGD; with more than a MiB of parameters there are two buckets."""

    def __init__(self, inputs=24, hidden=20, dropout=0.0, norm=False):
        super().__init__()
        self.first = nn.Linear(inputs, hidden, bias=not norm)  # of which a norm would leave nothing
        self.norm = nn.BatchNorm1d(hidden) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 1)

    def forward(self, batch):
        hidden = self.dropout(torch.tanh(self.norm(self.first(batch["x"]))))
        return self.last(torch.tanh(self.second(hidden))).squeeze(1)


class TwoHeads(nn.Module):
    """The second head takes part only if a batch says so."""

    def __init__(self):
        super().__init__()
        self.body, self.one, self.other = nn.Linear(24, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, batch):
        hidden = torch.tanh(self.body(batch["x"]))
        output = self.one(hidden).squeeze(1)
        return output + self.other(hidden).squeeze(1) if bool(batch["both"].any()) else output


class Rows(nn.Module):
    """Rows and a net."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"id": kv.Table(8, init=kv.init.Normal(std=0.1))})
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, batch):
        return self.net(self.embeddings(batch)["id"]).squeeze(1)


def loss(output, batch):
    return ((output - batch["label"]) ** 2).mean()


def batch_of(rank, number, rows=4, both=True, inputs=24):
    random = torch.Generator().manual_seed(1000 * rank + number)
    x = torch.randn(rows, inputs, generator=random)
    return {"x": x, "label": x[:, :3].sum(1), "both": torch.full((rows,), both)}


def batches_of(rank, count, **options):
    return [batch_of(rank, number, **options) for number in range(count)]


def make(kind=Net, seed=3, **options):
    torch.manual_seed(seed)
    return kind(**options)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
}


def trainer_of(model, optimizer="sgd", **options):
    return kv.Trainer(model, loss, dense_optimizer=OPTIMIZERS[optimizer], progress="none", **options)


def parameters_of(trainer):
    state = trainer.model.state_dict().items()
    return {name: value.clone() for name, value in state if isinstance(value, torch.Tensor)}


def gradients(data, net, **options):
    """The gradients with which steps were made, and this rank's own at the same parameters."""
    here = distributed.current()
    trainer, own, used = trainer_of(make(**net), **options), [], []

    def watch(optimizer, *_):
        used.append([each.grad.clone() for each in trainer.model.parameters()])

    def plain(batch):
        copied = make(**net)
        copied.load_state_dict(trainer.model.state_dict())
        loss(copied(batch), batch).backward()
        return [each.grad for each in copied.parameters()]

    class Own(kv.callbacks.Callback):
        def on_step_end(self, trainer, logs):
            if logs.step < len(data[here.rank]):
                own.append(plain(data[here.rank][logs.step]))

    trainer.callbacks = type(trainer.callbacks)([Own()])
    trainer.update.optimizers["dense"].register_step_pre_hook(watch)
    own.append(plain(data[here.rank][0]))
    trainer.fit(data[here.rank])
    state = trainer.setup.routine.parallel.reduction.rank_state()
    return {"own": own, "used": used, "errors": state.get("errors", {}), "names": _names(trainer)}


def _names(trainer):
    return [name for name, _ in trainer.model.named_parameters()]


def halves():
    world = distributed.current().world_size
    made = {}
    for name, net, rows in (("small", {}, 4), ("buckets", {"hidden": 700}, 4)):
        data = [batches_of(rank, 2, rows=rows) for rank in range(world)]
        for reduce in ("bf16", "fp16"):
            made[name, reduce] = gradients(data, net, dense_reduce=reduce)
    return made


def powers():
    """Gradients of as many samples as ranks have that many ranks; and those that one rank cannot hold."""
    world = distributed.current().world_size
    single = [batches_of(rank, 1, rows=1) for rank in range(world)]
    several = [batches_of(rank, 8) for rank in range(world)]
    return {
        "exact": gradients(single, {}, dense_reduce=kv.train.PowerSGD(rank=world, start_step=0)),
        "buckets": gradients(single, {"hidden": 700}, dense_reduce=kv.train.PowerSGD(world, 0)),
        "feedback": gradients(several, {}, dense_reduce=kv.train.PowerSGD(**POWER)),
        "late": gradients(several, {}, dense_reduce=kv.train.PowerSGD(rank=1, start_step=5)),
    }


def skipped(**options):
    """One rank's third batch has a NaN."""
    here = distributed.current()
    data = batches_of(here.rank, 6)
    if here.rank == here.world_size - 1:
        data[2]["x"][0, 0] = torch.nan
    trainer = trainer_of(make(), **options)
    result = trainer.fit(data)
    return result.skipped, result.step, parameters_of(trainer)


def skips():
    return {
        "powersgd": skipped(dense_reduce=kv.train.PowerSGD(**POWER)),
        "bf16": skipped(dense_reduce="bf16"),
        "average": skipped(average_every=4),
    }


class Recorded(kv.callbacks.Callback):
    """The parameters after each step."""

    def __init__(self):
        self.steps, self.evaluated = [], []

    def on_step_end(self, trainer, logs):
        self.steps.append(parameters_of(trainer))

    def on_evaluate_end(self, trainer, metrics):
        self.evaluated.append(parameters_of(trainer))


def averages():
    """Steps alone, by optimizer; the second one also evaluates, and each rank begins with another model."""
    rank, made = distributed.current().rank, {}
    for optimizer in OPTIMIZERS:
        recorded = Recorded()
        trainer = trainer_of(make(seed=3 + rank, norm=True), optimizer, average_every=2, callbacks=[recorded])
        trainer.fit(batches_of(rank, 5))
        made[optimizer] = recorded.steps, parameters_of(trainer), _state(trainer)
    recorded = Recorded()
    trainer = trainer_of(make(), "adam", average_every=4, callbacks=[recorded])
    trainer.fit(batches_of(rank, 8), eval_data=batches_of(9, 2), eval_every=3)
    made["evaluated"] = recorded.steps, recorded.evaluated, trainer.history.to_dict("list")
    heads = trainer_of(make(TwoHeads), "adam", average_every=3)
    heads.fit([batch_of(rank, number, both=rank == 0) for number in range(3)])
    made["heads"] = parameters_of(heads), _state(heads)
    with kv.TrainContext(make(), dense_optimizer=OPTIMIZERS["adam"], average_every=2, label="label") as ctx:
        for batch in ctx.loader(batches_of(rank, 5)):
            output, _ = ctx.forward(batch)
            ctx.backward(loss(output, batch))
    made["context"] = {name: value.clone() for name, value in ctx.model.state_dict().items()}
    return made


def _state(trainer):
    state = trainer.update.optimizers["dense"].state_dict()["state"]
    return {
        (index, name): torch.as_tensor(value).clone()
        for index, slots in state.items()
        for name, value in slots.items()
        if value is not None
    }


USE_OTHER = [[True, True], [True, False], [False, False], [False, True]]  # step by rank: whose batch has it


def unused():
    """A head that takes no part in some batches; in the third step, in none at all."""
    rank, made = distributed.current().rank, {}
    for passes in (1, 2):
        trainer = trainer_of(
            make(TwoHeads),
            "adam",
            find_unused_parameters=True,
            gradient_accumulation_steps=passes,
        )
        trainer.fit([batch_of(rank, number, both=both[rank]) for number, both in enumerate(USE_OTHER)])
        made[passes] = parameters_of(trainer), _state(trainer)
    return made


def rows_data(rows=240):
    ids = torch.arange(rows) * 7 % 31
    return kv.data.read(
        {"id": ids.numpy(), "label": (ids % 3).float().numpy()}, 8, shuffle=16, seed=2, split_records=8
    )


def resumed(folder, options):
    """Fits with rows and dropout: one straight, one that is stopped and resumes; and a loop of one's own."""
    rank, made = distributed.current().rank, {}
    for name, given in options.items():
        if "powersgd" in given:
            given["dense_reduce"] = kv.train.PowerSGD(**given.pop("powersgd"))
        for run, ends in (("straight", [11]), ("stopped", [6, 11])):
            for end in ends:
                trainer = kv.Trainer(
                    make(Rows, seed=rank),
                    loss,
                    dense_optimizer=OPTIMIZERS["adam"],
                    sparse_optimizer=kv.optim.Adagrad(lr=0.1),
                    progress="none",
                    checkpoints=Path(folder) / name / run,
                    checkpoint_every=3,
                    **given,
                )
                torch.manual_seed(7 + rank)
                trainer.fit(rows_data(), epochs=2, max_steps=end)
            reduction = trainer.setup.routine.parallel.reduction
            made[name, run] = (
                parameters_of(trainer),
                trainer.model.embeddings.table("id").snapshot(),
                _state(trainer),
                reduction.rank_state(),
            )
    return made


def loops(folder):
    """A loop of one's own that saves and loads, with PowerSGD."""
    rank, made = distributed.current().rank, {}
    for run, ends in (("straight", [8]), ("stopped", [4, 8])):
        for end in ends:
            ctx = kv.TrainContext(
                make(Rows),
                dense_optimizer=OPTIMIZERS["adam"],
                sparse_optimizer=kv.optim.Adagrad(lr=0.1),
                dense_reduce=kv.train.PowerSGD(**POWER),
            )
            torch.manual_seed(7 + rank)
            with ctx:
                if end == 8 and run == "stopped":
                    ctx.load(Path(folder) / run)
                for batch in ctx.loader(rows_data()):
                    output, _ = ctx.forward(batch)
                    ctx.backward(loss(output, batch))
                    if ctx.step == 4:
                        ctx.save(Path(folder) / run)
                    if ctx.step == end:
                        break
        made[run] = parameters_of(ctx)
    return made


def other_ranks():
    """What PowerSGD has not sent, of three ranks; this job has two."""
    rank = distributed.current().rank
    reduction = PowerSGDReduction(kv.train.PowerSGD(**POWER), make())
    saved = [{"errors": {"first.weight": torch.full((20, 24), float(each))}} for each in (1, 2, 6)]
    reduction.load({"steps": 4, "factors": {}}, saved, rank)
    without = PowerSGDReduction(kv.train.PowerSGD(**POWER), make())
    without.load({}, [{}, {}], rank)
    return reduction.rank_state(), reduction.state(), without.rank_state(), without.state()


def everything(runs, names, options=None):
    torch.set_num_threads(1)
    kv.connect("sharded", timeout=60)
    known = {
        "halves": halves,
        "powers": powers,
        "skips": skips,
        "averages": averages,
        "unused": unused,
        "other ranks": other_ranks,
        "resumed": lambda: resumed(runs, options),
        "loops": lambda: loops(Path(runs) / "loops"),
    }
    made = {name: known[name]() for name in names}
    distributed.disconnect()
    return made


def hybrid(servers, given):
    """Fits in mode hybrid; the last parameters, the losses of evaluations, and whether rows were learned."""
    torch.set_num_threads(1)
    kv.connect("remote", servers=servers, mode="hybrid", staleness=2, timeout=60)
    made = []
    for options in given:
        trainer = kv.Trainer(
            make(Rows, seed=distributed.current().rank, dropout=0.0),
            loss,
            dense_optimizer=OPTIMIZERS["adam"],
            sparse_optimizer=kv.optim.Adagrad(lr=0.1),
            progress="none",
            **options,
        )
        result = trainer.fit(rows_data(), epochs=4, eval_data=rows_data(48), eval_every=20)
        made.append((parameters_of(trainer), trainer.history.to_dict("list")["loss"], result.evaluation))
        trainer.model.embeddings.table("id").clear()
    distributed.disconnect()
    return made


def fail(victim, options, how):
    """A fit in whose third step one rank fails, by an error or by kill -9."""
    torch.set_num_threads(1)
    kv.connect("sharded", timeout=60)
    if "powersgd" in options:
        options["dense_reduce"] = kv.train.PowerSGD(**options.pop("powersgd"))
    rank, calls = distributed.current().rank, []

    def failing(output, batch):
        calls.append(1)
        if rank == victim and len(calls) == 3:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the loss fails")
        return loss(output, batch)

    trainer = kv.Trainer(make(), failing, dense_optimizer=OPTIMIZERS["adam"], progress="none", **options)
    trainer.fit(batches_of(rank, 8))
