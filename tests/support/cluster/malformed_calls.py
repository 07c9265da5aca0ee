"""The services of a job in this process, and valid calls of each of them, to be mutated by tests.

A call goes the way of the wire: packed, written and read as messages are, then to `Service.answer`; its
arrays are the very memory that was given, so that AddressSanitizer sees every read beyond them.
"""

import itertools
import os
import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch
from dense_helpers import new_state
from task_loaders import Numbers, shared_data

import karvan as kv
from karvan import checkpoint
from karvan.cluster.batch_messages import pack as pack_batch
from karvan.cluster.embedding_worker.service import EmbeddingWorker
from karvan.cluster.loader.service import LoaderService
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.cluster.task_reading.service import TaskReadingService
from karvan.dense.wire_format import state_message, state_of, tensors_message
from karvan.discovery.registry import Registry
from karvan.protocol.values import words
from karvan.ragged import Batch, Ragged
from karvan.store.exchange.wire_format import rule_to_json, spec_to_json
from karvan.wire import Message, Server
from karvan.wire.message import pack, read, write
from karvan.wire.schema.calls import hello_fields
from karvan.wire.service import Caller

DIMS = {"t": 4, "u": 8}
KEYS = 25  # of each table in a lookup
TRAINER = {"generation": 0, "trainer": 0, "trainers": 1, "mode": "hybrid", "staleness": 4}
MEMBER = {**TRAINER, "trainers": 0, "elastic": True, "mode": "sync", "staleness": 1}
ASYNC_MEMBER = {**MEMBER, "mode": "async"}


class _Stream:
    """What is written can be read; nothing is copied."""

    def __init__(self):
        self._chunks = []

    def write_metadata(self, head):
        self._chunks.append(SimpleNamespace(app_metadata=pa.py_buffer(head), data=None))

    def write_with_metadata(self, batch, head):
        self._chunks.append(SimpleNamespace(app_metadata=pa.py_buffer(head), data=batch))

    def write_batch(self, batch):
        self._chunks.append(SimpleNamespace(app_metadata=None, data=batch))

    def read_chunk(self):
        return self._chunks.pop(0)


def through_the_wire(head, arrays=(), **numbers):
    """The message that a service reads when a caller sends this."""
    stream = _Stream()
    write(stream, pack(Message(head, arrays)), **numbers)
    return read(stream.read_chunk)


class Subject:
    """A service, one caller of it, and a maker of a valid call for each of its methods."""

    def __init__(self, name, service, hello):
        self.name = name
        self.service = service
        self.makers = {}
        self.refuses = {}  # calls that no caller of this kind may make, with valid heads and arrays
        self._numbers = itertools.count(1)
        self._hello = hello
        self.caller = None
        self.meet(hello)

    def meet(self, hello):
        """Say hello, as the wire would have it."""
        said = hello_fields(through_the_wire({**hello, "method": "hello"}).head)
        caller = Caller("session", self.service.hello.check(said, "the hello"), "here")
        self.service.welcome(caller)
        self.caller = caller

    def number(self):
        """One that was not used before."""
        return next(self._numbers)

    def call(self, method, head, arrays=()):
        """Have a call done."""
        message = through_the_wire({**head, "method": method}, arrays, number=1, received=0)
        return self.service.answer(message, self.caller)

    def make(self, method):
        """Head and arrays of a valid call; what it needs has happened before."""
        return self.makers[method]()

    def hello(self):
        """A valid one."""
        return dict(self._hello)

    def fingerprint(self):
        """What must not change when a call is refused."""
        return None

    def close(self):
        self.service.close()


