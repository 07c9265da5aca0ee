"""Elastic runs of mode sync: what a step does to the tables depends on its parts and their order alone."""

import itertools

import numpy as np
import pytest
from elastic_helpers import DIM, Run, SlowTable, at_once, spec_of
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.wire import RefusedError, Server

SPECS = (
    spec_of("plain"),
    spec_of("rare", admit=kv.admission.MinCount(3, slots=1 << 16)),
    spec_of("small", evict=kv.eviction.LRU(6)),
)
POLICIES = (
    spec_of("aged", evict=kv.eviction.Age(2)),
    spec_of("drawn", admit=kv.admission.Probability(0.3, each=True)),
    spec_of("lfu", evict=kv.eviction.LFU(20)),
    spec_of("lru", evict=kv.eviction.LRU(20)),
    spec_of("norm", evict=kv.eviction.Norm(0.5, every=2)),
    spec_of("sampled", admit=kv.admission.Probability(0.5)),
    spec_of("zero", init=kv.init.Constant(0.0)),
)


@pytest.fixture(scope="module")
def address():
    """Of one server, so that an eviction is over all rows; runs begin with empty tables."""
    with Server(ParameterServer()) as server:
        yield [server.address]


@st.composite
def steps(draw):
    """Steps of micro-batches, each {table: {key: (uses, gradient)}}."""
    number = st.integers(-64, 64).map(lambda n: n / 7)
    row = st.tuples(st.integers(1, 3), st.tuples(number, number))
    batch = st.fixed_dictionaries({spec.name: st.dictionaries(st.integers(0, 9), row) for spec in SPECS})
    return draw(st.lists(st.lists(batch, min_size=1, max_size=4), min_size=1, max_size=3))


def random_batch(draw, keys=40):
    """{table: {key: (uses, gradient)}} for tables with all kinds of policies."""
    return {
        spec.name: {
            int(key): (int(draw.integers(1, 4)), tuple(draw.normal(size=DIM).tolist()))
            for key in draw.choice(keys, 12, replace=False)
        }
        for spec in POLICIES
    }


def uses_of(batch):
    return {table: {key: uses for key, (uses, _) in batch[table].items()} for table in sorted(batch)}


def gradients_of(batch, scale=1.0):
    factor = np.float32(scale)
    return {
        table: {key: np.float32(gradient) * factor for key, (_, gradient) in batch[table].items()}
        for table in sorted(batch)
    }


def slow_step(tables, batches, step, scale, by_key=False):
    """What a committed step does to slow tables."""
    for name, table in tables.items():
        total = {}
        for batch in batches:
            for key, (uses, _) in batch[name].items():
                total[key] = total.get(key, 0) + uses
        table.use(total, step)
        table.apply([gradients_of(batch)[name] for batch in batches], scale, by_key)


def listed(vectors):
    return {key: vector.tolist() for key, vector in vectors.items()}


@given(data=st.data(), drawn=steps(), by_key=st.booleans())
def test_tables_do_not_depend_on_who_computes_what_nor_on_the_order_of_arrival(address, data, drawn, by_key):
    slow = {spec.name: SlowTable(spec) for spec in SPECS}
    sequence = itertools.count(1)
    with Run(address, SPECS, grad_reduce="key" if by_key else "mean") as run:
        members = [run.member(number) for number in range(data.draw(st.integers(1, 3)))]
        commit = None
        for step, batches in enumerate(drawn, 1):
            places = range(len(batches))
            owner = [data.draw(st.sampled_from(members)) for _ in batches]
            for place in data.draw(st.permutations(places)):
                uses = uses_of(batches[place])
                found = owner[place].pull(100 * step + place, uses, step=step, commit=commit)
                for name, keys in uses.items():
                    assert listed(found[name]) == listed(slow[name].read(keys))
            parts = {}
            for place in data.draw(st.permutations(places)):
                parts[place] = [owner[place].number, next(sequence)]
                gradients = [gradients_of(batches[place])]
                owner[place].push(parts[place][1], [100 * step + place], gradients, step=step)
            scale = 1.0 if by_key else 1.0 / len(batches)
            slow_step(slow, batches, step, scale, by_key)
            commit = {"step": step, "parts": [parts[p] for p in places], "scale": scale, "ack": None}
        members[-1].all("commit", commit)
        for name, table in slow.items():
            assert members[0].rows(name) == table.plain()


