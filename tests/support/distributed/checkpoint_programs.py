"""What the ranks do in `test_checkpoint_ranks.py`: they train, save, load, and get into trouble."""

import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import torch

import karvan as kv
from karvan import distributed
from karvan.checkpoint import CheckpointError
from karvan.checkpoint import safetensors_file as writing_module

PART_BYTES = 1500
RARE = range(5000, 5040)  # keys that are seen too seldom for a row


class Model(torch.nn.Module):
    """Two tables, one of them with a filter, and a dense tensor."""

    def __init__(self, optimizer=True):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(4, admit=kv.admission.MinCount(3, slots=1 << 14)), "item": kv.Table(3)}, seed=1
        )
        self.dense = torch.nn.Parameter(torch.arange(3.0))
        self.optimizer = kv.optim.Adam(self, lr=0.05) if optimizer else None

    def step(self, users, items):
        out = self.embeddings({"user": torch.as_tensor(users), "item": torch.as_tensor(items)})
        sum((vectors**2 + vectors).sum() for vectors in out.values()).backward()
        self.optimizer.step()

    def train_on(self, seed, steps=3):
        random = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.step(*(torch.randint(-n, n, (48,), generator=random) << 33 for n in (60, 300)))

    def content(self):
        return {table.name: tuple(table.snapshot()) for table in self.embeddings.tables()}

    def see_rare(self, rank):
        """All ranks together see every rare key once."""
        mine = [key for key in RARE if key % distributed.current().world_size == rank]
        self.step(mine, [1] * len(mine))