class ServerSubject(Subject):
    """A parameter server with two tables, a dense model, and a checkpoint to be filled from."""

    trainer = TRAINER

    def __init__(self, folder, run="run"):
        self._folder = folder
        (folder / "save").mkdir(exist_ok=True)
        super().__init__(
            "parameter server",
            ParameterServer(checkpoints=folder),
            {**self.trainer, "run": run, "server": 0, "servers": 1},
        )
        self._saved = folder / "whole"
        if not self._saved.exists():
            engine = kv.EmbeddingEngine(
                {name: kv.Table(dim, name) for name, dim in DIMS.items()}, store=kv.store.MemoryStore()
            )
            engine({name: torch.arange(9) for name in DIMS})
            checkpoint.save(self._saved, {}, engine)
        self._begin()
        self._state = self.call("dense_state", {"model": 1}).arrays
        one = {"model": 1}
        self.makers = {
            "pull": self._pull,
            "push": self._push,
            "withdraw": lambda: ({"store": 1, "batches": [self._looked_up()]}, []),
            "add_table": lambda: ({"spec": _spec("t")}, []),
            "set_state": lambda: ({"table": "t", "initial": [0.5] * 4, "fresh": False}, []),
            "lookup": self._lookup,
            "apply": self._apply,
            "skip": self._of_table,
            "evict": lambda: ({"table": "t", "step": 9, "now": 1.0}, []),
            "erase": lambda: ({"table": "u"}, [np.arange(3)]),
            "clear": lambda: ({"table": "u"}, []),
            "version": self._of_table,
            "evicted_since": lambda: ({"table": "t", "version": 0}, []),
            "snapshot": lambda: ({"table": "t", "part": 0, "parts": 2}, []),
            "load": self._load,
            "stats": lambda: ({"tables": list(DIMS)}, []),
            "capture": self._capture,
            "save": self._save,
            "close_capture": lambda: ({"capture": self._captured()}, []),
            "fill": self._fill,
            "restore": lambda: ({"tables": {n: {"spec": _spec(n)} for n in DIMS}, "folder": str(folder)}, []),
            "check_folder": lambda: ({"folder": str(folder)}, []),
            "updates": lambda: ({"store": 1}, []),
            "describe": lambda: ({}, []),
            "pull_dense": lambda: ({**one, "version": None}, []),
            "push_dense": self._push_dense,
            "next_sequence": lambda: ({**one, "trainer": "a"}, []),
            "flush_dense": lambda: (one, []),
            "dense_state": lambda: (one, []),
            "load_dense_state": lambda: (one, [self._state[0].copy()]),
        }
        commit = {"step": 1, "parts": [[0, 1]], "scale": 1.0, "ack": None}
        heads = {"commit": commit, "drop": {"step": 1}, "progress": {}, "members": {"round": 1}}
        heads |= {"fence": {"member": 1}, "abandon": {"member": 1}, "tally": {"meeting": 0}}
        self.refuses = {name: (head, []) for name, head in heads.items()}
        self.refuses["stage_dense"] = self._stage_dense()

    def _begin(self):
        for name in DIMS:
            self.call("add_table", {"spec": _spec(name)})
        self.call("set_state", {"table": "t", "initial": [0.5] * 4, "fresh": True})
        parameters = {"w": torch.ones(4, 4), "b": torch.ones(4)}
        optimizer = {"name": "Adam", "options": {"lr": 0.1, "betas": [0.9, 0.99]}}
        made = state_message(new_state(parameters, optimizer))
        self.call("load_dense_state", {"model": 1, **made.head}, made.arrays)
        self.call("push_dense", *self._push_dense(version=0))

    def renew(self):
        """A new run of trainers, which finds the tables of the one before, and says what state rows have."""
        self.meet({**self._hello, "run": f"run {self.number()}"})
        for table, initial in (("t", [0.5] * 4), ("u", [])):
            self.call("set_state", {"table": table, "initial": initial, "fresh": False})

    def _of_table(self):
        return {"table": "t"}, []

    def _pull(self, **more):
        n = KEYS * len(DIMS)
        message = np.zeros(words(n), np.int64)
        message[:n] = np.tile(np.arange(KEYS), len(DIMS))
        message[n:].view(np.uint32)[:n] = 1
        head = {"store": 1, "batch": self.number(), "tables": list(DIMS), "counts": [KEYS] * len(DIMS)}
        head |= {"training": True, "step": 3, "now": 1.0, "wire": "float32", "done": [], **more}
        return head, [message]

    def _looked_up(self):
        head, arrays = self._pull()
        self.call("pull", head, arrays)
        return head["batch"]

    def _push(self, **more):
        batches = [self._looked_up(), self._looked_up()]
        head = {"store": 1, "sequence": self.number(), "batches": batches, "mine": [0, 1]}
        head |= {"rules": {"t": _rule("adagrad"), "u": _rule("sgd")}, "steps": dict.fromkeys(DIMS, 1)}
        head |= {"skipped": [], "complete": True, "wire": "float32", "done": batches, **more}
        return head, [np.full(KEYS * sum(DIMS.values()), 1e-3, np.float32) for _ in batches]

    def _lookup(self):
        head = {"tables": list(DIMS), "training": True, "step": 3, "now": 1.0}
        return head, [array for _ in DIMS for array in (np.arange(KEYS), np.ones(KEYS, np.uint32))]

    def _apply(self):
        head = {"rules": {"u": _rule("sgd")}, "steps": {"u": 1}, "numbers": {"u": 2}}
        return head, [np.arange(7), np.zeros((7, 8), np.float32), np.arange(3), np.zeros((3, 8), np.float32)]

    def _load(self):
        arrays = [np.arange(5) + 1000, np.zeros((5, 8), np.float32), np.zeros((5, 0), np.float32)]
        return {"table": "u"}, [*arrays, np.ones(5, np.uint32), np.ones(5, np.uint32)]

    def _capture(self):
        head = {"capture": self.number(), "tables": list(DIMS), "parts": dict.fromkeys(DIMS, 2)}
        return {**head, "since": None, "track": False, "store": 1, "used": [[self._looked_up()]]}, []

    def _captured(self):
        self.service._saving.close_all()
        head, _ = self._capture()
        self.call("capture", head)
        return head["capture"]

    def _save(self):
        told = {"optimizer": None, "parts": 2, "delta": False, "base": None}
        folder = self._folder / "save" / str(self.number())
        folder.mkdir()
        head = {"capture": self._captured(), "folder": str(folder), "store": 1}
        return {**head, "tables": dict.fromkeys(DIMS, told)}, []

    def _fill(self):
        told = {"u": {"keep": False, "initial": [], "extra": False}}
        return {"path": str(self._saved), "tables": told}, []

    def _push_dense(self, version=1):
        made = tensors_message({"w": np.ones((4, 4), np.float32), "b": np.ones(4, np.float32)})
        head = {"model": 1, "version": version, "trainer": "a", "sequence": self.number(), "lr": 0.1}
        return {**made.head, **head}, made.arrays

    def _stage_dense(self):
        head, arrays = self._push_dense()
        return {**{n: head[n] for n in ("model", "version", "lr", "tensors")}, "step": self.number()}, arrays

    def state_with(self, change):
        """The dense state with a change."""
        state = state_of(Message({}, self._state))
        change(state)
        return list(state_message(state).arrays)

    def fingerprint(self):
        stats = [
            self.call("snapshot", {"table": t, "part": 0, "parts": 1}).arrays
            for t in sorted(self.service._tables.specs)
        ]
        dense = self.call("dense_state", {"model": 1}).arrays[0]
        return [array.tobytes() for arrays in stats for array in arrays], dense.tobytes()


