"""What the ranks do in `test_trainer_ranks.py`: fits of a small model, each of several scenarios in turn."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import karvan as kv
from karvan import distributed
from karvan.train.saving import NoSaver

SIZES = {0: [6, 6, 6, 6, 3], 1: [6, 6, 2], 2: []}  # rows of each rank's batches; the last rank has none


class Net(nn.Module):
    """Every kind of column and of output."""

    def __init__(self, dropout=0.0, heads=False):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(4, init=kv.init.Normal(std=0.1)), "history": kv.Table(4, combiner="mean")}
        )
        self.net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Dropout(dropout))
        self.last = nn.Linear(8, 1)
        self.other = nn.Linear(8, 1) if heads else None

    def forward(self, batch):
        out = self.embeddings(batch)
        hidden = self.net(torch.cat([out["user"], out["history"], out["dense"]], 1))
        logits = self.last(hidden).squeeze(1)
        # No loss meets the second head.
        return logits if self.other is None else {"ctr": logits, "other": self.other(hidden).squeeze(1)}


class RowsOnly(nn.Module):
    """No dense parameters at all."""

    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"user": kv.Table(1, init=kv.init.Normal(std=0.1))})

    def forward(self, batch):
        return self.embeddings(batch)["user"].squeeze(1)


def records(rows, seed):
    random = np.random.default_rng(seed)
    return [
        {
            "user": int(random.integers(30)),
            "history": random.integers(0, 50, random.integers(0, 4)).tolist(),
            "dense": random.random(2).tolist(),
            "label": float(random.random() < 0.4),
        }
        for _ in range(rows)
    ]


def batch_of(rows, kind=kv.Batch):
    return kind(
        {
            "user": torch.tensor([row["user"] for row in rows]),
            "history": kv.Ragged.from_lists([row["history"] for row in rows]),
            "dense": torch.tensor([row["dense"] for row in rows]),
            "label": torch.tensor([row["label"] for row in rows]),
        }
    )


def pieces(rank, seed=0):
    """The batches of a rank, as rows."""
    return [records(rows, [seed, rank, number]) for number, rows in enumerate(SIZES[rank])]


def shares(world, seed=0, kind=kv.Batch):
    """This rank's batches; those of one process are the ones of all ranks together, round by round."""
    here = distributed.current()
    if here.world_size == world:
        return [batch_of(rows, kind) for rows in pieces(here.rank, seed)]
    every = [pieces(rank, seed) for rank in range(world)]
    joined = []
    for number in range(max(map(len, every))):
        joined.append([row for each in every for row in (each[number] if number < len(each) else [])])
    return [batch_of(rows, kind) for rows in joined]


def trainer_of(net, **options):
    given = {
        "loss": kv.losses.BinaryCrossEntropy(),
        "dense_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "sparse_optimizer": kv.optim.Adagrad(lr=0.1),
        "metrics": {"auc": kv.metrics.AUC(bins=64), "exact": kv.metrics.AUC(exact=True)},
        "progress": "none",
    } | options
    return kv.Trainer(net, given.pop("loss"), **given)


def numbers_of(trainer, result):
    model = trainer.model
    dense = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    tables = {
        table.name: tuple(table.snapshot())
        for module in model.modules()
        if isinstance(module, kv.EmbeddingEngine)
        for table in module.tables()
    }
    return {"dense": dense, "tables": tables, "result": result}


def net_of(kind=Net, **options):
    # Each rank begins with another one: the Trainer has to make them equal.
    torch.manual_seed(7 + distributed.current().rank)
    return kind(**options)