def fixed_run(address, batches, kind, state, passes, by_key):
    """The tables after steps of two trainers of a run that is not elastic, with `passes` batches each."""
    options = {"grad_reduce": "key" if by_key else "mean", "state": state, "kind": kind}
    with Run(address, POLICIES, elastic=False, trainers=2, **options) as run:
        trainers = [run.member(number) for number in range(2)]
        for step, batches_of_step in enumerate(batches, 1):
            numbers = [10 * step + number for number in range(passes)]

            def train(trainer, step=step, its=batches_of_step, numbers=numbers):
                mine = its[trainer.number :: 2]
                for number, batch in zip(numbers, mine, strict=True):
                    trainer.pull(number, uses_of(batch), step=step)
                gradients = [gradients_of(batch, 1.0 if by_key else 0.5) for batch in mine]
                trainer.push(step, numbers, gradients, step=step)

            at_once(*(lambda trainer=trainer: train(trainer) for trainer in trainers))
        return {spec.name: trainers[0].rows(spec.name) for spec in POLICIES}


def elastic_run(address, batches, kind, state, passes, by_key):
    """The same with members that come and go, and repeat lookups in another order."""
    options = {"grad_reduce": "key" if by_key else "mean", "state": state, "kind": kind}
    numbers, draw = itertools.count(2), np.random.default_rng(3)
    with Run(address, POLICIES, **options) as run:
        commit = None
        for step, batches_of_step in enumerate(batches, 1):
            members = [run.member(next(numbers)) for _ in range(2)]
            for place in draw.permutation(len(batches_of_step)).tolist():
                member = members[place % 2]
                member.pull(place + 1, uses_of(batches_of_step[place]), step=step, commit=commit)
            for member in members[:: draw.choice([-1, 1])]:
                mine = list(range(len(batches_of_step)))[members.index(member) :: 2]
                gradients = [gradients_of(batches_of_step[place]) for place in mine]
                member.push(9, [place + 1 for place in mine], gradients, step=step)
            parts = [[member.number, 9] for member in members]
            commit = {"step": step, "parts": parts, "scale": 1.0 if by_key else 0.5, "ack": None}
        members[0].all("commit", commit)
        return {spec.name: members[1].rows(spec.name) for spec in POLICIES}


@pytest.mark.parametrize(
    ("kind", "state", "passes", "by_key"),
    [("adam", 2 * DIM, 1, False), ("adagrad", DIM, 1, True), ("adagrad", DIM, 3, False), ("sgd", 0, 2, True)],
)
def test_an_elastic_run_has_the_bits_of_two_fixed_trainers(address, kind, state, passes, by_key):
    draw = np.random.default_rng(8)
    batches = [[random_batch(draw) for _ in range(2 * passes)] for _ in range(7)]
    expected = fixed_run(address, batches, kind, state, passes, by_key)
    assert elastic_run(address, batches, kind, state, passes, by_key) == expected
    assert {name: len(rows) > 0 for name, rows in expected.items()} == dict.fromkeys(expected, True)


def test_a_row_of_zeros_is_not_taken_for_a_missing_one(address):
    spec = spec_of("plain")
    with Run(address, SPECS) as run:
        member = run.member(1)
        (vector,) = member.pull(1, {"plain": {5: 1}})["plain"].values()
        assert vector.any()
        member.push(1, [1], [{"plain": {5: vector / np.float32(0.5)}}])  # momentum 0: p -= 0.5 * g
        member.commit(1, [(1, 1)])
        found = member.pull(2, {"plain": {5: 1, 6: 1}}, step=2)["plain"]
        assert found[5].tolist() == [0.0, 0.0]
        assert found[6].tolist() == spec.initial_vectors(np.array([6]))[0].tolist()


