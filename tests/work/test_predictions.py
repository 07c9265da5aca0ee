"""Predictions in the ledger: every record is done once in each, and no return to a checkpoint undoes one."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from karvan.protocol.master import BEGIN_PREDICTION, LEASE_TASKS
from karvan.wire import Client, Server
from karvan.work.ledger import Ledger, NoTask
from karvan.work.service import WorkService
from karvan.work.task import NO_WORK, TaskKind, WorkSpec

PARTS = (("x", 9), ("empty", 0), ("y", 4))
TRAINED = WorkSpec((("f", 6),), 3, epochs=None)
PREDICT = (TaskKind.PREDICT,)


class PredictionMachine(RuleBasedStateMachine):
    """Trainers that predict and train, die and close early, masters that restart, and a list of records."""

    holders = st.sampled_from("abc")
    chances = st.randoms(use_true_random=False)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.db"
        self.ledger = Ledger(self.path, TRAINED)
        self.number = 0
        self.done = Counter()  # by number, path and record
        self.live = {}  # leases by token
        self.ended = []
        self.saved = self.ledger.state_dict()

    def complete(self):
        return sum(count for (number, *_), count in self.done.items() if number == self.number) == 13

    @rule()
    def restart(self):
        self.ledger.close()
        self.ledger = Ledger(self.path)

    @rule(later=st.integers(0, 2))
    def begin(self, later):
        if later:
            self.end_all()
        self.number += later
        if self.number:
            self.ledger.begin_prediction(self.number, PARTS, 4)

    def end_all(self):
        self.ended += self.live
        self.live = {}

    @precondition(lambda self: self.number)
    @rule(holder=holders, most=st.integers(1, 3))
    def lease(self, holder, most):
        got = self.ledger.lease(holder, PREDICT, most, self.number)
        if isinstance(got, NoTask):
            assert (got is NoTask.DONE) == self.complete()
            return
        for lease in got:
            task = lease.task
            assert task.kind is TaskKind.PREDICT
            assert task.epoch == self.number
            assert not any(each.task.number == task.number for each in self.live.values())
            self.live[lease.token] = lease

    @precondition(lambda self: self.number > 1)
    @rule(holder=holders)
    def one_that_was_started_again_finds_earlier_ones_done(self, holder):
        self.ledger.begin_prediction(self.number - 1, PARTS, 4)
        assert self.ledger.lease(holder, PREDICT, 1, self.number - 1) is NoTask.DONE

    @precondition(lambda self: self.live)
    @rule(chance=chances)
    def acknowledge(self, chance):
        token = chance.choice(sorted(self.live))
        lease = self.live[token]
        count = chance.randint(lease.task.done, lease.task.records)
        assert self.ledger.acknowledge({token: count}) == []
        for i in range(lease.task.done, count):
            self.done[self.number, lease.task.path, lease.task.first + i] += 1
        if count == lease.task.records:
            self.ended.append(token)
            del self.live[token]
        else:
            self.live[token] = lease._replace(task=lease.task._replace(done=count))

    @precondition(lambda self: self.ended)
    @rule(chance=chances)
    def report_late(self, chance):
        token = chance.choice(self.ended)
        assert self.ledger.acknowledge({token: 1}) == [token]

    @rule(holder=holders)
    def die_or_close(self, holder):
        mine = [token for token, lease in self.live.items() if lease.holder == holder]
        self.ledger.give_back(mine)
        for token in mine:
            self.ended.append(token)
            del self.live[token]

    @rule(holder=holders)
    def train(self, holder):
        got = self.ledger.lease(holder, (TaskKind.TRAIN,))
        assert isinstance(got, NoTask) or got[0].task.path == "f"
        if not isinstance(got, NoTask):
            self.ledger.acknowledge({got[0].token: got[0].task.records})

    @rule()
    def save(self):
        self.saved = json.loads(json.dumps(self.ledger.state_dict()))
        assert all(fields[0] == "train" for fields in self.saved["tasks"])

    @rule(reset=st.booleans())
    def roll_back(self, reset):
        if reset:
            self.ledger.reset()
        else:
            self.ledger.load_state_dict(self.saved)
        self.end_all()

    @invariant()
    def what_is_done_is_done_once(self):
        assert max(self.done.values(), default=0) <= 1
        found = {each.token: each for each in self.ledger.leases if each.task.kind is TaskKind.PREDICT}
        assert found == self.live

    def teardown(self):
        if self.number:
            self.ledger.give_back(list(self.live))
            while (got := self.ledger.lease("last", PREDICT, 9, self.number)) is not NoTask.DONE:
                for token, _, task in got:
                    numbers = range(task.first + task.done, task.first + task.records)
                    self.done.update((self.number, task.path, number) for number in numbers)
                    self.ledger.acknowledge({token: task.records})
            mine = {key[1:]: count for key, count in self.done.items() if key[0] == self.number}
            assert mine == {(path, number): 1 for path, records in PARTS for number in range(records)}
        self.ledger.close()
        self.folder.cleanup()


TestPredictionMachine = PredictionMachine.TestCase


class FakeTime:
    seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def served(tmp_path):
    now = FakeTime()
    work = WorkService(tmp_path / "ledger.db", now=now)
    now.seconds += 60  # the master was not restarted just now
    server = Server(work, "127.0.0.1")
    with Client("master", server.address) as client:
        yield work, client, now
    server.close()
    work.close()


def begin(client, number, holder):
    head = {"holder": holder, "prediction": number, "parts": [["x", 9]], "records_per_task": 4}
    return client.call(BEGIN_PREDICTION, head).head.begun


def lease(client, number, holder, most=1):
    head = {"holder": holder, "last_token": 10**6, "kinds": ["predict"], "most": most, "epoch": number}
    got = client.call(LEASE_TASKS, head).head
    return got.answer, {each.token: each.task["records"] for each in got.leases}


def acknowledge(client, done, holder):
    client.call("acknowledge_records", {"holder": holder, "done": list(done.items())})


def test_a_prediction_needs_no_training_data_and_training_may_follow(served, tmp_path):
    work, client, _ = served
    assert begin(client, 1, "a")
    assert work.ledger.spec == NO_WORK
    assert work.progress()["to_predict"] == 9
    acknowledge(client, lease(client, 1, "a", 3)[1], "a")
    assert lease(client, 1, "a") == ("done", {})
    work.ledger.change_settings(TRAINED)
    work.ledger.close()
    ledger = Ledger(tmp_path / "ledger.db")
    assert ledger.spec == TRAINED
    assert ledger.lease("a")[0].task.records == 3
    ledger.close()


def test_the_next_prediction_begins_when_nobody_is_in_the_one_before(served):
    _work, client, now = served
    assert begin(client, 1, "a")
    assert begin(client, 1, "b")
    held = lease(client, 1, "a")[1]
    assert lease(client, 1, "b")[0] == "tasks"
    client.call("give_back_tasks", {"holder": "b", "tokens": [2, 3, 4, 5]})
    now.seconds += 60
    assert not begin(client, 2, "b")  # "a" has a task, however long it takes
    acknowledge(client, held, "a")
    assert lease(client, 1, "a", 9)[0] == "tasks"
    client.call("give_back_tasks", {"holder": "a", "tokens": list(range(1, 20))})
    assert not begin(client, 2, "b")  # "a" may ask for the next one
    assert begin(client, 2, "a")  # it asks for the next prediction instead, and all have left the one before
    assert begin(client, 2, "b")
    assert lease(client, 1, "b") == ("done", {})


def test_a_process_that_dies_leaves_its_prediction_tasks_and_only_these(served):
    work, client, now = served
    dead, other = "trainer-0 process a", "trainer-1 process b"
    assert begin(client, 1, dead)
    client.call("open_work", {"spec": {**TRAINED.settings(), "parts": [["f", 6]]}})
    head = {"holder": dead, "last_token": 10**6, "kinds": ["train"], "most": 1}
    assert client.call(LEASE_TASKS, head).head.answer == "tasks"
    lease(client, 1, dead)
    assert not work.release_predictions(dead)  # nobody else predicts
    assert [each.task.kind for each in work.ledger.leases_of(dead)] == [TaskKind.TRAIN]
    assert begin(client, 1, other)
    assert work.release_predictions(dead)
    now.seconds += 60
    assert not work.release_predictions(dead)  # the other one is silent, and has no task
    assert lease(client, 1, other)[0] == "tasks"
    now.seconds += 60
    assert work.release_predictions(dead)


def test_a_job_that_is_launched_again_predicts_again(served):
    work, client, _ = served
    begin(client, 1, "a")
    acknowledge(client, lease(client, 1, "a", 3)[1], "a")
    work.forget_predictions()
    assert begin(client, 1, "a")
    assert lease(client, 1, "a")[0] == "tasks"


def test_a_holder_that_hangs_loses_its_prediction_tasks_even_if_others_watch_its_steps(served):
    work, client, now = served
    begin(client, 1, "a")
    lease(client, 1, "a")
    now.seconds += 1000
    assert [each.task.kind for each in work.overdue(lambda holder: True)] == [TaskKind.PREDICT]
    assert lease(client, 1, "b", 9)[0] == "tasks"
