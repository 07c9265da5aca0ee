"""Lookups in flight against a slow model: lookups, training, withdrawals, captures and rollbacks.

The model is the definition of docs/hybrid.md: a checkpoint has the rows and counts that a replay of the
trained batches makes, in the order of their lookups.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan import _native
from karvan.store import LookupContext, MemoryStore, Rows
from karvan.store.messages import words
from karvan.store.row_owner import Owner

KEYS = 12
MIN_COUNT = 3
ADMISSIONS = {
    "always": kv.admission.Always(),
    "min_count": kv.admission.MinCount(MIN_COUNT, slots=1 << 16),
    "probability": kv.admission.Probability(0.5),
    "probability_each": kv.admission.Probability(0.5, each=True),
}


@dataclass
class Batch:
    uses: dict[int, int]
    step: int
    trained: bool = False
    plan: object = None
    answered: object = field(default=None, repr=False)  # its plan points into it


class Server:
    """A server's table, with trainers that look up ahead."""

    def __init__(self, trainers, admit, evict=None):
        self.spec = kv.Table(2, admit=ADMISSIONS[admit], **({} if evict is None else {"evict": evict})).spec(
            "t", 0, 4
        )
        self.admit = admit
        self.ahead = [[] for _ in range(trainers)]
        self.history = []
        self.clock = 0
        self.start()

    def start(self):
        self.store, self.log = MemoryStore(), _native.LookupLog()
        self.store.add_table(self.spec)
        self.owner = Owner(self.store)

    def look_up(self, trainer, uses):
        if len(self.ahead[trainer]) == 4:
            return
        self.clock += 1
        message = np.zeros(words(len(uses)), np.int64)
        message[: len(uses)] = list(uses)
        message[len(uses) :].view(np.uint32)[: len(uses)] = list(uses.values())
        answered = self.owner.lookup(
            ["t"], [[len(uses)]], [message], LookupContext(True, self.clock), log=self.log
        )
        batch = Batch(uses, self.clock, plan=answered.plan.native, answered=answered)
        self.ahead[trainer].append(batch)
        self.history.append(batch)

    def train(self, trainer):
        if self.ahead[trainer]:
            batch = self.ahead[trainer].pop(0)
            batch.trained = True
            self.log.trained(batch.plan)

    def withdraw(self, trainer):
        self.log.withdraw([batch.plan for batch in self.ahead[trainer]])
        self.history = [one for one in self.history if all(one is not each for each in self.ahead[trainer])]
        self.ahead[trainer] = []

    def capture(self):
        capture = self.store.capture(["t"], {"t": 2}, log=self.log)
        parts = [capture.part("t", part) for part in range(2)]
        capture.close()
        return Rows(*map(np.concatenate, zip(*parts, strict=True))), self.store.table("t").extra(self.log)

    def roll_back(self):
        """A new server that has the rows of a capture; the trainers look up again what was in flight."""
        rows, extra = self.capture()
        self.start()
        self.store.table("t").load(rows)
        self.store.table("t").load_extra(extra)
        again = [[batch.uses for batch in mine] for mine in self.ahead]
        self.history = [batch for batch in self.history if batch.trained]
        self.ahead = [[] for _ in self.ahead]
        for trainer, listed in enumerate(again):
            for uses in listed:
                self.look_up(trainer, uses)

    def expected(self, everything=False):
        """By the definition: counts and last uses of the keys that have a row."""
        rows, seen = {}, {}
        for batch in self.history:
            if not batch.trained and not everything:
                continue
            for key, times in batch.uses.items():
                if key not in rows:
                    seen[key] = seen.get(key, 0) + times
                    if not self.admits(key, seen[key], batch.step):
                        continue
                rows[key] = (rows.get(key, (0, 0))[0] + times, batch.step)
        return rows

    def admits(self, key, seen, step):
        if self.admit.startswith("probability"):  # by the key alone, or with the step
            chosen = MemoryStore()
            chosen.add_table(self.spec)
            one = np.array([key]), np.array([1], np.uint32)
            chosen.lookup({"t": one}, LookupContext(True, step))
            return chosen.table("t").stats()["rows"] == 1
        return self.admit == "always" or seen >= MIN_COUNT


def as_uses(rows):
    columns = (rows.keys.tolist(), rows.counts.tolist(), rows.last_steps.tolist())
    return {key: (count, last) for key, count, last in zip(*columns, strict=True)}


USES = st.dictionaries(st.integers(0, KEYS - 1), st.integers(1, 3), min_size=1, max_size=6)
TRAINER = st.integers(0, 2)
STEP = st.one_of(
    st.tuples(st.just("look_up"), TRAINER, USES),
    st.tuples(st.just("look_up"), TRAINER, USES),
    st.tuples(st.just("train"), TRAINER),
    st.tuples(st.just("train"), TRAINER),
    st.tuples(st.just("withdraw"), TRAINER),
    st.tuples(st.just("capture")),
    st.tuples(st.just("roll_back")),
)


@pytest.mark.parametrize("admit", list(ADMISSIONS))
@given(trainers=st.integers(1, 3), steps=st.lists(STEP, max_size=40))
def test_captures_are_what_trained_batches_make(admit, trainers, steps):
    server = Server(trainers, admit)
    for name, *arguments in steps:
        if arguments:
            arguments[0] %= trainers
        if name == "capture":
            assert as_uses(server.capture()[0]) == server.expected()
        else:
            getattr(server, name)(*arguments)
        if name in ("withdraw", "roll_back"):
            assert as_uses(server.store.table("t").snapshot()) == server.expected(everything=True)
    assert as_uses(server.capture()[0]) == server.expected()
    for trainer in range(trainers):
        while server.ahead[trainer]:
            server.train(trainer)
    assert len(server.log) == 0
    assert as_uses(server.store.table("t").snapshot()) == server.expected()


@pytest.mark.parametrize("evict", [kv.eviction.LRU(6), kv.eviction.LFU(6), kv.eviction.Age(3)], ids=str)
@given(trainers=st.integers(1, 3), steps=st.lists(STEP, max_size=40))
def test_captures_of_tables_that_evict_have_no_use_that_was_not_trained(evict, trainers, steps):
    """Rows that lookups in flight have evicted are missing; no key has more uses than were trained."""
    server = Server(trainers, "always", evict)
    for name, *arguments in steps:
        if arguments:
            arguments[0] %= trainers
        getattr(server, name)(*arguments)
        trained = server.expected()
        for key, (count, last) in as_uses(server.capture()[0]).items():
            assert count <= trained[key][0]
            assert last in {batch.step for batch in server.history if batch.trained and key in batch.uses}
