"""Elastic runs of mode hybrid: a committed step is the sequence of its pushes; limits of what is staged."""

import numpy as np
import pytest
from elastic_helpers import DIM, Run, at_once, spec_of

import karvan as kv
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.wire import RefusedError, Server

SPECS = (
    spec_of("lru", evict=kv.eviction.LRU(15)),
    spec_of("plain"),
    spec_of("rare", admit=kv.admission.MinCount(3, slots=1 << 16)),
)
HYBRID = {"mode": "hybrid", "staleness": 4}


@pytest.fixture(scope="module")
def address():
    with Server(ParameterServer()) as server:
        yield [server.address]


def random_batch(draw):
    keys = {spec.name: draw.choice(30, 8, replace=False).tolist() for spec in SPECS}
    uses = {name: {key: int(draw.integers(1, 4)) for key in each} for name, each in keys.items()}
    gradients = {name: {key: draw.normal(size=DIM).astype(np.float32) for key in keys[name]} for name in keys}
    return uses, gradients


def history(run, batches, push):
    """Steps of two trainers; a step's lookups come first, then its gradients."""
    trainers = [run.member(number) for number in range(2)]
    for step, of_step in enumerate(batches, 1):
        for trainer, (uses, _) in zip(trainers, of_step, strict=True):
            trainer.pull(step, uses, step=step, done=[step - 2] if step > 2 else [])
        push(trainers, step, [gradients for _, gradients in of_step])
    return {spec.name: trainers[0].rows(spec.name) for spec in SPECS}


def test_a_committed_step_is_the_sequence_of_its_pushes(address):
    draw = np.random.default_rng(1)
    batches = [[random_batch(draw) for _ in range(2)] for _ in range(8)]
    third = np.float32(1 / 3)

    def one_by_one(trainers, step, gradients):
        for trainer, each in list(zip(trainers, gradients, strict=True))[::-1]:
            scaled = {name: {key: g * third for key, g in rows.items()} for name, rows in each.items()}
            trainer.push(step, [step], [scaled], step=step)

    def committed(trainers, step, gradients):
        at_once(
            *(
                lambda trainer=trainer, each=each: trainer.push(step, [step], [each], step=step)
                for trainer, each in zip(trainers, gradients, strict=True)
            )
        )
        trainers[step % 2].commit(step, [(1, step), (0, step)], scale=1 / 3)

    with Run(address, SPECS, kind="adagrad", elastic=False, trainers=2, **HYBRID) as run:
        expected = history(run, batches, one_by_one)
    with Run(address, SPECS, kind="adagrad", **HYBRID) as run:
        assert history(run, batches, committed) == expected


def test_a_lookup_that_carries_a_commit_sees_its_rows(address):
    with Run(address, SPECS, **HYBRID) as run:
        one, other = run.member(1), run.member(2)
        (before,) = one.pull(1, {"plain": {3: 1}})["plain"].values()
        one.push(1, [1], [{"plain": {3: (1, 2)}}])
        commit = {"step": 1, "parts": [[1, 1]], "scale": 1.0, "ack": None}
        (unchanged,) = other.pull(1, {"plain": {3: 1}}, commit=None)["plain"].values()
        (after,) = other.pull(2, {"plain": {3: 1}}, commit=commit)["plain"].values()
        assert unchanged.tolist() == before.tolist()
        assert after.tolist() == (before - np.float32([0.5, 1.0])).tolist()
        other.push(1, [2], [{"plain": {3: (1, 2)}}], step=2, commit=commit)  # which changes nothing
        assert other.progress()[0]["staged"] == [(2, 2, 1)]


def test_a_member_stages_a_bounded_number_of_pushes(address):
    with Run(address, SPECS, **HYBRID) as run:
        member, other = run.member(1), run.member(2)
        member.pull(1, {"plain": {3: 1}})
        for sequence in range(1, 265):
            member.push(sequence, [1], [{"plain": {3: (1, 2)}}], step=sequence)
        with pytest.raises(RefusedError, match="at most 264 staged pushes of a member"):
            member.push(265, [1], [{"plain": {3: (1, 2)}}], step=265)
        other.pull(1, {"plain": {3: 1}})
        other.push(1, [1], [{"plain": {3: (1, 2)}}])
        member.all("drop", {"step": 2})
        assert member.progress()[0]["staged"] == [(1, 1, 1), (1, 2, 1)]
        member.push(265, [1], [{"plain": {3: (1, 2)}}], step=2)


def test_pushes_and_commits_that_do_not_fit_are_refused(address):
    with Run(address, SPECS, **HYBRID) as run:
        member = run.member(1)
        member.pull(1, {"plain": {3: 1}})
        gradients = [{"plain": {3: (1, 2)}}]
        member.push(1, [1], gradients, step=4)
        with pytest.raises(RefusedError, match="to be repeated as it was, of step 4"):
            member.push(1, [1], gradients, step=5)
        with pytest.raises(RefusedError, match="expected parts of step 5, got push 1 of member 1, of step 4"):
            member.commit(5, [(1, 1)])
        with pytest.raises(RefusedError, match="each of the parts of a commit once"):
            member.commit(4, [(1, 1), (1, 1)])
        with pytest.raises(RefusedError, match="a step of all members, got one of member 1 alone"):
            member.all("drop", {"step": 4, "member": 1})
        with pytest.raises(RefusedError, match="JSON of up to 262144 characters"):
            member.commit(4, [(1, 1)], ack="x" * 2**18)
        with pytest.raises(RefusedError, match="all 2 passes of an elastic run's push at once"):
            member.push(2, [1, 1], gradients, step=4, mine=[1])
        member.commit(4, [(1, 1)])
        with pytest.raises(
            RefusedError, match="a step after 4, got step 4: steps up to 4 are committed without it"
        ):
            member.push(2, [1], gradients, step=4)
        member.push(1, [1], gradients, step=4)  # it was committed: a late repetition
        assert member.progress()[0] == {"committed": 4, "ack": None, "staged": []}


def test_members_of_a_run_agree_on_what_it_is(address):
    with Run(address, SPECS, **HYBRID) as run:
        for wrong, message in (
            ({"mode": "sync", "staleness": 1}, "expected a run with members, mode hybrid"),
            ({"trainers": 2}, "expected trainers to be 0, for any number, in an elastic run, got 2"),
            ({"elastic": False}, "expected trainers to be at least 1 unless it is elastic, got 0"),
        ):
            run.hello, right = {**run.hello, **wrong}, run.hello
            with pytest.raises(RefusedError, match=message):
                run.member(5).progress()
            run.hello = right
    with pytest.raises(RefusedError, match="expected an elastic run with on_server_loss rollback"):
        Run(address, SPECS, **{**HYBRID, "reload": True})