def uneven(world, prefetch=2, plain=False):
    """Two epochs of uneven data with evaluations; what is logged goes along."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        logs = [kv.loggers.JSONLinesLogger(log)]
        trainer = trainer_of(net_of(), prefetch=prefetch, loggers=logs, log_every=2)
        kind = dict if plain else kv.Batch
        data, other = shares(world, kind=kind), shares(world, seed=1, kind=kind)
        result = trainer.fit(data, epochs=2, eval_data=other)
        made = numbers_of(trainer, result)
        made["log"] = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        made["predicted"] = [len(output) for output, _ in trainer.predict(other)]
        return made


def heads(world):
    """A head that no loss meets, and a model without dense parameters."""
    trainer = trainer_of(
        net_of(heads=True),
        loss=kv.losses.BinaryCrossEntropy(output="ctr"),
        metrics={},
        gradient_accumulation_steps=1,
    )
    made = numbers_of(trainer, trainer.fit(shares(world), epochs=2))
    rows = trainer_of(net_of(RowsOnly), dense_optimizer=None)
    return made, numbers_of(rows, rows.fit(shares(world), epochs=2))


MODELS = {
    "dlrm": lambda: kv.models.DLRM({"dense": 2}, ["user", "history"], 4, (8,), (8,)),
    "deepfm": lambda: kv.models.DeepFM({"dense": 2}, ["user", "history"], 4, (8,)),
    "dcn": lambda: kv.models.DCN({"dense": 2}, ["user", "history"], 4, 2, (8,)),
    "wide and deep": lambda: kv.models.WideDeep({"dense": 2}, ["user"], ["history"], 4, (8,)),
    "din": lambda: kv.models.DIN({"dense": 2}, ["user"], {"history": "user"}, 4, (8,), attention=(4,)),
    "mmoe": lambda: kv.models.MMoE({"dense": 2}, ["user"], ["a", "b"], 4),
}


def models(world):
    """Every model of ours takes batches without rows, and has no parameter that takes no part."""
    made = {}
    for name, make in MODELS.items():
        loss = kv.losses.BinaryCrossEntropy(output="b" if name == "mmoe" else None)
        trainer = trainer_of(net_of(make), loss=loss, metrics={})
        made[name] = numbers_of(trainer, trainer.fit(shares(world)))
    return made


def accumulated(world):
    """Steps of two rounds of unequal rows; one process has those of a step in one batch."""
    if distributed.current().world_size == world:
        data = shares(world)
    else:
        every = [pieces(rank) for rank in range(world)]
        steps = [[each[n : n + 2] for each in every] for n in range(0, 5, 2)]
        data = [batch_of([row for two in step for rows in two for row in rows]) for step in steps]
    trainer = trainer_of(
        net_of(), gradient_accumulation_steps=2 if distributed.current().world_size == world else 1
    )
    return numbers_of(trainer, trainer.fit(data, epochs=2))


def fixed(world, batches=18, together=4):
    """A fixed global batch: each step has the same batches on any number of ranks, the last has two."""
    here = distributed.current()
    turn, mine = list(range(batches)), []
    for step in range(-(-batches // together)):
        for rank in range(here.world_size):
            extra = (rank - step) % here.world_size < together % here.world_size
            taken = [turn.pop(0) for _ in range(min(len(turn), together // here.world_size + extra))]
            mine += taken if rank == here.rank else []
    trainer = trainer_of(net_of(), global_accumulation_steps=together)
    return numbers_of(trainer, trainer.fit([batch_of(records(5, [3, number])) for number in mine]))


class Stop(kv.callbacks.Callback):
    """Stops a fit on one rank at a step."""

    def __init__(self, step, how):
        self.step, self.how = step, how

    def on_step_end(self, trainer, logs):
        if logs.step == self.step and trainer.connection.rank == trainer.connection.world_size - 1:
            trainer.stop("enough") if self.how == "stop" else os.kill(os.getpid(), signal.SIGTERM)


def loader(rows=120, size=4, **options):
    columns = {
        "user": np.arange(rows) * 7 % 31,
        "history": np.arange(rows) * 5 % 41,
        "dense": np.random.default_rng(1).random((rows, 2)).astype(np.float32).tolist(),
        "label": (np.arange(rows) % 3 == 0).astype(np.float32),
    }
    wanted = ["user", "history", "label", kv.data.Fixed("dense", length=2)]
    return kv.data.read(columns, size, columns=wanted, shuffle=16, seed=2, split_records=4, **options)


def stops(world):
    """Stops of one rank; the fit after each trains on what is left of the epoch."""
    made = {}
    for how in ("stop", "signal"):
        for ahead in (0, 2):
            data = loader()
            first = trainer_of(net_of(), prefetch=ahead, callbacks=[Stop(2, how)]).fit(data)
            if how == "signal":  # one rank got it, and it ends the training of all
                made["ended", ahead] = error_of(trainer_of(net_of()), data)
                kv.train.reset_termination()
            rest = trainer_of(net_of(), prefetch=ahead).fit(data)
            made[how, ahead] = (first.step, first.stopped, first.samples + rest.samples, rest.stopped)
    # The goal comes one step before the end, when all ranks but the first have no data left.
    rows, steps = {2: (81, 10), 3: (85, 7)}[world]
    data = loader(rows=rows)
    first = trainer_of(net_of()).fit(data, max_steps=steps)
    rest = trainer_of(net_of()).fit(data, epochs=1)
    made["rest"] = (first.samples, rest.samples)
    early = kv.callbacks.EarlyStopping("auc", patience=1, min_delta=10.0)
    result = trainer_of(net_of(), callbacks=[early]).fit(loader(), eval_data=loader(24), eval_every=2)
    made["early"] = (result.step, result.stopped)
    return made


class Kept(NoSaver):
    """Keeps checkpoints in a file for each rank."""

    def __init__(self, folder, every=None, times=()):
        self.path = self.folder = Path(folder)
        self.every, self.times, self.saved = every, list(times), []

    def latest(self):
        found = sorted(self.path.glob("*.pt"))
        if not found:
            return None
        saved = torch.load(found[0], weights_only=False)
        self.step, self.manifest = saved["step"], SimpleNamespace(state=saved["state"])
        return self

    def newest_step(self):
        found = self.latest()
        return None if found is None else found.step

    def resume(self, load, name=None):
        found = self.latest()
        return None if found is None else (found, load(found))

    def load(self, checkpoint, model):
        parts = [torch.load(path, weights_only=False) for path in sorted(self.path.glob("*.pt"))]
        for part in parts:
            for name, rows in part["rows"].items():
                model.embeddings.table(name).load(rows)
        return parts[0]["state"]

    def due_by_steps(self, step):
        return self.every is not None and step % self.every == 0

    due = due_by_steps

    def take_time(self):
        return self.times.pop(0) if self.times else False

    def save(self, snapshot):
        step, state, model, _ = snapshot
        self.saved.append(step)
        rows = {table.name: table.snapshot() for table in model.embeddings.tables()}
        part = {"step": step, "state": state, "rows": rows}
        torch.save(part, self.path / f"{distributed.current().rank}.pt")
        distributed.current().main.barrier()


def resumed(world, folder, until, steps=None, times=()):
    """A fit with dropout that goes on from what lies in a folder."""
    Path(folder).mkdir(exist_ok=True)
    torch.manual_seed(50 + distributed.current().rank)
    trainer = trainer_of(net_of(dropout=0.3), prefetch=2)
    torch.manual_seed(100 + distributed.current().rank)
    trainer.saver = Kept(folder, steps, times)
    result = trainer.fit(loader(), max_steps=until, epochs=2)
    return numbers_of(trainer, result) | {"saved": trainer.saver.saved}


def error_of(trainer, data):
    """What a fit raises."""
    try:
        trainer.fit(data)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def refused(world, folder):
    """Fits that are refused when they begin; the ranks train together afterwards all the same."""
    here = distributed.current()
    file = Path(folder) / "file"
    if here.rank == here.world_size - 1:
        file.write_text("")
    here.main.barrier()
    made = [error_of(trainer_of(net_of(), checkpoints=file / "run"), loader())]
    made.append(error_of(trainer_of(net_of(), sparse_optimizer=None), loader()))
    made.append(trainer_of(net_of()).fit(loader()).samples)
    return made


def failures(world):
    """A step that one rank's gradients leave out; data that fails on one rank."""
    here = distributed.current()
    last = here.rank == here.world_size - 1
    data = [batch_of(records(4, [here.rank, n])) for n in range(4)]
    if last:
        data[1]["dense"][0] = torch.nan
    trainer = trainer_of(net_of(), metrics={})
    made = numbers_of(trainer, trainer.fit(data))

    def broken():
        yield from data[2:]
        raise OSError("the disk is gone")

    try:
        trainer_of(net_of()).fit(broken() if last else [*data[2:]] * 3)
    except (OSError, distributed.RankError) as error:
        made["error"] = str(error)
    return made


