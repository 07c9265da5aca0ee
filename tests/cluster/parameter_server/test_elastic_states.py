"""Random histories of elastic runs on two servers, against a model of dicts: all is applied once, or not.

Members come, look up, push, repeat what they have sent over a new connection, commit at one server before the
other, drop steps, are fenced off, wake as zombies, and are abandoned. After each action every server has what
its model has.
"""

import contextlib
import itertools

import numpy as np
import pytest
from elastic_helpers import DIM, Run, SlowTable, at_once, spec_of
from few_examples import few_examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from karvan.cluster.parameter_server.service import ParameterServer
from karvan.store.messages import hashes_of, owners_of
from karvan.wire import RefusedError, Server

SPEC = spec_of("t")
KEYS = list(range(8))
OWNER = dict(zip(KEYS, owners_of(hashes_of(np.array(KEYS)), 2).tolist(), strict=True))
SCALE = 1.0 / 3.0
BATCH = st.dictionaries(
    st.sampled_from(KEYS),
    st.tuples(st.integers(1, 3), st.tuples(*[st.integers(-9, 9).map(lambda n: n / 7)] * DIM)),
    min_size=1,
    max_size=4,
)


class JointModel:
    """The rows of a server in mode sync: they change by commits alone."""

    def __init__(self):
        self._table = SlowTable(SPEC)

    def look_up(self, lookup):
        """Nothing changes."""

    def withdraw(self, lookup):
        """Nothing has changed."""

    def done(self, lookup):
        """Nothing changes."""

    def apply(self, parts):
        uses = {}
        for part in parts:
            for key, (times, _) in part["mine"].items():
                uses[key] = uses.get(key, 0) + times
        self._table.use(uses, 1)
        self._table.apply([{k: g for k, (_, g) in part["mine"].items()} for part in parts], SCALE)

    def plain(self):
        return self._table.plain()


class SingleModel:
    """The rows of a server in mode hybrid: lookups count at once, those that are withdrawn do not."""

    def __init__(self):
        self._updates = SlowTable(SPEC)
        self._live = {}
        self._trained = set()

    def look_up(self, lookup):
        self._live[lookup["id"]] = lookup["mine"]

    def withdraw(self, lookup):
        if lookup["id"] not in self._trained:
            self._live.pop(lookup["id"], None)

    def done(self, lookup):
        self._trained.add(lookup["id"])

    def apply(self, parts):
        for part in parts:
            uses = {key: 1 for key in part["mine"] if key not in self._updates.rows}
            self._updates.use(uses, 1)
            self._updates.apply([{k: g for k, (_, g) in part["mine"].items()}], SCALE)
            self._trained.add(part["id"])

    def plain(self):
        counts = {}
        for mine in self._live.values():
            for key, (times, _) in mine.items():
                counts[key] = counts.get(key, 0) + times
        untrained = SlowTable(SPEC)
        untrained.use(counts, 1)
        trained = self._updates.plain()
        return {key: (*trained.get(key, row)[:2], counts[key], 1) for key, row in untrained.plain().items()}


class ServerModel:
    """One server: what is staged and committed, and its rows."""

    def __init__(self, index, rows):
        self.index = index
        self.rows = rows()
        self.committed, self.ack = None, None
        self.staged = {}

    def mine(self, batch):
        return {key: row for key, row in batch.items() if OWNER[key] == self.index}

    def release(self, dropped, held):
        """Lookups of dropped pushes that nobody can push again are undone."""
        for lookup in dropped:
            staged = any(lookup["id"] == each["id"] for each, _ in self.staged.values())
            if lookup["id"] not in held and not staged:
                self.rows.withdraw({**lookup, "mine": self.mine(lookup["batch"])})

    def commit(self, step, parts, ack, held):
        if self.committed is not None and step <= self.committed:
            return
        self.rows.apply([{**self.staged[p][0], "mine": self.mine(self.staged[p][0]["batch"])} for p in parts])
        for part in parts:
            del self.staged[part]
        self.committed, self.ack = step, ack
        self.release(self.drop(lambda push_step: push_step <= step), held)

    def drop(self, chosen):
        dropped = {name: push for name, push in self.staged.items() if chosen(push[1])}
        self.staged = {name: push for name, push in self.staged.items() if name not in dropped}
        return [lookup for lookup, _ in dropped.values()]


