"""Random histories of a ledger, compared with a list of all records."""

import json
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_helpers import every_record, lease_of, release

from karvan.work.ledger import Ledger, NoTask, TaskFailure
from karvan.work.task import TaskLease, WorkSpec


class LedgerMachine(RuleBasedStateMachine):
    """Holders that work, die, fail and report late, masters that restart, and a list of all records."""

    holders = st.sampled_from("abc")
    chances = st.randoms(use_true_random=False)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.parts = (("x", 9), ("y", 4))
        self.done = Counter()  # by epoch and record
        self.live = {}  # leases by token
        self.ended = []  # tokens
        self.saved = None
        self.ledger = None
        self.restart()

    @rule()
    def restart(self):
        if self.ledger is not None:
            self.ledger.close()
        self.ledger = Ledger(
            Path(self.folder.name) / "ledger.db", WorkSpec(self.parts, 4, 2, epochs=2, most_tries=10**6)
        )

    @rule(holder=holders)
    def lease(self, holder):
        lease = lease_of(self.ledger, holder)
        if isinstance(lease, NoTask):
            left = sum(lease.task.left for lease in self.live.values())
            assert (lease is NoTask.DONE) == (self.done.total() == 26)
            assert lease is NoTask.DONE or left
            return
        assert lease.token > max([*self.live, *self.ended], default=0)
        epoch_before = sum(count for (epoch, *_), count in self.done.items() if epoch < lease.task.epoch)
        assert epoch_before == 13 * lease.task.epoch
        assert not any(self.key(each.task) == self.key(lease.task) for each in self.live.values())
        self.live[lease.token] = lease

    @staticmethod
    def key(task):
        return task.epoch, task.number

    @precondition(lambda self: self.live)
    @rule(chance=chances)
    def acknowledge(self, chance):
        token = chance.choice(sorted(self.live))
        lease = self.live[token]
        done = chance.randint(lease.task.done, lease.task.records)
        assert self.ledger.acknowledge({token: done}) == []
        for i in range(lease.task.done, done):
            self.done[lease.task.epoch, lease.task.path, lease.task.first + i] += 1
        if done == lease.task.records:
            self.end(token)
        else:
            self.live[token] = TaskLease(token, lease.holder, lease.task._replace(done=done))

    def end(self, token):
        self.ended.append(token)
        return self.live.pop(token)

    @rule(holder=holders)
    def die(self, holder):
        mine = [token for token, lease in self.live.items() if lease.holder == holder]
        assert sorted(map(self.key, release(self.ledger, holder))) == sorted(
            self.key(self.end(token).task) for token in mine
        )

    @precondition(lambda self: self.live)
    @rule(chance=chances)
    def fail(self, chance):
        token = chance.choice(sorted(self.live))
        assert self.ledger.fail(token, "some error").failure is None
        self.end(token)

    @precondition(lambda self: self.ended)
    @rule(chance=chances)
    def report_late(self, chance):
        token = chance.choice(self.ended)
        assert self.ledger.acknowledge({token: 1}) == [token]
        assert self.ledger.fail(token, "late") == TaskFailure()
        self.ledger.give_back([token])

    @rule()
    def save(self):
        self.saved = json.dumps(self.ledger.state_dict()), self.done.copy()

    @precondition(lambda self: self.saved)
    @rule()
    def roll_back(self):
        state, done = self.saved
        self.ledger.load_state_dict(json.loads(state))
        for token in list(self.live):
            self.end(token)
        self.done = done.copy()

    @invariant()
    def what_is_done_is_done_once(self):
        assert max(self.done.values(), default=0) <= 1
        assert self.ledger.position.records == self.done.total()
        assert sorted(lease.token for lease in self.ledger.leases) == sorted(self.live)
        assert all(self.live[lease.token] == lease for lease in self.ledger.leases)

    def teardown(self):
        for token in list(self.live):
            self.ledger.give_back([token])
        while (lease := lease_of(self.ledger, "last")) is not NoTask.DONE:
            task = lease.task
            self.done.update((task.epoch, task.path, task.first + i) for i in range(task.done, task.records))
            self.ledger.acknowledge({lease.token: task.records})
        assert self.done == every_record(2, self.parts)
        self.ledger.close()
        self.folder.cleanup()


TestLedgerMachine = LedgerMachine.TestCase
