"""What trainers do in `test_async_mode.py`, each a process of its own."""

import time

import torch
from torch.nn import functional as F

import karvan as kv
from karvan import distributed


class Net(torch.nn.Module):
    """Rows of two tables, one of which admits keys by their count, and a small net."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(dim=4, admit=kv.admission.MinCount(2)), "item": kv.Table(dim=4)}, seed=2
        )
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 6),
            torch.nn.ReLU(inplace=True),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(6, 1),
        )

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.net(torch.cat([vectors["user"], vectors["item"]], 1)).squeeze(1)


class Batches(list):
    """Batches that know how many of them were taken."""

    begin = 0

    def __iter__(self):
        while self.begin < len(self):
            self.begin += 1
            yield self[self.begin - 1]
        self.begin = 0

    def state_dict(self):
        return {"taken": self.begin}

    def load_state_dict(self, state):
        self.begin = state["taken"]

    def merge(self, positions):
        return positions[0]


def batches(count=12, rows=16, seed=5):
    random = torch.Generator().manual_seed(seed)
    made = Batches()
    for _ in range(count):
        user = torch.randint(0, 60, (rows,), generator=random)
        item = torch.randint(0, 20, (rows,), generator=random)
        made.append({"user": user, "item": item, "label": (item % 2).float()})
    return made


def loss(output, batch):
    return F.binary_cross_entropy_with_logits(output, batch["label"])


def trainer_of(folder=None, *, dense=None, seed=0, dropout=0.0, **options):
    torch.manual_seed(seed)
    return kv.Trainer(
        Net(dropout),
        options.pop("loss", loss),
        dense_optimizer=dense or (lambda parameters: torch.optim.Adam(parameters, 0.01)),
        sparse_optimizer=options.pop("sparse", kv.optim.Adam(lr=0.05)),
        progress="none",
        checkpoints=folder,
        checkpoint_seconds=None,
        **options,
    )


class Losses(kv.callbacks.Callback):
    """The loss of every step."""

    def __init__(self):
        self.values = []

    def on_step_end(self, trainer, logs):
        self.values.append(float(logs.losses["loss"]))


def told(trainer):
    """What the servers say of their dense parameters."""
    return [answer.head["dense"] for answer in trainer.connection.servers.call("describe")]


class Overtaken:
    """A loss that waits for the other trainer's steps until gradients were rejected once."""

    def __init__(self):
        self.trainer = None

    def __call__(self, output, batch):
        if self.trainer is not None and not self.trainer.dense.staleness.rejected:
            before, until = told(self.trainer), time.monotonic() + 0.5
            while told(self.trainer) == before and time.monotonic() < until:
                time.sleep(0.002)
        return loss(output, batch)


def together(steps, checkpoints=None, counts=None, overtaken=False, epochs=40, **connect):
    """A fit of this rank's batches, what came of it, and what the servers say."""
    torch.set_num_threads(1)
    kv.connect("remote", timeout=60, **connect)
    here = distributed.current()
    watch, slow = Losses(), Overtaken()
    trainer = trainer_of(checkpoints, seed=here.rank, callbacks=[watch], loss=slow)
    if overtaken and here.rank == here.world_size - 1:
        slow.trainer = trainer
    data = batches(12 if counts is None else counts[here.rank], seed=here.rank)
    result = trainer.fit(data, epochs=epochs, max_steps=steps, eval_data=batches(3, seed=9))
    made = {
        "losses": watch.values,
        "result": vars(result),
        "model": {name: each.detach().clone() for name, each in trainer.model.named_parameters()},
        "told": told(trainer),
        "staleness": vars(trainer.dense.staleness),
        "settings": (here.settings.mode.name, here.settings.staleness, here.settings.dense.lr_staleness),
    }
    distributed.disconnect()
    return made


def loop(epochs, counts, **connect):
    """The same in a loop of one's own."""
    torch.set_num_threads(1)
    kv.connect("remote", timeout=60, **connect)
    rank = distributed.current().rank
    torch.manual_seed(rank)
    ctx = kv.TrainContext(
        Net(),
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        sparse_optimizer=kv.optim.Adam(lr=0.05),
    )
    losses = []
    with ctx:
        data = batches(counts[rank], seed=rank)
        for _ in range(epochs):
            for batch in ctx.loader(data):
                output, _ = ctx.forward(batch)
                here = loss(output, batch)
                losses.append(float(here))
                ctx.backward(here)
        with ctx.eval() as evaluation:
            evaluated = [evaluation.forward(batch)[0] for batch in evaluation.loader(batches(3, seed=9))]
    made = {
        "losses": losses,
        "model": {name: each.detach().clone() for name, each in ctx.model.named_parameters()},
        "evaluated": torch.cat(evaluated),
        "told": told(ctx),
        "staleness": vars(ctx.dense.staleness),
    }
    distributed.disconnect()
    return made