class ElasticServerSubject(ServerSubject):
    """The same in an elastic run, which stages pushes and commits steps."""

    trainer = MEMBER

    def __init__(self, folder, run="run"):
        super().__init__(folder, run)
        self.refuses = {name: self.refuses[name] for name in ("stage_dense", "tally")}
        self.makers |= {
            "commit": self._commit,
            "drop": lambda: ({"step": self.number()}, []),
            "fence": lambda: ({"member": 7}, []),
            "abandon": lambda: ({"member": 7}, []),
            "progress": lambda: ({}, []),
            "members": lambda: ({"round": self.number()}, []),
        }

    def _pull(self, **more):
        return super()._pull(commit=None, **more)

    def _push(self, **more):
        return super()._push(**{"step": self.number(), "commit": None, **more})

    def _commit(self):
        head, arrays = self._push()
        self.call("push", head, arrays)
        parts = [[0, head["sequence"]]]
        return {"step": head["step"], "parts": parts, "scale": 0.5, "ack": {"records": [1, 2]}}, []

    def _capture(self):
        head, arrays = super()._capture()
        return {**head, "used": [[]]}, arrays


class AsyncServerSubject(ElasticServerSubject):
    """The same in mode async, in which members commit steps of their own."""

    trainer = ASYNC_MEMBER

    def __init__(self, folder, run="run"):
        super().__init__(folder, run)
        self.refuses = {}
        self.makers |= {
            "stage_dense": self._stage_dense,
            "drop": lambda: ({"step": self.number(), "member": 0}, []),
            "progress": lambda: ({"member": 0}, []),
            "tally": lambda: ({"meeting": self.number()}, []),
        }

    def _commit(self):
        head, arrays = super()._commit()
        staged, tensors = self._stage_dense()
        self.call("stage_dense", {**staged, "step": head["step"], "version": 0}, tensors)
        return {**head, "member": 0, "dense": [1], "counts": {"samples": 3}}, arrays


