"""A trainer of an elastic job: counts how often each record is trained.

Arguments: DATA CHECKPOINTS NOTES EPOCHS. Settings by variables: PAUSE, seconds after each step until there is
a note that says hurry; ROWS=1 for records that are counted in rows as well; SAVE_EVERY steps, SAVE_SECONDS;
POISON, records that raise an error, in POISONED=model, loss or transform, or with POISON=all every one;
KARVAN_EMBEDDING_WORKER_COUNT above 0 for rows that embedding workers look up, by the feature `id`;
HOLD=1 for a disk that hangs in the final save until there is a note that says save; HANG=1 to hang after the
first batch of an evaluation; COUNTED=1 for a metric that counts samples; TRANSPORT of collectives; AVERAGED=1
for averages of the parameters, and a note of the parameters of every step. Every record that is evaluated is
noted. MAX_STEPS and DROP=1 are options of the fit.

In mode async there are also PULL_EVERY; DIE_AT=BATCH,SERVER, which kills the process in the commit of one of
its batches, after that server has it and before any other does, or before any server has it if that is -1;
and DIE_SHARING=1, which kills it when it is about to give its state to one that joins.

The optimizer adds 1 to every parameter that has a gradient. A record has a parameter of its own, so its value
is the number of times that it was trained. In mode async it is one that servers can run. The result is noted
by its process when it has ended.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import karvan as kv
from karvan.train.async_fit import AsyncFit

data, checkpoints, notes = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
epochs = int(sys.argv[4])
pause = float(os.environ.get("PAUSE", "0"))
rows = os.environ.get("ROWS") == "1"
feature = "id" if os.environ.get("KARVAN_EMBEDDING_WORKER_COUNT", "0") != "0" else "record"
records = int((data / "records").read_text())
poison = os.environ.get("POISON", "")
poisoned = os.environ.get("POISONED", "model")
mode = os.environ.get("KARVAN_MODE")
options = {"pull_every": int(os.environ["PULL_EVERY"])} if "PULL_EVERY" in os.environ else {}
transport = os.environ.get("TRANSPORT", "auto")
kv.connect("remote" if rows else "sharded", timeout=60, transport=transport, **options)
torch.manual_seed(0)


class Counting(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter += (parameter.grad != 0).float()


def taste(batch, part):
    """Raise an error if a batch for training has a record that is poison for this part of the program."""
    if poison and part == poisoned and "evaluated" not in batch:
        for number in batch["record"].tolist():
            if poison == "all" or str(number) in poison.split(","):
                raise ValueError(f"{number} is poison")


def transform(batch):
    taste(batch, "transform")
    return batch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(records))
        if rows:
            table = kv.Table(1, name="record", init=kv.init.Constant(0.0))
            self.embeddings = kv.EmbeddingEngine({feature: table})

    def forward(self, batch):
        taste(batch, "model")
        if "evaluated" in batch:
            with (notes / f"evaluated-{os.getpid()}").open("a") as file:
                file.write("".join(f"{number}\n" for number in batch["record"].tolist()))
            while os.environ.get("HANG") == "1":
                time.sleep(0.01)
        times = self.times[batch["record"].long()]
        return times - self.embeddings(batch)[feature].squeeze(1) if rows else times


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        (notes / f"step-{os.getpid()}").write_text(f"{trainer.step} {trainer.connection.group.world_size}")
        with (notes / f"steps-{os.getpid()}").open("a") as noted:
            noted.write(f"{trainer.step}\n")
        if not (notes / "hurry").exists():
            time.sleep(pause)


class NoteParameters(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        written = notes / f"parameters-{os.getpid()}.new"
        torch.save(trainer.model.times.detach(), written)
        written.rename(notes / f"parameters-{trainer.step}.pt")  # all trainers have the same


averages = [kv.train.EMA(0.75), NoteParameters()] if os.environ.get("AVERAGED") == "1" else []


class SlowDisk(kv.Checkpoints):
    def save(self, step, state, model, **options):
        if os.environ.get("HOLD") == "1" and state["data"]["finished"]:
            (notes / f"saves-{os.getpid()}").touch()
            while not (notes / "save").exists():
                time.sleep(0.01)
        return super().save(step, state, model, **options)


class DyingClient:
    """Sends a commit to one server, and dies when that is answered."""

    def __init__(self, client, server):
        self.client, self.server = client, server

    def begin(self, method, head, *rest, **options):
        batch, server = map(int, os.environ["DIE_AT"].split(","))
        if method != "commit" or head["step"] < batch:
            return self.client.begin(method, head, *rest, **options)
        if self.server == server:
            self.client.begin(method, head, *rest, **options).wait()
        if server in (self.server, -1):
            os.kill(os.getpid(), signal.SIGKILL)
        return None


if "DIE_AT" in os.environ:
    commits = kv.distributed.current().servers.commits
    peer = commits._peer
    commits._peer = lambda server: DyingClient(peer(server), server)


if "DIE_SHARING" in os.environ:
    everything = AsyncFit._everything

    def die_sharing(fit):
        if trainer.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return everything(fit)

    AsyncFit._everything = die_sharing


def loss(output, batch):
    taste(batch, "loss")
    return output.mean() + 1.0


class Samples:
    """A metric of a user's own: how many samples it has seen."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.samples = torch.zeros(())

    def update(self, output, batch):
        self.samples = self.samples + len(output)

    def compute(self):
        return float(self.samples)

    def state(self):
        return {"samples": self.samples}

    def merge(self, state):
        self.samples = self.samples + state["samples"]

    def load_state(self, state):
        self.samples = state["samples"]


