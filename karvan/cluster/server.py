"""The parameter server: holds a range of the key hashes of every table.

Trainers come in runs: a run is one start of all trainers of a job, a generation counts how often the job went
back to a checkpoint. A newer generation begins with empty tables, because its trainers load them from a
checkpoint; calls of an older one are refused. A new run of the same generation finds the rows of the one
before, and the dense parameters (`dense_service.py`) of trainers in mode async.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from karvan.checkpoint import Checkpoints
from karvan.cluster.batches import Batches
from karvan.cluster.dense_service import DenseService, settings_of
from karvan.cluster.role import Settings
from karvan.cluster.saving import Saving
from karvan.cluster.server_folder import ServerFolder
from karvan.store import MemoryStore, Push, Rows, TableSpec
from karvan.store.owner import Owner
from karvan.store.wording import rule_from_json, spec_from_json
from karvan.wire import Caller, Message, RefusedError, Service
from karvan.wire.kinds import Plain

_log = logging.getLogger("karvan.cluster")


class ParameterServer(Service):
    """Server number `index` of `count`, which saves below the folder `checkpoints` alone."""

    hello = Plain()

    def __init__(
        self, index: int = 0, count: int = 1, *, checkpoints: str | os.PathLike[str] | None = None
    ) -> None:
        self.name = f"parameter server {index}"
        self._folder = ServerFolder(self.name, checkpoints)
        self._index = index
        self._count = count
        self._lock = threading.Lock()
        self._generation = -1
        self._run = ""
        self._begin()
        self._methods: dict[str, Callable[[Message], Message]] = {
            name: getattr(self, f"_{name}")
            for name in [
                "add_table",
                "set_state",
                "lookup",
                "apply",
                "skip",
                "evict",
                "erase",
                "clear",
                "version",
                "evicted_since",
                "snapshot",
                "load",
                "stats",
                "capture",
                "save",
                "close_capture",
                "fill",
                "restore",
                "describe",
                "check_folder",
            ]
        }

    def _begin(self) -> None:
        self._specs: dict[str, TableSpec] = {}
        self._store = MemoryStore()
        self._owner = Owner(self._store)
        self._saving = Saving(self._store, self._specs, self._index, self._count)
        self._batches: Batches | None = None
        self._dense = DenseService()

    def welcome(self, caller: Caller) -> dict[str, Any]:
        """See `Service.welcome`."""
        hello = caller.hello
        try:
            generation, run = int(hello["generation"]), str(hello["run"])
            trainer, trainers = int(hello["trainer"]), int(hello["trainers"])
            place = (int(hello["server"]), int(hello["servers"]))
        except (KeyError, ValueError, TypeError) as error:
            raise RefusedError("expected a trainer's hello, with its generation, run and number.") from error
        if place != (self._index, self._count):
            raise RefusedError(
                f"expected to be asked for as server {self._index} of {self._count}, "
                f"got {place[0]} of {place[1]}."
            )
        if not 0 <= trainer < trainers:
            raise RefusedError(f"expected a trainer from 0 to {trainers - 1}, got {trainer}.")
        dense = settings_of(hello)
        with self._lock:
            if generation < self._generation:
                raise RefusedError(
                    f"expected generation {self._generation} or a newer one, got {generation}."
                )
            if generation > self._generation:
                if self._generation >= 0:
                    _log.info("%s begins generation %d with empty tables.", self.name, generation)
                self._end("the job has gone back to a checkpoint")
                self._begin()
                self._generation = generation
                self._run = ""
            if run != self._run:
                self._end("the job's trainers have begun anew")
                self._run = run
                self._batches = Batches(self._owner, hello, counts_skips=self._index == 0)
                self._dense.begin(dense)
            self._dense.check(dense)
        return {"server": self._index, "generation": self._generation}

    def _end(self, reason: str) -> None:
        if self._batches is not None:
            self._batches.end(reason)
        self._saving.close_all()

    def answer(self, call: Message, caller: Caller) -> Message:  # type: ignore[misc]
        """See `Service.answer`."""
        with self._lock:
            batches, dense = self._batches, self._dense
            if (caller.hello["generation"], caller.hello["run"]) != (self._generation, self._run):
                raise RefusedError("expected a trainer of the job's newest run, got one of an older.")
        assert batches is not None
        method = call.head.get("method")
        try:
            if method == "pull":
                return batches.pull(call, caller)
            if method == "push":
                return batches.push(call, caller)
            if isinstance(method, str) and method in self._methods:
                return self._methods[method](call)
            if isinstance(method, str) and method in dense.methods:
                return dense.methods[method](call)
        except (KeyError, TypeError, IndexError) as error:
            raise RefusedError(
                f"expected a well-formed call of {method!r}, got one without {error}."
            ) from error
        return super().answer(call, caller)

    def _add_table(self, call: Message) -> Message:
        spec = spec_from_json(call.head["spec"])
        spec = spec.share(self._index, self._count)
        self._store.add_table(spec)
        self._specs[spec.name] = spec
        return Message({})

    def _set_state(self, call: Message) -> Message:
        self._store.set_state(call.head["table"], call.head["initial"], bool(call.head["fresh"]))
        return Message({})

    def _lookup(self, call: Message) -> Message:
        head = call.head
        keys = {
            table: (call.arrays[2 * number], call.arrays[2 * number + 1])
            for number, table in enumerate(head["tables"])
        }
        found = self._store.lookup(
            keys, training=bool(head["training"]), step=int(head["step"]), now=float(head["now"])
        )
        return Message({}, [found[table].vectors for table in head["tables"]])

    def _apply(self, call: Message) -> Message:
        arrays = iter(call.arrays)
        pushes = {
            table: [Push(next(arrays), next(arrays), self._store.version(table)) for _ in range(number)]
            for table, number in call.head["numbers"].items()
        }
        rules = {table: rule_from_json(told) for table, told in call.head["rules"].items()}
        self._store.apply(pushes, rules, {table: int(step) for table, step in call.head["steps"].items()})
        return Message({})

    def _skip(self, call: Message) -> Message:
        self._store.skip(call.head["table"])
        return Message({})

    def _evict(self, call: Message) -> Message:
        head = call.head
        return Message(
            {"rows": self._store.evict(head["table"], step=int(head["step"]), now=float(head["now"]))}
        )

    def _erase(self, call: Message) -> Message:
        return Message({"rows": self._store.erase(call.head["table"], call.arrays[0])})

    def _clear(self, call: Message) -> Message:
        self._store.clear(call.head["table"])
        return Message({})

    def _version(self, call: Message) -> Message:
        return Message({"version": self._store.version(call.head["table"])})

    def _evicted_since(self, call: Message) -> Message:
        return Message({}, [self._store.evicted_since(call.head["table"], int(call.head["version"]))])

    def _snapshot(self, call: Message) -> Message:
        head = call.head
        return Message({}, list(self._store.snapshot(head["table"], int(head["part"]), int(head["parts"]))))

    def _load(self, call: Message) -> Message:
        self._store.load(call.head["table"], Rows(*call.arrays))
        return Message({})

    def _stats(self, call: Message) -> Message:
        return Message({"stats": {table: self._store.stats(table) for table in call.head["tables"]}})

    def _capture(self, call: Message) -> Message:
        head = call.head
        self._saving.capture(
            int(head["capture"]), head["tables"], head["parts"], head["since"], bool(head["track"])
        )
        return Message({})

    def _save(self, call: Message) -> Message:
        head = call.head
        folder = self._folder.target(head["folder"], head["tables"])
        if self._batches is not None and self._batches.restored:
            self._saving.hold(int(head["capture"]), head["tables"])
        return Message({"shares": self._saving.save(int(head["capture"]), folder, head["tables"])})

    def _check_folder(self, call: Message) -> Message:
        """Whether a run's checkpoints can be saved there; asked before training begins."""
        self._folder.check(call.head["folder"])
        return Message({})

    def _close_capture(self, call: Message) -> Message:
        self._saving.close(int(call.head["capture"]))
        return Message({})

    def _fill(self, call: Message) -> Message:
        self._saving.fill(Path(call.head["path"]), call.head["tables"])
        return Message({})

    def _restore(self, call: Message) -> Message:
        """Another process had this place: take its rows as they were saved last, once."""
        folder = self._folder.check(call.head["folder"])
        with self._lock:
            batches = self._batches
            assert batches is not None
            if not batches.restored:
                batches.restored = True
                self._take_saved(call.head["tables"], folder)
        return Message({})

    def _take_saved(self, tables: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        for name, told in tables.items():
            self._add_table(Message({"spec": told["spec"]}))
            if "initial" in told:
                self._store.set_state(name, told["initial"], fresh=False)
        newest = Checkpoints(folder).latest()
        if newest is None:
            _log.warning("%s begins anew without rows: nothing was saved yet.", self.name)
            return
        _log.warning("%s begins anew with the rows of step %d.", self.name, newest.step)
        saved = newest.manifest.tables
        self._saving.fill(
            newest.path,
            {
                name: {
                    "keep": saved[name].optimizer is not None and "initial" in told,
                    "initial": told.get("initial", []),
                    "extra": True,
                }
                for name, told in tables.items()
                if name in saved
            },
        )

    def _describe(self, call: Message) -> Message:
        """What it holds and has done, for people and benchmarks."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        batches = self._batches
        assert batches is not None
        return Message(
            {
                "tables": {name: self._store.stats(name) for name in self._specs},
                "pulls": batches.pulls,
                "pushes": batches.pushes,
                "keys": batches.keys,
                "dense": self._dense.describe(),
                "cpu_seconds": used.ru_utime + used.ru_stime,
            }
        )


def make(settings: Settings) -> Service:
    """The server of a process; see `role.py`."""
    return ParameterServer(settings.index, settings.count, checkpoints=settings.checkpoints)