class WorkerSubject(Subject):
    """An embedding worker in front of a parameter server at a port."""

    def __init__(self, folder):
        self._server = Server(ParameterServer(checkpoints=folder))
        os.environ["KARVAN_PARAMETER_SERVER_ADDRESSES"] = self._server.address
        hello = {**TRAINER, "run": "run", "worker": 0, "servers": 1, "divisor": 1}
        super().__init__("embedding worker", EmbeddingWorker(most=10**9), hello)
        told = {"mean": ["t", 4, "mean", None, None], "stack": ["u", 8, "sum", None, [2, 100]]}
        told |= {"long": ["u", 8, "sequence", 3, [2, 100]], "ragged": ["t", 4, "ragged", None, None]}
        self._features = told
        self._tables = {name: {"spec": _spec(name)} for name in DIMS}
        self.makers = {
            "put": self._put,
            "forget": lambda: ({"references": ["nobody"]}, []),
            "abandon": lambda: ({"members": [7]}, []),
            "describe": lambda: ({}, []),
            "engine": self._engine,
            "claim": self._claim,
            "backward": self._backward,
        }
        self._begin()

    def _begin(self):
        servers = self.service._sessions[0].servers
        for name in DIMS:
            servers.call("add_table", {"spec": _spec(name)})
        self.call("engine", *self._engine())

    def renew(self):
        """A new run of trainers; the server's tables stay."""
        self.meet({**self._hello, "run": f"run {self.number()}"})
        self._begin()

    def _put(self):
        ids = Ragged(torch.arange(11), torch.tensor([0, 3, 3, 9, 11]), torch.ones(11))
        batch = {"mean": ids, "stack": torch.arange(4), "long": Ragged(ids.values, ids.offsets)}
        made = pack_batch({**batch, "ragged": Ragged(ids.values, ids.offsets)})
        return {**made.head, "reference": f"batch {self.number()}"}, made.arrays

    def _engine(self):
        told = {"engine": "e", "features": self._features, "wire": "float32", "tables": self._tables}
        return {**told, "declarations": 1}, []

    def _claim(self):
        head, arrays = self._put()
        self.call("put", head, arrays)
        claim = {"engine": "e", "store": 1, "batch": self.number(), "reference": head["reference"]}
        claim |= {"training": True, "step": 1, "now": 1.0, "done": [], "gone": [], "declarations": 1}
        return claim, []

    def _backward(self):
        claim, _ = self._claim()
        size = self.call("claim", claim).arrays[0].size
        head = {"engine": "e", "store": 1, "sequence": self.number(), "batches": [claim["batch"]]}
        head |= {
            "mine": [0],
            "rules": {"t": _rule("sgd")},
            "steps": {"t": 1},
            "skipped": [],
            "complete": True,
        }
        head |= {"wire": "float32", "done": [claim["batch"]], "gone": [claim["reference"]], "declarations": 1}
        head["passes"] = [{"reference": claim["reference"], "given": list(range(4))}]
        return head, [np.full(size, 1e-3, np.float32)]

    def fingerprint(self):
        servers = self.service._sessions[0].servers
        rows = [servers.call("snapshot", {"table": t, "part": 0, "parts": 1})[0].arrays for t in DIMS]
        return [array.tobytes() for arrays in rows for array in arrays]

    def close(self):
        super().close()
        self._server.close(0.1)
        del os.environ["KARVAN_PARAMETER_SERVER_ADDRESSES"]


class _Workers:
    """Where a loader puts ids."""

    def put(self, reference, ids):
        pass