def test_lookups_alone_leave_no_trace(address):
    with Run(address, SPECS) as run:
        member = run.member(1)
        first = member.pull(1, {"plain": {1: 1}, "rare": {1: 5}})
        member.pull(2, {"plain": {2: 1}}, done=[1])
        member.all("withdraw", {"store": 1, "batches": [2]})
        assert member.rows("plain") == member.rows("rare") == {}
        assert first["rare"][1].tolist() == [0.0, 0.0]


def test_a_table_that_one_part_skips_is_skipped_by_all(address):
    with Run(address, SPECS) as run:
        members = [run.member(number) for number in (1, 2)]
        for member in members:
            member.pull(1, {"plain": {1: 1}, "small": {1: 1}})
            gradients = [{"plain": {1: (1, 1)}, "small": {1: (1, 1)}}]
            member.push(1, [1], gradients, skipped=["small"] if member is members[0] else [])
        before = members[0].all("stats", {"tables": ["small"]})[0].head.stats["small"]["skipped_updates"]
        members[0].commit(1, [(1, 1), (2, 1)])
        stats = members[0].all("stats", {"tables": ["small"]})[0].head.stats["small"]
        assert stats["skipped_updates"] == before + 1
        assert members[0].rows("small")[1][1:] == ([0.0, 0.0], 2, 1)
        assert members[0].rows("plain")[1][1:] == ([2.0, 2.0], 2, 1)


def test_gradients_that_lack_keys_are_summed_with_complete_ones(address):
    with Run(address, SPECS) as run:
        members = [run.member(number) for number in (1, 2)]
        for member in members:
            member.pull(1, {"plain": {1: 1, 2: 1}})
        nothing = (np.nan, np.nan)
        members[0].push(1, [1], [{"plain": {1: (1, 2), 2: nothing}}], complete=False)
        members[1].push(1, [1], [{"plain": {1: (4, 8), 2: (16, 32)}}])
        members[0].commit(1, [(1, 1), (2, 1)])
        assert {key: row[1] for key, row in members[0].rows("plain").items()} == {1: [5, 10], 2: [16, 32]}


def test_two_optimizers_of_an_engine_push_the_same_lookup(address):
    with Run(address, SPECS) as run:
        members = [run.member(number) for number in (1, 2)]
        for member in members:
            member.pull(1, {"plain": {1: 1}, "small": {1: 1}})
            for sequence, table in enumerate(("plain", "small"), 1):
                gradients = [{"plain": {1: (1, 1)}, "small": {1: (2, 2)}}]
                member.push(sequence, [1], gradients, tables=[table])
        members[0].commit(1, [(1, 1), (1, 2), (2, 1), (2, 2)])
        assert members[0].rows("plain")[1][1:] == ([2.0, 2.0], 2, 1)
        assert members[0].rows("small")[1][1:] == ([4.0, 4.0], 2, 1)


def test_parts_that_disagree_about_their_update_are_refused(address):
    with Run(address, SPECS) as run:
        members = [run.member(number) for number in (1, 2)]
        for member in members:
            member.pull(1, {"plain": {1: 1}})
            member.push(1, [1], [{"plain": {1: (1, 1)}}], steps={"plain": member.number})
        with pytest.raises(
            RefusedError, match=r"one rule and step for table 'plain', got step 1 of member 1"
        ):
            members[0].commit(1, [(1, 1), (2, 1)])
        members[0].push(2, [1], [{"plain": {1: (1, 1)}}])
        with pytest.raises(RefusedError, match="the gradients of a lookup for table 'plain' once"):
            members[0].commit(1, [(1, 1), (1, 2)])
        assert members[0].rows("plain") == {}
        members[0].commit(1, [(1, 1)])
        assert members[0].rows("plain")[1][1:] == ([1.0, 1.0], 1, 1)