class Failing(nn.Module):
    """A loss, and a callback, of which one fails on one rank in the third step."""

    def __init__(self, where, victim):
        super().__init__()
        self.where, self.victim, self.steps = where, victim, 0
        self.loss = kv.losses.BinaryCrossEntropy()

    def forward(self, output, batch):
        self.fail_in("loss", self.steps + 1)
        return self.loss(output, batch)

    def fail_in(self, where, step):
        if (where, step) == (self.where, 3) and distributed.current().rank == self.victim:
            raise ZeroDivisionError(f"the {where} fails")

    def called(self):
        failing = self

        class Called(kv.callbacks.Callback):
            def on_step_end(self, trainer, logs):
                failing.steps = logs.step
                failing.fail_in("callback", logs.step)
                if logs.step == 3:  # the other rank's feed gets a batch ahead, and waits for this one
                    time.sleep(0.7)

        return Called()


class LongEnd:
    """Its process takes a while to end, in which messages arrive for threads that nobody has ended."""

    def __del__(self, sleep=time.sleep):
        sleep(1.0)


def fail(where, transport, victim):
    """A fit that fails on one rank and waits on the other; the error ends the process."""
    torch.set_num_threads(1)
    kv.connect("sharded", transport=transport, timeout=60)
    if distributed.current().rank == victim:
        PROGRAMS["long end"] = LongEnd()
    failing = Failing(where, victim)
    trainer_of(net_of(), loss=failing, callbacks=[failing.called()], metrics={}).fit(loader(rows=400))


def bad_labels(victim):
    """A fit in which one rank has a label that cannot be meant; the error ends the process."""
    torch.set_num_threads(1)
    here = kv.connect("sharded", timeout=60)
    data = [batch_of(records(4, [here.rank, n])) for n in range(6)]
    if here.rank == victim:
        data[3]["label"][2] = 5.0
    trainer_of(net_of(), metrics={}).fit(data)


def fail_and_disconnect(**arguments):
    try:
        fail(**arguments)
    except (ZeroDivisionError, distributed.RankError) as error:
        distributed.disconnect()
        return f"{type(error).__name__}: {error}"


PROGRAMS = {
    "uneven": uneven,
    "heads": heads,
    "models": models,
    "accumulated": accumulated,
    "fixed": fixed,
    "stops": stops,
    "resumed": resumed,
    "refused": refused,
    "failures": failures,
}


def run_all(of, programs):
    """What programs, each [name, arguments], give when run in turn with the data of so many ranks."""
    torch.set_num_threads(1)
    return [PROGRAMS[name](of, **arguments) for name, arguments in programs]


def run_ranks(programs):
    """The same by ranks."""
    return run_all(kv.connect("sharded", timeout=60).world_size, programs)