class LoaderSubject(Subject):
    """A loader whose program sends the same batch for ever."""

    def __init__(self, folder):
        hello = {"generation": 0, "run": "run", "trainer": 0, "trainers": 1, "kind": "batches", "loader": 0}
        hello |= {"loaders": 1, "ids": ["id"], "epoch": 0, "next": 0, "taken": [3], "end": None}
        service = LoaderService(workers=[_Workers()])
        super().__init__("loader", service, {**hello, "positions": [[0, None]]})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.makers = {
            "next": lambda: ({"epoch": 0}, []),
            "stay": self._stay,
            "done": lambda: ({"references": [[0, 0, 1]]}, []),
            "resend": lambda: ({"reference": list(self._sent()), "worker": 0}, []),
            "identity": lambda: ({}, []),
            "statistics": lambda: ({"whole": True}, []),
            "leave": lambda: ({}, []),
        }

    def _read(self):
        batch = Batch({"id": torch.arange(3), "x": torch.ones(3)})
        while not self.service.closed:
            if self.service.begin() is None:
                return
            while self.service.send(batch):
                pass

    def renew(self):
        """A new run of trainers."""
        self.meet({**self._hello, "run": f"run {self.number()}"})

    def _stay(self):
        self.call("leave", {})  # so that it is answered at once
        return {}, []

    def _sent(self):
        self.renew()
        while "wait" in self.call("next", {"epoch": 0}).head:
            pass
        return next(iter(self.service._sent._held))

    def fingerprint(self):
        return self.service._generation, self.service._world

    def close(self):
        super().close()
        self._thread.join(20)


class TaskReadingSubject(Subject):
    """A loader that reads leased tasks."""

    def __init__(self, folder):
        super().__init__("loader", TaskReadingService(), {"loader": 0})
        self.service.offer(shared_data(Numbers([40])))
        task = {"kind": "train", "epoch": 0, "number": 0, "path": "0", "first": 0, "records": 8, "done": 2}
        task |= {"tries": 0, "skipped": [3]}
        self.makers = {
            "describe": lambda: ({}, []),
            "statistics": lambda: ({"whole": True}, []),
            "read_batch": lambda: ({"tasks": [{"task": dict(task), "ends": True}], "ids": ["id"]}, []),
            "stop_reading": lambda: ({}, []),
        }

    def renew(self):
        """It has no runs."""

    def fingerprint(self):
        return list(self.service._readings)


class RegistrySubject(Subject):
    """The registry, with its store for trainers that meet."""

    def __init__(self, folder):
        super().__init__("registry", Registry(), {})
        who = {"role": "trainer", "index": 0, "address": "h:1", "generation": 0, "pid": 7, "process": "p"}
        self.call("register", who)
        self.call("store_set", {"generation": 0, "keys": ["k"], "sizes": [3]}, [np.zeros(3, np.uint8)])
        values = [np.arange(5, dtype=np.uint8)]
        at = {"generation": 0, "key": "k"}
        activity = {"progress": 3, "idle": 0.5, "task": "step", "waits": {"loader 0": 0.5}, "dumps": True}
        self.makers = {
            "register": lambda: (dict(who), []),
            "beat": lambda: ({**who, "activity": dict(activity)}, []),
            "leave": lambda: (dict(who), []),
            "members": lambda: ({}, []),
            "generation": lambda: ({}, []),
            "store_set": lambda: ({"generation": 0, "keys": ["a", "b"], "sizes": [2, 3]}, values),
            "store_get": lambda: ({"generation": 0, "keys": ["k"]}, []),
            "store_check": lambda: ({"generation": 0, "keys": ["k"]}, []),
            "store_add": lambda: ({"generation": 0, "key": f"n {self.number()}", "amount": 1}, []),
            "store_append": lambda: ({**at, "sizes": [5]}, values),
            "store_compare_set": lambda: ({**at, "sizes": [2, 3]}, values),
            "store_delete": lambda: ({"generation": 0, "key": "none"}, []),
            "store_count": lambda: ({"generation": 0}, []),
        }

    def renew(self):
        """It has no runs."""

    def fingerprint(self):
        head = self.call("store_get", {"generation": 0, "keys": ["k"]})
        return (
            head.head,
            head.arrays[0].tobytes(),
            [(m.role, m.index, m.address) for m in self.service.members()],
        )


SUBJECTS = {
    "server": ServerSubject,
    "elastic server": ElasticServerSubject,
    "async server": AsyncServerSubject,
    "worker": WorkerSubject,
    "loader": LoaderSubject,
    "loader of tasks": TaskReadingSubject,
    "registry": RegistrySubject,
}


def _spec(name):
    return spec_to_json(kv.Table(DIMS[name]).spec(name, 0, 4))


def _rule(kind):
    rule = kv.store.Rule(kind)
    rule.lr = 0.1
    return rule_to_json(rule)
