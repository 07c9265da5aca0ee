"""Elastic runs in mode async on two servers: a batch counts at both or at none, whenever its member dies.

The random histories have members that train, commit at one server before the other, die at any moment, wake
as zombies while the others settle what they have done, and come over new connections.
"""

import contextlib
import itertools

import numpy as np
import pytest
from dense_helpers import new_state
from elastic_helpers import DIM, Run, spec_of
from few_examples import few_examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import zeros

import karvan as kv
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.dense.wire_format import state_message, tensors_message, tensors_of
from karvan.distributed.parameter_servers import OwnCommits
from karvan.store.messages import hashes_of, owners_of
from karvan.wire import RefusedError, Server

SPEC = spec_of("t", init=kv.init.Constant(0.0))
KEYS = list(range(6))
OWNER = dict(zip(KEYS, owners_of(hashes_of(np.array(KEYS)), 2).tolist(), strict=True))
RATE = 0.5  # of rows and of dense parameters; sums of eighths are exact in any order
EIGHTHS = st.integers(-8, 8).map(lambda n: n / 8)
BATCH = st.tuples(
    st.dictionaries(st.sampled_from(KEYS), st.tuples(*[EIGHTHS] * DIM), min_size=1, max_size=3), EIGHTHS
)


def begin_run(stack, **hello):
    """Two servers with a table and a model of one parameter each."""
    addresses = [stack.enter_context(Server(ParameterServer(index, 2))).address for index in range(2)]
    made = Run(addresses, [SPEC], mode="async", staleness=4, state=0, kind="sgd", **hello)
    run = stack.enter_context(made)
    state = new_state({"w": zeros(2)}, {"name": "SGD", "options": {"lr": RATE}})
    message = state_message(state)
    first = run.member(0)
    for client in first.clients:
        client.call("load_dense_state", {"model": 1, **message.head}, message.arrays)
    first.close()
    return run


def stage(member, number, rows, dense):
    """Stage a batch at both servers; returns its commit."""
    member.pull(number, {"t": dict.fromkeys(rows, 1)})
    member.push(number, [number], [{"t": rows}], step=number)
    for client in member.clients:
        version = client.call("pull_dense", {"model": 1, "version": None}).head["version"]
        message = tensors_message({"w": np.full(2, dense, np.float32)}, version=version)
        head = {**message.head, "model": 1, "step": number, "lr": RATE}
        client.call("stage_dense", head, message.arrays)
    return {
        "member": member.number,
        "step": number,
        "parts": [[member.number, number]],
        "dense": [1],
        "scale": 1.0,
        "counts": {"samples": len(rows)},
        "ack": {"done": number},
    }


def state_of(run_member):
    """The rows that are not zero, the parameter and the tally of each server."""
    rows = {key: tuple(row[0]) for key, row in run_member.rows("t").items() if any(row[0])}
    dense = []
    for client in run_member.clients:
        answer = client.call("pull_dense", {"model": 1, "version": None})
        head = answer.head
        dense.append((head["version"], tensors_of(head["tensors"], answer.arrays)["w"].tolist()))
    return rows, dense, [answer.head.tally for answer in run_member.all("tally", {"meeting": 0})]