class ElasticStates(RuleBasedStateMachine):
    """The rules; `mode` and `rows` are set by subclasses."""

    mode, rows = "sync", JointModel

    @initialize()
    def begin(self):
        self.stack = contextlib.ExitStack()
        addresses = [
            self.stack.enter_context(Server(ParameterServer(index, 2))).address for index in range(2)
        ]
        staleness = 1 if self.mode == "sync" else 4
        self.run = self.stack.enter_context(Run(addresses, [SPEC], mode=self.mode, staleness=staleness))
        self.models = [ServerModel(index, self.rows) for index in range(2)]
        self.numbers = itertools.count(1)
        self.members = {}
        self.zombies = {}  # members that are fenced off
        self.held = {}  # lookups by id, each with its member and batch
        self.sent = {}  # pushes that were sent, by member and sequence, to be repeated
        self.commits = {}  # by step, as the members have agreed
        self.join()

    def teardown(self):
        if hasattr(self, "stack"):
            self.stack.close()

    @property
    def unfinished(self):
        """A commit that one server has not heard of."""
        done = [model.committed or 0 for model in self.models]
        return max(done) if min(done) < max(done) else None

    @rule()
    def join(self):
        number = next(self.numbers)
        self.members[number] = self.run.member(number)

    @rule(data=st.data())
    def reconnect(self, data):
        number = data.draw(st.sampled_from(sorted(self.members)))
        self.members[number].close()
        self.members[number] = self.run.member(number)

    @rule(data=st.data(), batch=BATCH, releases=st.booleans(), pushes=st.booleans(), later=st.booleans())
    def look_up(self, data, batch, releases, pushes, later):
        """A new batch; the member may push its gradients at once, and be done with an earlier one."""
        number = data.draw(st.sampled_from(sorted(self.members)))
        mine = [each for each in self.held.values() if each["member"] == number]
        done = [data.draw(st.sampled_from(mine))] if mine and releases else []
        identity = next(self.numbers)
        lookup = {"id": identity, "member": number, "batch": batch}
        uses = {key: times for key, (times, _) in batch.items()}
        over = [each["id"] for each in done]
        lookup["found"] = self.members[number].pull(identity, {"t": uses}, done=over)["t"]
        for each in done:
            del self.held[each["id"]]
            for model in self.models:
                if not any(each["id"] == one["id"] for one, _ in model.staged.values()):
                    model.rows.done(each)
        self.held[identity] = lookup
        for model in self.models:
            model.rows.look_up({**lookup, "mine": model.mine(batch)})
        if pushes:
            self.stage(lookup, later)

    @property
    def pushable(self):
        """Lookups whose members can push them."""
        return [each for each in self.held.values() if each["member"] in self.members]

    @precondition(lambda self: self.pushable)
    @rule(data=st.data())
    def repeat_lookup(self, data):
        lookup = data.draw(st.sampled_from(self.pushable))
        uses = {key: times for key, (times, _) in lookup["batch"].items()}
        found = self.members[lookup["member"]].pull(lookup["id"], {"t": uses})["t"]
        assert {k: v.tolist() for k, v in found.items()} == {
            k: v.tolist() for k, v in lookup["found"].items()
        }

    @precondition(lambda self: self.pushable)
    @rule(data=st.data(), later=st.booleans())
    def push(self, data, later):
        self.stage(data.draw(st.sampled_from(self.pushable)), later)

    def stage(self, lookup, later):
        step = max(self.commits, default=0) + 1 + later
        push = (lookup, step, next(self.numbers))
        self.send(*push)
        self.sent[lookup["member"], push[2]] = push
        for model in self.models:
            model.staged[lookup["member"], push[2]] = (lookup, step)

    def send(self, lookup, step, sequence):
        gradients = {"t": {key: gradient for key, (_, gradient) in lookup["batch"].items()}}
        self.members[lookup["member"]].push(sequence, [lookup["id"]], [gradients], step=step)

    @precondition(lambda self: self.sent and self.unfinished is None)
    @rule(data=st.data())
    def repeat_push(self, data):
        name = data.draw(st.sampled_from(sorted(self.sent)))
        lookup, step, _ = self.sent[name]
        if name[0] not in self.members:
            return
        agreed = any(list(name) in commit["parts"] for commit in self.commits.values())
        staged = [name in model.staged for model in self.models]
        if agreed or all(staged):
            self.send(*self.sent[name])  # nothing changes
        elif step <= (self.models[0].committed or 0):
            with pytest.raises(RefusedError, match="expected a push of a step after"):
                self.send(*self.sent[name])
        elif lookup["id"] not in self.held:
            with pytest.raises(RefusedError, match="batches that were looked up"):
                self.send(*self.sent[name])

    @precondition(lambda self: self.unfinished is None)
    @rule(data=st.data(), both=st.booleans())
    def commit(self, data, both):
        """All servers have staged the parts; one may hear of the commit before the other."""
        steps = sorted({step for _, step in self.models[0].staged.values()}) or [
            max(self.commits, default=0) + 1
        ]
        step = data.draw(st.sampled_from(steps))
        names = [name for name, (_, its) in sorted(self.models[0].staged.items()) if its == step]
        if self.mode == "sync":  # a lookup has one gradient
            names = list({self.models[0].staged[name][0]["id"]: name for name in names}.values())
        parts = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1)) if names else []
        commit = {"step": step, "parts": [list(part) for part in parts], "scale": SCALE, "ack": {"of": step}}
        self.commits[step] = commit
        self.tell(commit, [0, 1] if both else [data.draw(st.sampled_from([0, 1]))])

    def tell(self, commit, servers):
        """All members at once."""
        work = [
            lambda client=member.clients[server]: client.call("commit", commit)
            for member in self.members.values()
            for server in servers
        ]
        at_once(*work)
        for server in servers:
            parts = [tuple(part) for part in commit["parts"]]
            self.models[server].commit(commit["step"], parts, commit["ack"], self.held)

    @precondition(lambda self: self.unfinished is not None)
    @rule()
    def finish_commit(self):
        self.tell(self.commits[self.unfinished], [0, 1])

    @precondition(lambda self: self.unfinished is None and self.commits)
    @rule(data=st.data())
    def repeat_commit(self, data):
        step = data.draw(st.sampled_from(sorted(self.commits)))
        self.tell(self.commits[step], [0, 1])

    @rule(data=st.data())
    def commit_what_is_not_staged(self, data):
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        head = {"step": max(self.commits, default=0) + 1, "parts": [[member.number, 10**6]]}
        for client in member.clients:
            with pytest.raises(RefusedError, match="its gradients would be lost"):
                client.call("commit", {**head, "scale": 1.0, "ack": None})

    @precondition(lambda self: self.unfinished is None)
    @rule(data=st.data(), later=st.integers(1, 2))
    def drop(self, data, later):
        step = max(self.commits, default=0) + later
        self.members[data.draw(st.sampled_from(sorted(self.members)))].all("drop", {"step": step})
        for model in self.models:
            model.release(model.drop(lambda its: its >= step), self.held)

    @precondition(lambda self: len(self.members) > 1)
    @rule(data=st.data())
    def fence(self, data):
        """A member seems to be gone, at any moment: what it has staged stays."""
        number = data.draw(st.sampled_from(sorted(self.members)))
        self.zombies[number] = self.members.pop(number)
        next(iter(self.members.values())).all("fence", {"member": number})

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), reconnects=st.booleans())
    def wake(self, data, reconnects):
        """A member that is fenced off continues, with whatever it was about to do; nothing changes."""
        number = data.draw(st.sampled_from(sorted(self.zombies)))
        zombie = self.run.member(number) if reconnects else self.zombies[number]
        parts = [list(name) for name in sorted(self.models[0].staged)]
        step = self.unfinished or max(self.commits, default=0) + 1
        commit = {"step": step, "parts": parts, "scale": 1.0, "ack": "a zombie"}
        lives = [each for each in self.members if each != number]
        attempts = [
            lambda: zombie.pull(next(self.numbers), {"t": {0: 1, 1: 1}}),
            lambda: zombie.pull(next(self.numbers), {"t": {0: 1, 1: 1}}, commit=commit),
            lambda: zombie.push(next(self.numbers), [1], [{"t": {0: (1.0, 1.0)}}], step=step),
            lambda: zombie.all("commit", commit),
            lambda: zombie.all("drop", {"step": step}),
            lambda: zombie.all("abandon", {"member": lives[0]}),
            lambda: zombie.all("clear", {"table": "t"}),
            zombie.progress,
        ]
        with pytest.raises(RefusedError, match=f"member {number}, .* by the others"):
            data.draw(st.sampled_from(attempts))()

    @precondition(lambda self: self.unfinished is None and len(self.members) + len(self.zombies) > 1)
    @rule(data=st.data())
    def abandon(self, data):
        chosen = [*self.zombies, *(self.members if len(self.members) > 1 else ())]
        number = data.draw(st.sampled_from(sorted(chosen)))
        dead = self.members.pop(number) if number in self.members else self.zombies.pop(number)
        next(iter(self.members.values())).all("abandon", {"member": number})
        mine = [each for each in self.held.values() if each["member"] == number]
        self.held = {name: each for name, each in self.held.items() if each["member"] != number}
        for model in self.models:
            pushed = [each for each, _ in model.staged.values() if each["member"] == number]
            model.staged = {name: push for name, push in model.staged.items() if name[0] != number}
            model.release([*pushed, *mine], self.held)
        with pytest.raises(RefusedError, match=f"member {number}, .* by the others"):
            dead.progress()

    @invariant()
    def servers_have_what_their_models_have(self):
        if not hasattr(self, "models"):
            return
        member = next(iter(self.members.values()))
        for model, progress in zip(self.models, member.progress(), strict=True):
            staged = sorted((step, *name) for name, (_, step) in model.staged.items())
            assert progress == {"committed": model.committed, "ack": model.ack, "staged": staged}
        expected = {key: row for model in self.models for key, row in model.rows.plain().items()}
        assert member.rows("t") == expected


class HybridStates(ElasticStates):
    """Mode hybrid."""

    mode, rows = "hybrid", SingleModel


TestSync = ElasticStates.TestCase
TestHybrid = HybridStates.TestCase
TestSync.settings = TestHybrid.settings = few_examples(
    6, stateful_step_count=max(30, settings().stateful_step_count)
)