# Gradients are clipped to ±2^-20, so that every update adds exactly 1 to a row, or to a parameter.
STEP = 2.0**20


def upwards(parameters):
    return torch.optim.SGD(parameters, lr=STEP, maximize=True)


trainer = kv.Trainer(
    Model(),
    loss,
    dense_optimizer=upwards if mode == "async" else Counting,
    sparse_optimizer=kv.optim.SGD(lr=STEP, clip_value=1 / STEP) if rows else None,
    clip_value=1 / STEP if mode == "async" else None,
    checkpoints=SlowDisk(checkpoints),
    checkpoint_every=int(os.environ.get("SAVE_EVERY", "5")),
    checkpoint_seconds=float(os.environ.get("SAVE_SECONDS", "600")),
    metrics={"samples": Samples()} if os.environ.get("COUNTED") == "1" else None,
    callbacks=[*averages, Note()],
    progress="plain",
    log_every=10,
)
if os.environ.get("KARVAN_LOADER_COUNT", "0") == "0":
    read = kv.data.read(
        str(data / "*.parquet"), batch_size=8, shuffle=64, split_records=24, transform=transform
    )
else:
    read = kv.data.from_loaders(ids=["id"] if feature == "id" else None)
valid = kv.data.read(
    str(data / "*.parquet"), batch_size=32, transform=lambda batch: {**batch, "evaluated": batch["record"]}
)
limit = int(os.environ["MAX_STEPS"]) if "MAX_STEPS" in os.environ else None
drop = os.environ.get("DROP") == "1"
result = trainer.fit(read, epochs=epochs, max_steps=limit, eval_data=valid, drop_unfinished=drop)
if result.stopped is None:
    times = trainer.model.times.detach()
    counted = {
        "step": result.step,
        "samples": result.samples,
        "times": times.tolist(),
        "evaluation": result.evaluation,
        "metrics": result.metrics,
        "trained": result.trained,
        "bad_records": result.bad_records,
    }
    if averages:
        counted["averages"] = averages[0].state_dict()["times"].tolist()
    if rows:
        table = trainer.model.embeddings.table("record")
        counted["rows"] = table.vectors(torch.arange(records)).squeeze(1).tolist()
    written = notes / f"result-{os.getpid()}.new"
    written.write_text(json.dumps(counted))
    written.rename(notes / f"result-{os.getpid()}")
