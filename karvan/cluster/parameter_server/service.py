"""The parameter server: holds a range of the key hashes of every table.

A run is one start of all trainers of a job; the generation counts how often the job went back to a
checkpoint. A newer generation starts with empty tables, because its trainers load them from a checkpoint;
calls of an older one are refused. A new run of the same generation finds the rows of the run before, and the
dense parameters (`dense_parameters.py`) of trainers in mode async.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from karvan.checkpoint import Checkpoint, DamagedCheckpointError
from karvan.checkpoint.recovery import resume
from karvan.cluster.parameter_server.batches import Batches, FixedBatches
from karvan.cluster.parameter_server.checkpointing import Restored, Saving, ServerFolder, UpdateCounts
from karvan.cluster.parameter_server.dense_parameters import DenseService, settings_of
from karvan.cluster.parameter_server.elastic_batches import ElasticBatches, OwnStepBatches
from karvan.cluster.parameter_server.row_updates import (
    BarrierUpdates,
    JointUpdates,
    RowUpdates,
    ServerTables,
    SingleUpdates,
)
from karvan.cluster.role_process import OLDER_RUN, Generations, RoleSettings, RunService, generations_of
from karvan.errors import is_out_of_memory, is_temporary, mark
from karvan.job.checkpoint_url import local_path
from karvan.job.environment import MODES
from karvan.protocol import parameter_server as protocol
from karvan.protocol.values import DeclaredTable
from karvan.wire import Caller, Endpoint, Message, RefusedError, Request, Service, endpoints
from karvan.wire.schema import Struct

_log = logging.getLogger("karvan.cluster")


class ParameterServer(RunService):
    """Server number `index` of `count`, which saves only below the folder `checkpoints`.

    capacity: how many rows its tables have together at most; see `MemoryStore`.
    """

    hello = Struct(protocol.ServerHello)

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        generations: Generations | None = None,
        capacity: int | None = None,
    ) -> None:
        super().__init__(generations)
        if capacity is not None and capacity < 1:
            raise ValueError(f"A parameter server needs a capacity of at least 1 row, got {capacity}.")
        self._capacity = capacity
        self.name = f"parameter server {index}"
        self._folder = ServerFolder(self.name, checkpoints)
        self._index = index
        self._count = count
        self._fill_lock = threading.Lock()
        self._begin()
        self.endpoints = endpoints(
            protocol.SERVER_CALLS,
            *(Endpoint(call, partial(self._do, name)) for name, call in protocol.SERVER_CALLS.items()),
        )

    def _begin(self) -> None:
        self._tables = ServerTables(self._index, self._count, self._capacity)
        self._saving = Saving(self._tables)
        self._newest: Batches | None = None  # those of the current run
        self._filled: tuple[Any, ...] | None = None  # what the tables were filled with, of one checkpoint
        self._dense = DenseService()

    @property
    def _batches(self) -> Batches:
        assert self._newest is not None  # there are no calls before a hello
        return self._newest

    def _methods(self) -> dict[str, Callable[[Request], Message[Any] | None]]:
        """The method of each call, in the current run of the current generation."""
        methods: list[Endpoint[Any]] = [
            *self._tables.endpoints,
            *self._dense.endpoints,
            *self._batches.endpoints,  # in mode async one of the dense ones is another
            Endpoint(protocol.CAPTURE, self._capture),
            Endpoint(protocol.SAVE, self._save),
            Endpoint(protocol.CLOSE_CAPTURE, lambda call: self._saving.close(call.head.capture)),
            Endpoint(protocol.FILL, self._fill),
            Endpoint(protocol.RESTORE, self._restore),
            Endpoint(protocol.UPDATES, self._updates),
            Endpoint(protocol.DESCRIBE, self._describe),
            Endpoint(protocol.CHECK_FOLDER, self._check_folder),
        ]
        return {endpoint.call.name: endpoint.method for endpoint in methods}

    def _do(self, name: str, request: Request) -> Message[Any] | None:
        """Do a call of the current run; callers of an older one are refused."""
        with self._lock:
            hello = request.caller.hello
            if (hello.generation, hello.run) != (self._generation, self._run):
                raise RefusedError(OLDER_RUN)
            self._batches.members.expect(hello.trainer)
            method = self._by_name[name]
        try:
            return method(request)
        except OSError as error:
            if is_out_of_memory(error):
                raise
            # Its only disk is that of the job's checkpoints: a save fails then, and not this server.
            raise mark(error, is_temporary(error)) from error.__cause__

    @override
    def welcome(self, caller: Caller) -> dict[str, Any]:
        hello = caller.hello
        requested = (hello.server, hello.servers)
        if requested != (self._index, self._count):
            raise RefusedError(
                f"expected to be asked for as server {self._index} of {self._count}, "
                f"got {requested[0]} of {requested[1]}."
            )
        protocol.expect_trainer(hello)
        settings_of(hello)  # which must be valid before anything ends
        self._enter(hello)
        return {"server": self._index, "generation": self._generation}

    @override
    def _begin_generation(self, generation: int) -> None:
        if self._generation >= 0:
            _log.info("%s starts generation %d with empty tables.", self.name, generation)
        self._end("the job has gone back to a checkpoint")
        self._begin()

    @override
    def _begin_run(self, hello: protocol.ServerHello) -> None:
        batches = self._make_batches(hello)
        self._end("the job's trainers have restarted")
        self._newest = batches
        self._dense.begin(settings_of(hello))
        self._by_name = self._methods()

    @override
    def _admit(self, hello: protocol.ServerHello) -> None:
        self._batches.check_run(hello)
        self._dense.check(settings_of(hello))

    def _make_batches(self, hello: protocol.ServerHello) -> Batches:
        """The batches of a run, with the strategies that its mode asks for."""
        mode = MODES[hello.mode]
        kind: type[RowUpdates] = SingleUpdates
        if mode.joint_rows and (hello.elastic or hello.trainers > 1):
            kind = JointUpdates if hello.elastic else BarrierUpdates
        rows = kind(self._tables, hello)
        if not hello.elastic:
            return FixedBatches(rows, hello)
        own_steps = mode.dense_on_servers
        elastic = OwnStepBatches(rows, hello, self._dense) if own_steps else ElasticBatches(rows, hello)
        elastic.on_abandon = self._saving.close_all  # another trainer saves next, and a table has one capture
        return elastic

    def _end(self, reason: str) -> None:
        if self._newest is not None:
            self._newest.end(reason)
        self._saving.close_all()

    def _capture(self, call: Request[protocol.CaptureHead]) -> None:
        head = call.head
        self._tables.check_tables(head.tables)
        self._batches.count_used(head.store, head.used)
        with self._batches.between_steps():
            updates = self._batches.updates.record(head.store)
            self._saving.capture(head, updates, self._batches.log, call.caller.hello.trainer)

    def _save(self, call: Request[protocol.Save]) -> Message:
        head = call.head
        number, tables = head.capture, head.tables
        self._tables.check_tables(list(tables))
        folder = self._folder.target(head.folder, tables)
        if self._batches.restored is not None:
            self._saving.replace_lost(number, tables, head.store, self._batches.restored)
        return Message({"shares": self._saving.save(number, folder, tables, head.writers)})

    def _check_folder(self, call: Request[protocol.Folder]) -> None:
        """Whether a run's checkpoints can be saved there; checked before training starts."""
        self._folder.check(call.head.folder)

    def _fill(self, call: Request[protocol.Fill]) -> Message:
        path, tables = local_path(call.head.path), call.head.tables
        for table, request in tables.items():
            self._tables.check_state(table, request["initial"])
        try:
            with self._fill_lock:
                if not self._is_filled(call):
                    self._filled = None
                    self._saving.fill(path, tables)
                    self._filled = self._filling(call)
        except DamagedCheckpointError as error:  # trainers decide together which one to load instead
            return Message({"damaged": [[error.path[-8192:], error.problem[:8192]]]})
        return Message({"damaged": []})

    def _is_filled(self, call: Request[protocol.Fill]) -> bool:
        """Whether another member of an elastic run has filled the tables, and they are as they were then.

        One that was started again loads what the others have loaded, who use the rows meanwhile.
        """
        if not call.caller.hello.elastic or self._filled is None:
            return False
        (*content, member), (*before, other) = self._filling(call), self._filled
        return content == before and member != other

    def _filling(self, call: Request[protocol.Fill]) -> tuple[Any, ...]:
        """What a call fills tables with, how many pushes of the run came before, and whose call it is."""
        path, hello = local_path(call.head.path), call.caller.hello
        checkpoint, pushes = Checkpoint(path).manifest.id, self._batches.pushes
        return self._run, path, checkpoint, call.head.tables, pushes, hello.trainer

    def _restore(self, call: Request[protocol.Restore]) -> None:
        """This server replaces a lost one: load its rows from the newest checkpoint, once.

        unless_tables: only if this server has no tables, for a caller that does not know whether it was lost.
        """
        folder = self._folder.check(call.head.folder)
        with self._lock:
            batches = self._batches
            has_tables = bool(self._tables.specs) and call.head.unless_tables
            if batches.restored is None and not has_tables:
                batches.restored = self._restore_saved(call.head.tables, folder)
                # A copy: these grow, and a save may need those of the checkpoint later.
                batches.updates = self._updates_of(batches.restored.checkpoint)

    def _updates(self, call: Request[protocol.OfStore]) -> Message:
        """How many updates of each trainer the tables of a store contain."""
        return Message({"trainers": self._batches.updates.of(call.head.store)})

    def _updates_of(self, checkpoint: Checkpoint | None) -> UpdateCounts:
        counts = UpdateCounts(self._run)
        if checkpoint is not None:
            counts.restore(checkpoint.manifest, self._index, self._count)
        return counts

    def _restore_saved(self, tables: Mapping[str, DeclaredTable], folder: Path) -> Restored:
        for name, declared in tables.items():
            self._tables.add(declared.spec)
            if declared.initial is not None:
                self._tables.set_state(name, declared.initial, fresh=False)

        empty: dict[str, dict[str, Any]] = {
            name: {"keep": False, "initial": declared.initial or [], "extra": True}
            for name, declared in tables.items()
        }

        def fill(newest: Checkpoint) -> dict[str, dict[str, Any]]:
            saved = newest.manifest.tables
            filled = dict(empty)
            for name, declared in tables.items():
                if name in saved:
                    keep = saved[name].optimizer is not None and declared.initial is not None
                    filled[name] = {**empty[name], "keep": keep}
                # A newer, damaged one may have loaded some of its rows.
                self._tables.store.table(name).clear()
            self._saving.fill(newest.path, {name: filled[name] for name in tables if name in saved})
            return filled

        # Trainers rename damaged checkpoints when they resume.
        resumed = resume(folder, fill, rename=False)
        if resumed is None:
            _log.warning("%s is restarted without rows: nothing was saved yet.", self.name)
            return Restored(None, empty, self._updates_of(None))
        newest, filled = resumed
        _log.warning("%s is restarted with the rows of step %d.", self.name, newest.step)
        return Restored(newest, filled, self._updates_of(newest))

    def _describe(self, call: Request) -> Message:
        """What it holds and has done, for monitoring and benchmarks."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        batches = self._batches
        return Message(
            {
                "tables": {name: self._tables.store.table(name).stats() for name in self._tables.specs},
                "pulls": batches.pulls,
                "pushes": batches.pushes,
                "keys": batches.keys,
                "dense": self._dense.describe(),
                "cpu_seconds": used.ru_utime + used.ru_stime,
            }
        )


def make(settings: RoleSettings) -> Service:
    """The server of a process; see `karvan/cluster/role_process.py`."""
    job = settings.job
    return ParameterServer(
        job.index,
        job.count,
        checkpoints=job.checkpoints,
        generations=generations_of(settings),
        capacity=job.capacity,
    )