class OwnStepStates(RuleBasedStateMachine):
    """The rules."""

    @initialize()
    def begin(self):
        self.stack = contextlib.ExitStack()
        self.run = begin_run(self.stack)
        self.numbers = itertools.count(1)
        self.watcher = self.run.member(next(self.numbers))  # never dies
        self.members = {}  # that train
        self.zombies = {}  # that are taken for dead, with how far the others have settled them
        self.steps = {}  # the last commit of each member, with the servers that have it
        self.applied = [[], []]  # batches, by server
        self.batches = {}  # by member and number
        self.join()

    def teardown(self):
        if hasattr(self, "stack"):
            self.stack.close()

    def send(self, member, servers):
        commit, _ = self.steps[member.number]
        for server in servers:
            member.clients[server].call("commit", commit)
            self.note(commit, server)

    def note(self, commit, server):
        done = self.steps[commit["member"]][1]
        if server not in done:
            done.add(server)
            self.applied[server].append(self.batches[commit["member"], commit["step"]])

    @rule()
    def join(self):
        number = next(self.numbers)
        self.members[number] = self.run.member(number)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def reconnect(self, data):
        number = data.draw(st.sampled_from(sorted(self.members)))
        self.members[number].close()
        self.members[number] = self.run.member(number)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), batch=BATCH, servers=st.sampled_from([[], [0], [1], [0, 1], [1, 0]]))
    def train(self, data, batch, servers):
        """A member trains a batch, and gets as far as these servers with its commit."""
        number = data.draw(st.sampled_from(sorted(self.members)))
        member = self.members[number]
        if number in self.steps:
            self.send(member, [0, 1])  # before that it must not begin another one
        step = next(self.numbers)
        commit = stage(member, step, *batch)
        self.batches[number, step] = batch
        self.steps[number] = commit, set()
        self.send(member, servers)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), servers=st.sampled_from([[0], [1], [0, 1]]))
    def commit_again(self, data, servers):
        number = data.draw(st.sampled_from(sorted(self.steps)))
        if number in self.members:
            self.send(self.members[number], servers)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def die(self, data):
        number = data.draw(st.sampled_from(sorted(self.members)))
        self.zombies[number] = [self.members.pop(number), ""]

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), servers=st.sampled_from([[0], [1], [0, 1]]), reconnects=st.booleans())
    def wake(self, data, servers, reconnects):
        """A zombie continues where it was; once it is fenced off, nothing changes by that."""
        number = data.draw(st.sampled_from(sorted(self.zombies)))
        zombie, settled = self.zombies[number]
        if not settled:
            if number in self.steps:
                self.send(zombie, servers)
            return
        zombie = self.run.member(number) if reconnects else zombie
        commit = self.steps[number][0] if number in self.steps else {"member": number, "step": 10**6}
        commit = {"parts": [], "scale": 1.0, "ack": None, **commit}
        for server in servers:
            with pytest.raises(RefusedError, match=f"member {number}, .* by the others"):
                zombie.clients[server].call("commit", commit)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def fence(self, data):
        number = data.draw(st.sampled_from(sorted(self.zombies)))
        self.watcher.all("fence", {"member": number})
        self.zombies[number][1] = self.zombies[number][1] or "fenced"

    @precondition(lambda self: "fenced" in [settled for _, settled in self.zombies.values()])
    @rule(data=st.data())
    def settle(self, data):
        """The batch counts everywhere if it does at one server, and nowhere otherwise."""
        fenced = [number for number, (_, settled) in self.zombies.items() if settled]
        number = data.draw(st.sampled_from(sorted(fenced)))
        commits = OwnCommits(self.watcher.number, 2, lambda server: self.watcher.clients[server])
        ack = commits.settle(number)
        commit, done = self.steps.get(number, (None, set()))
        before = [
            step for whose, step in self.batches if whose == number and step != (commit or {}).get("step")
        ]
        expected = commit["step"] if done else max(before, default=None)
        assert ack == (None if expected is None else {"done": expected})
        for server in [0, 1] if done else []:
            self.note(commit, server)
        self.zombies[number][1] = "settled"

    @precondition(lambda self: "settled" in [settled for _, settled in self.zombies.values()])
    @rule(data=st.data())
    def abandon(self, data):
        settled = [number for number, (_, how) in self.zombies.items() if how == "settled"]
        number = data.draw(st.sampled_from(sorted(settled)))
        self.watcher.all("abandon", {"member": number})
        del self.zombies[number]
        self.steps.pop(number, None)

    @invariant()
    def servers_have_each_committed_batch_once(self):
        if not hasattr(self, "watcher"):
            return
        rows, dense, tallies = state_of(self.watcher)
        expected = {key: np.zeros(DIM) for key in KEYS}
        for key in KEYS:
            for batch, _ in self.applied[OWNER[key]]:
                expected[key] -= RATE * np.array(batch.get(key, (0.0,) * DIM))
        assert rows == {key: tuple(each) for key, each in expected.items() if any(each)}
        for server, batches in enumerate(self.applied):
            total = -RATE * sum(gradient for _, gradient in batches)
            assert dense[server] == (len(batches), [total, total])
            samples = {"samples": sum(len(batch) for batch, _ in batches)} if batches else {}
            assert tallies[server] == {"batches": len(batches), **samples}


