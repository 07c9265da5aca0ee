"""Steps of training as a Trainer makes them, made by hand of the same parts, and the same in plain torch."""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import karvan as kv
from karvan.store.cuda.store import CudaStore
from karvan.train.data_parallel import Parallel
from karvan.train.device_placement import make_placement
from karvan.train.epoch import Accumulation
from karvan.train.optimizer_step import OptimizerStep, OptimizerStepSettings, fuse_on_gpu
from karvan.train.precision import make_precision
from karvan.train.step_routine import StepOutcomes, StepPass, StepRoutine
from karvan.train.types import same

DIMS = {"user": 8, "item": 16, "tags": 4}
KEYS = 50
ADAGRAD = {"lr": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-8}


class Fed(NamedTuple):
    """A batch that is ready."""

    batch: object


def batches(count, size=64, seed=0):
    """Batches on the CPU, of one shape; every one has all keys, so that none is new later."""
    random = torch.Generator().manual_seed(seed)

    def keys(count):
        more = torch.randint(KEYS, (count - KEYS,), generator=random)
        return torch.cat([torch.randperm(KEYS, generator=random), more])

    made = []
    for _ in range(count):
        user, item, tags = keys(size), keys(size), keys(2 * size)
        price = torch.rand(size, generator=random)
        chance = torch.sigmoid((user * 7 % 11 - 5) * 0.5 + (item * 5 % 7 - 3) * 0.4 + price)
        made.append(
            kv.Batch(
                {
                    "user": user,
                    "item": item,
                    "tags": kv.Ragged(tags, torch.arange(0, 2 * size + 1, 2)),
                    "price": price,
                    "label": (torch.rand(size, generator=random) < chance).float(),
                }
            )
        )
    return made


def damaged(batch):
    """The same with a price that is not a number."""
    price = batch["price"].clone()
    price[3] = torch.nan
    return kv.Batch({**batch, "price": price})


class Top(nn.Module):
    """The dense part; products: whether it has matrices, which 16 bits round."""

    def __init__(self, products=True):
        super().__init__()
        torch.manual_seed(5)
        width = sum(DIMS.values()) + 1
        self.first, self.last = nn.Linear(width, 32), nn.Linear(32, 1)
        self.scales = nn.Parameter(torch.randn(width) * 0.1)
        self.products = products

    def forward(self, vectors, price):
        x = torch.cat([*vectors, price.unsqueeze(1)], 1)
        if not self.products:
            return (x * self.scales).sum(1) + 0 * (self.first.weight.sum() + self.last.weight.sum())
        return self.last(torch.relu(self.first(x))).squeeze(1) + (x * self.scales).sum(1)


class Net(nn.Module):
    """Tables on a device, and the dense part."""

    def __init__(self, store, dtype, products):
        super().__init__()
        tables = {
            name: kv.Table(dim, init=kv.init.Constant(0.1), combiner="mean", dtype=dtype)
            for name, dim in DIMS.items()
        }
        self.embeddings = kv.EmbeddingEngine(tables, store=store)
        self.top = Top(products)

    def forward(self, batch):
        out = self.embeddings(batch)
        return self.top([out[name] for name in DIMS], out["price"])


class Run:
    """A model in training."""

    @staticmethod
    def store(device):
        """A store on the device."""
        return CudaStore(device)

    def __init__(
        self,
        device,
        precision="fp32",
        accumulate=1,
        dtype=torch.float32,
        compiled=False,
        products=True,
        factor=1.0,
        clip_norm=None,
    ):
        self.device, self.factor, self.number = device, factor, 0
        self.net = Net(self.store(device), dtype, products).to(device)
        if compiled:
            self.net.top = torch.compile(self.net.top)
        engines = [self.net.embeddings]
        self.precision = make_precision(precision, device, engines)
        self.dense = self._dense()
        self.sparse = kv.optim.Adagrad(self.net, **ADAGRAD)
        placement = make_placement(self.net, device, same, engines)
        settings = OptimizerStepSettings(accumulate, clip_norm)
        update = OptimizerStep(self.dense, self.sparse, settings, self.precision)
        parallel = Parallel(self.net)
        self.routine = StepRoutine(
            placement, self.precision, parallel, Accumulation(accumulate), update, late=True
        )
        self.counts = SimpleNamespace(skipped=0)
        self.outcomes = StepOutcomes(self.counts, self.precision.always_checks, warns=True)
        self.metric = kv.metrics.AUC()

    def _dense(self):
        fused = True if self.device.type == "cpu" else None  # on a GPU it is chosen
        made = torch.optim.Adam(self.net.parameters(), lr=0.01, fused=fused)
        fuse_on_gpu(made)
        return made

    def _loss(self, output, batch):
        return kv.losses.BinaryCrossEntropy()(output, batch) * self.factor

    def step(self, group):
        """One step, as `karvan/train/fit.py` makes it; whether it was taken."""
        placement = self.routine.placement
        placed = [placement.place(batch, training=True) for batch in group]
        step = self.routine.begin([Fed(batch) for batch in placed])
        for index in range(len(placed)):
            made = StepPass(step, index)
            placement.receive(made.batch)
            self.routine.forward(made, made.batch, self._loss)
            self.routine.backward(made)
            self.metric.update(made.output, made.batch)
        taken = self.routine.apply(step)
        self.number += 1
        self.outcomes.add(self.number, taken, placed, made.loss.detach())
        return taken

    def look_up(self, batch):
        """Have rows for the keys of a batch."""
        placed = self.routine.placement.place(batch, training=True)
        self.routine.placement.receive(placed)
        self.net(placed)

    def state(self, optimizers=False):
        """All numbers that steps change, by name, on the CPU."""
        found = {name.replace("_orig_mod.", ""): p for name, p in self.net.named_parameters()}
        for table in self.net.embeddings.tables():
            found[table.name] = table.vectors(range(KEYS))
            if optimizers:
                found[f"{table.name}.state"] = torch.from_numpy(table.snapshot().state.copy())
        for number, state in enumerate(self.dense.state.values() if optimizers else ()):
            found |= {f"{number}.{name}": value for name, value in state.items()}
        return {name: torch.as_tensor(value).detach().cpu().clone() for name, value in found.items()}


class Reference:
    """The same model in plain torch: embeddings that are parameters, in fp32."""

    def __init__(self, device, accumulate=1):
        self.device, self.accumulate = device, accumulate
        self.rows = {n: torch.full((KEYS, dim), 0.1, device=device) for n, dim in DIMS.items()}
        for rows in self.rows.values():
            rows.requires_grad_()
        self.top = Top().to(device)
        self.optimizers = [
            torch.optim.Adam(self.top.parameters(), lr=0.01),
            torch.optim.Adagrad(self.rows.values(), **ADAGRAD),
        ]

    def step(self, group):
        """One step, on the mean of the losses."""
        for batch in group:
            ids = {name: batch[name] for name in DIMS}
            ids["tags"] = batch["tags"].values.view(-1, 2)
            vectors = [
                functional.embedding_bag(
                    ids[n].to(self.device).view(len(batch["label"]), -1), rows, mode="mean"
                )
                for n, rows in self.rows.items()
            ]
            output = self.top(vectors, batch["price"].to(self.device))
            label = batch["label"].to(self.device)
            loss = functional.binary_cross_entropy_with_logits(output, label)
            (loss / self.accumulate).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state(self):
        """As `Run.state`."""
        found = {f"top.{name}": p for name, p in self.top.named_parameters()} | self.rows
        return {name: value.detach().cpu() for name, value in found.items()}
