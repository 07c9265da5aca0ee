"""What the host knows of numbers on a device: bounds that never fall below the truth."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.store.cuda.arena import Bound
from karvan.store.cuda.launch import Counters
from karvan.store.cuda.store import CudaStore


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1), st.integers(0, 3)), max_size=30))
def test_a_bound_is_never_below_the_number(lookups):
    """A lookup has positions, of which a part are new keys; the host reads the number some lookups later."""
    bound, number, history, log = Bound(1), 1, [1], []
    for time, (positions, share, delay) in enumerate(lookups, 1):
        number += int(positions * share)
        history.append(number)
        log.append((time, positions))
        read = max(0, time - delay)
        bound.learn(history[read] if read else 0, read)  # before the first copy arrives, nothing is known
        assert bound.known + sum(count for at, count in log if at > bound.time) >= number


def test_what_was_read_before_a_restart_is_ignored():
    bound = Bound()
    bound.learn(7, 3)
    bound.restart(2, 4, 6)
    bound.learn(1, 5)
    assert (bound.known, bound.time) == (2, 4)
    bound.learn(3, 6)
    assert (bound.known, bound.time) == (3, 6)


class LateCounters(Counters):
    """Counters as a device has them that is `delay` copies behind the host, which may wait for it."""

    delay = 2
    waits = 0

    def __init__(self, device, size):
        super().__init__(device, size)
        self._late = []

    def request(self):
        self.time += 1
        self._late.append((self.time, self.values.numpy().copy()))
        return self.time

    def poll(self):
        while self._late and self._late[0][0] <= self.time - self.delay:
            self.known_time, self._known = self._late.pop(0)
        return self._known

    def request_if_idle(self):
        self.request()

    def catch_up(self):
        type(self).waits += 1
        while self._late:
            self.known_time, self._known = self._late.pop(0)

    def read(self):
        self.request()
        self.catch_up()
        return self._known

    def resize(self, size):
        super().resize(size)
        self._late.clear()


def late_engine(monkeypatch, tables, delay):
    monkeypatch.setattr(LateCounters, "delay", delay)
    monkeypatch.setattr(LateCounters, "waits", 0)
    monkeypatch.setattr("karvan.store.cuda.table_memory.Counters", LateCounters)
    monkeypatch.setattr("karvan.store.cuda.arena._CHUNK_BYTES", 1)  # the least rows in each
    engine = kv.EmbeddingEngine(tables, store=CudaStore("cpu"))
    return engine, kv.optim.SGD(engine, lr=0.1)


def take_step(engine, optimizer, batch):
    sum(out.sum() for out in engine(batch).values()).backward()
    optimizer.step()


def test_steps_with_known_keys_do_not_wait_for_a_device_that_is_behind(monkeypatch):
    tables = {"user": kv.Table(4), "item": kv.Table(4), "site": kv.Table(2)}
    engine, optimizer = late_engine(monkeypatch, tables, delay=2)
    batches = [{name: torch.arange(n, n + 70) for name in tables} for n in (0, 20, 40)]
    for batch in batches * 2:
        take_step(engine, optimizer, batch)
    LateCounters.waits = 0
    for batch in batches * 3:
        take_step(engine, optimizer, batch)
    assert LateCounters.waits == 0


@pytest.mark.parametrize("delay", [1, 5])
def test_new_keys_get_rows_however_far_the_device_is_behind(monkeypatch, delay):
    tables = {"user": kv.Table(4), "item": kv.Table(4)}
    engine, optimizer = late_engine(monkeypatch, tables, delay)
    rng = np.random.default_rng(delay)
    seen = {name: set() for name in tables}
    for step in range(6):
        batch = {name: torch.from_numpy(rng.integers(0, 200 * (step + 1), 150)) for name in tables}
        take_step(engine, optimizer, batch)
        for name, ids in batch.items():
            seen[name] |= set(ids.tolist())
    for name, keys in seen.items():
        assert set(engine.table(name).snapshot().keys.tolist()) == keys
