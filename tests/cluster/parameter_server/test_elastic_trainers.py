"""Members that train with a remote store: staged updates, commits that travel with lookups, dead members."""

import contextlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from cluster_helpers import Processes, serving
from elastic_trainers import ElasticTrainer, connection_of, in_memory
from forked_programs import ForkedProgram
from support_paths import support_path

import karvan as kv
from karvan.distributed.connection import Connection, ConnectionSettings
from karvan.job.environment import ASYNC, DenseSettings, ServerLoss
from karvan.protocol.parameter_server import STATS
from karvan.train.group_steps import committed_step
from karvan.train.leased_work import Agreement, Contribution
from karvan.wire import RefusedError

STEPS, BATCHES = 4, 3
_runs = itertools.count(1)


@pytest.fixture(scope="module")
def expected():
    return in_memory(STEPS, BATCHES)


@pytest.fixture
def join():
    """join(addresses, member, mode) makes one more trainer of this test's run."""
    run = f"trainers {next(_runs)}"
    with contextlib.ExitStack() as stack:

        def make(addresses, member, mode="sync", **options):
            made = ElasticTrainer(connection_of(addresses, run, member, mode), **options)
            stack.enter_context(contextlib.closing(made))
            return made

        make.run = run
        yield make


def commit(trainers, step, staged):
    """All members have heard that all servers hold these pushes; each of them commits the step."""
    for each in staged:
        each.wait()
    for trainer in trainers:
        trainer.commits.commit(step, [each.part for each in staged], 1.0, {"step": step})


@pytest.mark.parametrize(("reduce", "scale"), [("mean", 1 / 12), ("key", 2 / 12), ("sum", 2 / 12)])
def test_sums_over_samples_become_means_of_all_or_of_each_batch(reduce, scale):
    batches = [{"place": 0, "samples": 8}, {"place": 2, "samples": 4}, {"place": 1}]
    said = (Contribution(1, batches[:1]), Contribution(2, batches[1:]))
    assert Agreement(1, said).row_scale(reduce) == scale


@pytest.mark.parametrize("members", [1, 2, 3])
def test_any_number_of_members_has_the_bits_of_one_process(join, expected, members):
    with serving(2) as addresses:
        trainers = [join(addresses, member) for member in range(members)]
        for step in range(1, STEPS + 1):
            # Commits travel with the lookups of the next step; only the first lookup of a server applies it.
            staged = [trainers[(step + n) % members].stage(step, n) for n in range(BATCHES)]
            commit(trainers, step, staged)
        assert trainers[0].rows() == expected  # asks for tables only after all commits
        progress = trainers[-1].commits.progress()
        assert [(one.committed, one.ack, one.staged) for one in progress] == [
            (STEPS, {"step": STEPS}, [])
        ] * 2


def test_trainers_come_and_go_and_the_bits_stay(join, expected):
    with serving(2) as addresses:
        numbers = itertools.count(5)
        trainers = [join(addresses, next(numbers)) for _ in range(2)]
        for step in range(1, STEPS + 1):
            left = trainers.pop(0)
            left.stage(step, 0).wait()  # then it dies
            left.close()
            (survivor,) = trainers
            other = survivor.stage(step, 1)
            other.wait()
            survivor.commits.drop(step)
            survivor.commits.abandon(left.commits.member)
            trainers.append(join(addresses, next(numbers)))
            staged = [trainers[1].stage(step, 0), other.restage(), trainers[0].stage(step, 2)]
            commit(trainers, step, staged)
        assert trainers[0].rows() == expected


def test_a_step_that_is_dropped_can_be_staged_again_and_again(join):
    expected = in_memory(1, 1)
    with serving(2) as addresses:
        trainer = join(addresses, 1)
        staged = trainer.stage(1, 0)
        for _ in range(3):
            staged.wait()
            trainer.commits.drop(1)
            assert [one.staged for one in trainer.commits.progress()] == [[], []]
            staged = staged.restage()
        commit([trainer], 1, [staged])
        assert trainer.rows() == expected
        with pytest.raises(RuntimeError, match="which was committed or released"):
            staged.restage()