def error_of(work):
    try:
        work()
    except (CheckpointError, distributed.RankError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def go_on(before, place, see_rare):
    """Load what another number of ranks has saved, train, and save, also while training goes on."""
    rank = distributed.connect("sharded").rank
    model = Model()
    latest = kv.Checkpoints(before).latest()
    state = latest.load(model)
    loaded, saved = model.content(), {}
    checkpoints = kv.Checkpoints(place, keep_last=None, full_every=3, part_bytes=PART_BYTES)
    for step in range(latest.step + 1, latest.step + 5):
        model.train_on(100 * step + rank)
        if see_rare and step == latest.step + 1:
            model.see_rare(rank)
        keys = model.embeddings.table("item").keys()
        model.embeddings.table("item").evict_keys(keys[: 5 + rank])
        checkpoints.save(step, {"rank": rank, "dense": model.dense.detach() + step}, model)
        saved[step] = model.content()
        model.train_on(100 * step + 50 + rank, steps=2)
    checkpoints.wait()
    kinds = [(one.step, one.kind) for one in checkpoints.list()]
    return {"loaded": loaded, "saved": saved, "state": state, "kinds": kinds}


def trouble(place):
    """Everything that goes wrong short of a death; returns what each rank has seen of it."""
    connection = distributed.connect("sharded")
    rank, main, folder = connection.rank, connection.main, Path(place)
    seen = {}
    model = Model()
    model.train_on(rank)
    checkpoints = kv.Checkpoints(folder / "run", keep_last=2, full_every=5, part_bytes=PART_BYTES)
    made = checkpoints.save(1, {"a": torch.ones(3)}, model, block=True).wait()

    # A flipped byte, in whatever file.
    files = {
        "dense": made.manifest.dense.name,
        "first part": made.manifest.tables["user"].parts[0].name,
        "last part": made.manifest.tables["item"].parts[-1].name,
        "extra": made.manifest.tables["user"].extras[-1].name,
    }
    untouched = model.content()
    for what, file in files.items():
        copy = folder / what
        if rank == 0:
            shutil.copytree(made.path, copy)
            data = bytearray((copy / file).read_bytes())
            data[-1] ^= 1
            (copy / file).write_bytes(data)
        main.barrier()
        seen[f"flipped {what}"] = error_of(lambda copy=copy: kv.checkpoint.find(copy).load(model))
    seen["untouched"] = all(
        a.tobytes() == b.tobytes()
        for name, rows in model.content().items()
        for a, b in zip(rows, untouched[name], strict=True)
    )

    # A disk that takes no more, on one rank; then again, and nobody waits.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model.train_on(10 + rank)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    seen["full disk"] = error_of(lambda: checkpoints.save(2, {}, model, block=True))
    checkpoints.save(3, {}, model)
    seen["told by the next save"] = error_of(lambda: checkpoints.save(4, {}, model))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seen["left"] = sorted(os.listdir(folder / "run"))
    again = Model()
    checkpoints.latest().load(again)
    seen["one before"] = (checkpoints.latest().step, again.content(), untouched)

    # Arguments that are wrong on one rank.
    seen["bad state"] = error_of(lambda: checkpoints.save(5, {"a": object() if rank == 0 else 1}, model))
    seen["other steps"] = error_of(lambda: checkpoints.save(5 + rank, {}, model))
    other = folder / ("run" if rank == 0 else "elsewhere")
    seen["not shared"] = error_of(lambda: kv.Checkpoints(other).save(6, {}, model, block=True))
    seen["not seen"] = error_of(kv.Checkpoints(other).latest)
    seen["left later"] = sorted(os.listdir(folder / "run"))

    # Deltas, until one rank does not know any more what changed; the newest two and their bases stay.
    for step in range(10, 14):
        model.train_on(20 + step + rank)
        checkpoints.wait()
        if step == 12 and rank == 1:
            model.embeddings.store.capture(["user"], {"user": 1}).close()
        checkpoints.save(step, {"step": step}, model, metrics={"auc": 0.5})
    checkpoints.wait()
    main.barrier()
    seen["kinds"] = [(one.step, one.kind) for one in checkpoints.list()]
    seen["folders"] = sorted(os.listdir(folder / "run"))

    # Two saves at once, a warm start, and a table that is not shared out.
    second = Model()
    second.train_on(77 + rank)
    both = [
        kv.checkpoint.start(folder / name, {"name": name}, it, step=20, part_bytes=PART_BYTES)
        for name, it in (("one", model), ("two", second))
    ]
    seen["at once"] = [pending.wait().step for pending in both]
    warm = Model()
    report = kv.checkpoint.warm_start(warm, folder / "two", tables="item")
    seen["warm"] = (report.rows, warm.content(), second.content())
    seen["summary"] = [(t.name, t.rows) for t in kv.checkpoint.summary(folder / "two").tables]

    # A save that is under way is waited for.
    go, write = threading.Event(), writing_module.write_arrays
    writing_module.write_arrays = lambda *arguments: go.wait() and write(*arguments)
    pending = kv.checkpoint.start(folder / "last", {}, model, step=21)
    threading.Timer(0.3, go.set).start()
    distributed.disconnect()
    writing_module.write_arrays = write
    seen["waited for"] = pending.done() and pending.wait().step
    seen["disconnected"] = error_of(lambda: kv.checkpoint.save(folder / "three", {}, model))
    return seen


def die(place, victim):
    """One rank is killed while all write; the others say what they hear of it."""
    connection = distributed.connect("sharded")
    rank = connection.rank
    model = Model()
    model.train_on(rank)
    checkpoints = kv.Checkpoints(place, keep_last=None, full_every=5, part_bytes=PART_BYTES)
    if checkpoints.latest() is None:
        checkpoints.save(1, {"a": 1}, model, block=True)
    saved = model.content()
    model.train_on(10 + rank)
    write, files = writing_module.write_arrays, []

    def write_or_die(*arguments):
        files.append(write(*arguments))
        if len(files) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return files[-1]

    if rank == victim:
        writing_module.write_arrays = write_or_die
    return {"error": error_of(lambda: checkpoints.save(2, {}, model, block=True)), "saved": saved}


def recover(place):
    """Rank 1's share of the newest checkpoint is damaged; returns what each rank resumes from."""
    connection = distributed.connect("sharded")
    rank, main, folder = connection.rank, connection.main, Path(place)
    model = Model()
    checkpoints = kv.Checkpoints(folder, keep_last=None, full_every=2, part_bytes=PART_BYTES)
    saved = {}
    for step in range(1, 5):
        model.train_on(10 * step + rank)
        checkpoints.save(step, {"step": step}, model, block=True)
        saved[step] = model.content()
    newest = checkpoints.latest()
    if rank == 0:
        file = newest.path / newest.manifest.tables["item"].parts[-1].name
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    main.barrier()
    again = Model()
    found, state = kv.Checkpoints(folder).resume(again)
    chosen = error_of(lambda: kv.Checkpoints(folder).resume(again, "step-000000000009"))
    other = folder if rank == 0 else folder / "elsewhere"
    not_shared = error_of(lambda: kv.Checkpoints(other).resume(again))
    main.barrier()
    left = sorted(os.listdir(folder))
    main.barrier()
    if rank == 0:
        for file in folder.glob("step-*/dense.safetensors"):
            file.write_bytes(b"x")
    main.barrier()
    return {
        "step": (found.step, state["step"]),
        "rows": (again.content(), saved[found.step]),
        "chosen": chosen,
        "not shared": not_shared,
        "left": left,
        "none": error_of(lambda: kv.Checkpoints(folder).resume(again)),
    }


def at_url(url, caches):
    """Each rank has a cache of its own, like a machine: save, also a delta, and resume."""
    connection = distributed.connect("sharded")
    os.environ["KARVAN_CACHE"] = f"{caches}/{connection.rank}"
    model = Model()
    checkpoints = kv.Checkpoints(url, full_every=3, part_bytes=PART_BYTES)
    checkpoints.require_writable()
    for step in (1, 2):
        model.train_on(10 * step + connection.rank)
        checkpoints.save(step, {"step": step}, model, block=True)
    again = Model()
    found, state = kv.Checkpoints(url).resume(again)
    return {"saved": model.content(), "loaded": again.content(), "kind": found.kind, "step": state["step"]}
