"""Parameter servers in this process, and valid calls of each of their methods, to be mutated by tests."""

import numpy as np
import torch
from call_subject import DIMS, TRAINER, Subject, rule_of, spec_of
from dense_helpers import new_state

import karvan as kv
from karvan import checkpoint
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.dense.wire_format import state_message, state_of, tensors_message
from karvan.protocol.values import words

KEYS = 25  # of each table in a lookup
MEMBER = {**TRAINER, "trainers": 0, "elastic": True, "mode": "sync", "staleness": 1}
ASYNC_MEMBER = {**MEMBER, "mode": "async"}


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
            "add_table": lambda: ({"spec": spec_of("t")}, []),
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
            "restore": lambda: (
                {"tables": {n: {"spec": spec_of(n)} for n in DIMS}, "folder": str(folder)},
                [],
            ),
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
            self.call("add_table", {"spec": spec_of(name)})
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
        head |= {"rules": {"t": rule_of("adagrad"), "u": rule_of("sgd")}, "steps": dict.fromkeys(DIMS, 1)}
        head |= {"skipped": [], "complete": True, "wire": "float32", "done": batches, **more}
        return head, [np.full(KEYS * sum(DIMS.values()), 1e-3, np.float32) for _ in batches]

    def _lookup(self):
        head = {"tables": list(DIMS), "training": True, "step": 3, "now": 1.0}
        return head, [array for _ in DIMS for array in (np.arange(KEYS), np.ones(KEYS, np.uint32))]

    def _apply(self):
        head = {"rules": {"u": rule_of("sgd")}, "steps": {"u": 1}, "numbers": {"u": 2}}
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
        return {**head, "tables": dict.fromkeys(DIMS, told), "writers": 2}, []

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
        state = state_of(self._state)
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
