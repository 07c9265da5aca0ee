"""Members of an elastic run that train an engine, micro-batch by micro-batch.

`python elastic_trainers.py ADDRESSES RUN MEMBER MODE` is a member of its own: it stages a micro-batch of step
1, says so, and waits to be killed.
"""

import sys
import time

import numpy as np
import torch
from sharded_programs import FEATURES, global_batch, loss_of, optimizer_of, part_of

import karvan as kv
from karvan.distributed.connection import Connection, ConnectionSettings
from karvan.job.environment import MODES
from karvan.store.remote.store import RemoteStore


def connection_of(addresses, run, member, mode="sync", workers=None, **options):
    """A member's connection, as a trainer of an elastic job makes it."""
    options = {"mode": MODES[mode], "staleness": MODES[mode].default_staleness, **options}
    made = Connection(ConnectionSettings(kind="remote", elastic=True, run=run, member=member, **options))
    made.reach(addresses, workers)
    return made


class ElasticTrainer:
    """An engine and its optimizer in one member, or in memory."""

    def __init__(self, connection=None, optimizer="adam", features=FEATURES):
        self.connection = connection
        self.store = kv.store.MemoryStore() if connection is None else RemoteStore(connection)
        self.engine = kv.EmbeddingEngine(
            {n: make() for n, make in features.items()}, seed=3, store=self.store
        )
        self.sparse = optimizer_of(optimizer, self.engine)
        self.used = list(features)

    @property
    def commits(self):
        return self.connection.servers.commits

    def backward(self, step, number):
        """The gradients of micro-batch `number` of a step, whose forward counts as this step's."""
        self.engine.step = step - 1
        for handle in self.engine.tables():
            self.sparse.state[handle.anchor]["step"] = step - 1
        batch = part_of(global_batch(100 * step + number, 6), 0, 1)
        loss_of(self.engine(batch), self.used, 1.0).backward()

    def stage(self, step, number):
        """Stage a micro-batch; returns its part."""
        self.commits.begin_step(step)
        self.backward(step, number)
        self.sparse.step()
        return self.commits.staged(step)[-1]

    def rows(self):
        """All tables, by key."""
        tables = {}
        for handle in self.engine.tables():
            columns = handle.snapshot()
            order = np.argsort(columns[0])
            tables[handle.name] = [column[order].tolist() for column in columns]
        return tables

    def close(self):
        self.connection.close()


def in_memory(steps, batches, optimizer="adam"):
    """What one process has after these steps, each of so many micro-batches."""
    trainer = ElasticTrainer(optimizer=optimizer)
    for step in range(1, steps + 1):
        for number in range(batches):
            trainer.backward(step, number)
        trainer.sparse.step()
    return trainer.rows()


def _stage_and_wait(addresses, run, member, mode):
    torch.set_num_threads(1)
    trainer = ElasticTrainer(connection_of(addresses.split(","), run, int(member), mode))
    staged = trainer.stage(1, int(member))
    staged.wait()
    print(f"staged {staged.sequence}", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    _stage_and_wait(*sys.argv[1:])