TestOwnSteps = OwnStepStates.TestCase
TestOwnSteps.settings = few_examples(6, stateful_step_count=max(25, settings().stateful_step_count))


@pytest.fixture
def run():
    with contextlib.ExitStack() as stack:
        yield begin_run(stack)


BATCH_OF_ONE = ({0: (0.5, 0.5), 1: (0.5, 0.5)}, 1.0)


def test_a_commit_must_be_staged_whole(run):
    member = run.member(1)
    commit = stage(member, 1, *BATCH_OF_ONE)
    before = state_of(member)
    with pytest.raises(
        RefusedError, match="gradients of model 2 that are staged for step 1 of member 1, got"
    ):
        member.clients[0].call("commit", {**commit, "dense": [1, 2]})
    assert state_of(run.member(2)) == before


def test_nobody_commits_for_a_member_that_is_not_fenced_off(run):
    commit = stage(run.member(1), 1, *BATCH_OF_ONE)
    with pytest.raises(RefusedError, match="own step, or of a member that is fenced off, got member 1"):
        run.member(2).clients[0].call("commit", commit)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ({"v": np.ones(2, np.float32)}, "got one for 'v'"),
        ({"w": np.ones(3, np.float32)}, "must have shape"),
        ({"w": np.array([1, np.nan], np.float32)}, "Expected finite gradients"),
    ],
)
def test_gradients_that_could_not_be_committed_are_not_staged(run, gradient, message):
    message_of = tensors_message(gradient, version=0)
    with pytest.raises(RefusedError, match=message):
        run.member(1).clients[0].call(
            "stage_dense", {**message_of.head, "model": 1, "step": 1, "lr": None}, message_of.arrays
        )


def test_a_meeting_stays_asked_for(run):
    one, two = run.member(1), run.member(2)
    assert [answer.head.meeting for answer in one.all("tally", {"meeting": 3})] == [3, 3]
    assert [answer.head.meeting for answer in two.all("tally", {"meeting": 0})] == [3, 3]
    commit = stage(two, 1, *BATCH_OF_ONE)
    assert [answer.head.meeting for answer in two.all("commit", commit)] == [3, 3]


def test_a_member_that_has_missed_a_round_is_not_told_who_the_members_are(run):
    slow, joiner = run.member(1), run.member(2)
    assert [answer.head.members for answer in slow.all("members", {"round": 4})] == [[1], [1]]
    assert [answer.head.members for answer in joiner.all("members", {"round": 5})] == [[1, 2], [1, 2]]
    with pytest.raises(RefusedError, match="expected a member of round 5, like the others"):
        slow.all("members", {"round": 4})


def test_the_capture_of_a_member_that_is_gone_does_not_block_the_next(run):
    dead, other = run.member(1), run.member(2)
    head = {"tables": ["t"], "parts": {"t": 1}, "since": None, "track": False, "store": 1, "used": []}
    dead.all("capture", {**head, "capture": 1})
    other.all("abandon", {"member": 1})
    other.all("capture", {**head, "capture": 2})
    with pytest.raises(ValueError, match="being captured already"):
        other.all("capture", {**head, "capture": 3})


def test_a_run_that_is_over_does_not_come_back(run):
    run.hello = {**run.hello, "run": "the next run"}
    run.member(6).all("members", {"round": 1})
    run.hello = {**run.hello, "run": "a third run"}
    run.member(7).all("members", {"round": 1})
    run.hello = {**run.hello, "run": "the next run"}
    with pytest.raises(RefusedError, match="got one of an older run"):
        run.member(6).all("members", {"round": 1})


def test_gradients_that_wait_for_others_are_refused():
    with contextlib.ExitStack() as stack, pytest.raises(RefusedError, match="without grads_to_wait"):
        begin_run(stack, dense={"grads_to_wait": 2})