def test_survivors_fence_a_member_off_before_they_ask_how_far_it_came(join):
    with serving(2) as addresses:
        survivor, zombie = join(addresses, 0), join(addresses, 1)
        its = zombie.stage(1, 1)
        its.wait()
        assert (
            committed_step(survivor.commits, 1, lost={1}) is None
        )  # so the survivors decide against the step
        zombie.commits.commit(1, [its.part], 1.0)
        with pytest.raises(RefusedError, match="got member 1, fenced off by the others"):
            zombie.commits.flush()
        with pytest.raises(RefusedError, match="got member 1, fenced off by the others"):
            zombie.connection.servers.peer(0).call(STATS, {"tables": []})  # nor may it call anything else
        assert [(each.committed, each.staged) for each in survivor.commits.progress()] == [
            (None, [(1, *its.part)])
        ] * 2


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
@pytest.mark.parametrize("counts", [True, False])
def test_what_a_killed_member_has_staged_counts_when_the_survivor_says_so(join, mode, counts):
    with Processes(2) as processes:
        addresses = [each.address for each in sorted(processes.registry.members(), key=lambda m: m.index)]
        survivor = join(addresses, 0, mode)
        program = support_path("cluster/elastic_trainers.py")
        command = [sys.executable, str(program), ",".join(addresses), join.run, "1", mode]
        dead = ForkedProgram(command, env=dict(os.environ), stdout=subprocess.PIPE)
        said = dead.stdout.readline().split()
        dead.kill()
        dead.wait()
        mine = survivor.stage(1, 0)
        mine.wait()
        its = (1, int(said[1]))
        assert [one.staged for one in survivor.commits.progress()] == [[(1, 0, mine.sequence), (1, *its)]] * 2
        survivor.commits.commit(1, [mine.part, its] if counts else [mine.part], 1.0)
        survivor.commits.abandon(1)
        assert [one.staged for one in survivor.commits.progress()] == [[], []]
        if mode == "sync":
            assert survivor.rows() == in_memory(1, 2 if counts else 1)
        else:
            rows, alone = survivor.rows(), in_memory(1, 1)
            assert {name: one[3] for name, one in rows.items()} == {
                name: one[3] for name, one in (in_memory(1, 2) if counts else alone).items()
            }  # of the keys, and how often each was used
            assert (rows == alone) is not counts


def test_a_survivor_finishes_a_commit_that_one_server_has_heard_of(join):
    with serving(2) as addresses:
        dying, survivor = join(addresses, 1), join(addresses, 2)
        staged = [dying.stage(1, 0), survivor.stage(1, 1)]
        for each in staged:
            each.wait()
        parts = [list(each.part) for each in staged]
        dying.commits._peer(0).call(
            "commit", {"step": 1, "parts": parts, "scale": 1.0, "ack": {"parts": parts}}
        )
        dying.close()
        progress = survivor.commits.progress()
        assert [one.committed for one in progress] == [1, None]
        newest = max(progress, key=lambda one: one.committed or 0)
        survivor.commits.commit(1, newest.ack["parts"], 1.0, newest.ack)
        survivor.commits.abandon(1)
        assert [one.committed for one in survivor.commits.progress()] == [1, 1]
        assert survivor.rows() == in_memory(1, 2)


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_a_capture_has_the_committed_steps_and_nothing_of_a_staged_one(join, tmp_path, mode):
    def saved(trainer, step):
        checkpoint = kv.Checkpoints(tmp_path).save(step, {}, trainer.engine).wait()
        found = {}
        for name in checkpoint.manifest.tables:
            columns = [np.concatenate(each) for each in zip(*checkpoint.parts(name), strict=True)]
            order = columns[0].argsort()
            found[name] = [column[order].tolist() for column in columns]
        return found

    with serving(2, checkpoints=str(tmp_path)) as addresses:
        trainers = [join(addresses, member, mode) for member in range(2)]
        committed = {name: [[]] * 5 for name in trainers[0].rows()}
        for step in (1, 2):
            staged = [trainer.stage(step, number) for number, trainer in enumerate(trainers)]
            for each in staged:
                each.wait()
            assert saved(trainers[0], 2 * step) == committed
            commit(trainers, step, staged)
            committed = saved(trainers[1], 2 * step + 1)
            assert committed == trainers[0].rows()
        if mode == "sync":
            assert committed == in_memory(2, 2)


def test_lookups_run_ahead_and_are_bounded_by_uncommitted_batches(join):
    with serving(1) as addresses:
        trainer = join(addresses, 0, "hybrid")
        for step in range(1, 7):
            commit([trainer], step, [trainer.stage(step, 0)])
        assert trainer.store.staleness.most == 1
        kept = [trainer.stage(7, number) for number in range(3)]
        assert trainer.store.staleness.most == 3
        commit([trainer], 7, kept)
        trainer.stage(8, 0).wait()
        assert trainer.store.staleness.most == 3


def test_an_abandoned_member_is_refused(join):
    with serving(1) as addresses:
        one, other = join(addresses, 1), join(addresses, 2)
        one.stage(1, 0).wait()
        other.commits.abandon(1)
        with pytest.raises(RefusedError, match="member 1, abandoned by the others"):
            one.stage(1, 1)
        with pytest.raises(RefusedError, match="member 1, abandoned by the others"):
            join(addresses, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_server_loss": ServerLoss.RELOAD}, "expected on_server_loss rollback, got reload"),
        ({"mode": ASYNC, "dense": DenseSettings(grads_to_wait=2)}, "neither grads_to_wait nor tolerance"),
        ({"run": ""}, "a name that its members share, got none"),
    ],
)
def test_what_an_elastic_run_cannot_have_is_an_error(options, message):
    settings = ConnectionSettings(**{"kind": "remote", "elastic": True, "run": "a", **options})
    with pytest.raises(ValueError, match=message):
        Connection(settings).reach(["127.0.0.1:1"])
