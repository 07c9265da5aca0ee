"""Elastic jobs in mode async: every record counts once, in rows and dense parameters, whoever dies when."""

import random
import signal

import pytest
from elastic_jobs import elastic_job
from hypothesis import given
from hypothesis import strategies as st

from karvan.train.async_fit import TrainedBatches

ASYNC = {"KARVAN_MODE": "async", "KARVAN_STALENESS": 4, "servers": 2}


def check(job, results):
    """Every record was trained once in every epoch, by its parameter and by its row."""
    for result in results:
        assert result["times"] == [float(job.epochs)] * job.records
        assert result["rows"] == [float(job.epochs)] * job.records
        assert result["samples"] == job.epochs * job.records


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9))), max_size=8), st.integers(1, 5))
def test_steps_do_not_depend_on_how_often_a_trainer_hears_of_batches(rounds, world):
    """rounds: so many batches, of which a trainer has heard at these moments."""
    one, other = TrainedBatches(), TrainedBatches()
    total = steps = others = 0
    for batches, moments in rounds:
        for heard in sorted(moments):
            others += other.advance({"batches": total + min(heard, batches)}, world)[0]
        total += batches
        steps += one.advance({"batches": total}, world)[0]
        others += other.advance({"batches": total}, world)[0]
        assert others == steps == total // world
    assert one.end_epoch() == other.end_epoch() == int(total % world > 0)


@pytest.mark.parametrize("pull_every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_trainers_train_every_record_once(tmp_path, pull_every):
    with elastic_job(tmp_path, least=2, records=240, PULL_EVERY=pull_every, **ASYNC) as job:
        trainers = [job.start(), job.start()]
        results = job.results(2)
        check(job, results)
        # 30 batches in an epoch, by two trainers: a step is as many batches as there are trainers.
        assert [result["step"] for result in results] == [30, 30]
        assert [trainer.wait() for trainer in trainers] == [0, 0]
    (newest,) = [path for path in job.checkpoints.glob("step-*") if path.name.endswith("030")]
    assert newest.is_dir()


@pytest.mark.slow
def test_nobody_waits_for_a_slow_trainer(tmp_path):
    with elastic_job(tmp_path, least=2, epochs=1, SAVE_EVERY=1000, **ASYNC) as job:
        slow, fast = job.start(PAUSE=1.0), job.start(PAUSE=0.05)
        job.wait(lambda: job.step(slow)[0] and job.step(fast)[0] > 25)  # 75 batches: 38 steps of both
        assert job.batches(slow) < 10 < job.batches(fast)
        job.hurry()
        check(job, job.results(2))


@pytest.mark.parametrize("server", [pytest.param(-1, marks=pytest.mark.slow), 0, 1])
def test_a_trainer_that_dies_in_its_commit_counts_at_all_servers_or_at_none(tmp_path, server):
    with elastic_job(tmp_path, least=2, records=240, PAUSE=0.05, **ASYNC) as job:
        dying = job.start(DIE_AT=f"4,{server}")
        job.start()
        job.note_end(dying)
        job.hurry()
        check(job, job.results(1))


@pytest.mark.parametrize("part", ["model", pytest.param("transform", marks=pytest.mark.slow)])
def test_a_record_that_raises_an_error_is_skipped_and_all_others_count_once(tmp_path, part):
    settings = {"POISON": "31,100", "POISONED": part, "KARVAN_SKIP_BAD_RECORDS": 4}
    with elastic_job(tmp_path, least=2, records=240, **settings, **ASYNC) as job:
        job.start(), job.start()
        times = [0.0 if number in (31, 100) else 2.0 for number in range(240)]
        for result in job.results(2):
            assert result["times"] == result["rows"] == times
            assert result["bad_records"] == 4


@pytest.mark.slow
def test_trainers_meet_when_it_is_time_to_save(tmp_path):
    with elastic_job(tmp_path, least=2, PAUSE=0.1, SAVE_EVERY=1000, SAVE_SECONDS=1, **ASYNC) as job:
        trainers = [job.start(), job.start()]
        job.wait(lambda: list(job.checkpoints.glob("step-*")))
        for trainer in trainers:
            job.kill(trainer)
        job.hurry()
        job.start(), job.start()
        results = job.results(2)
        check(job, results)
        assert max(result["trained"] for result in results) < 76  # all steps: some were made before


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_a_joiner_that_is_left_alone_before_it_has_the_state(tmp_path, saves):
    every = 4 if saves else 1000
    with elastic_job(tmp_path, PAUSE=0.1, records=240, SAVE_EVERY=every, **ASYNC) as job:
        first = job.start(DIE_SHARING=1)
        job.wait(lambda: job.step(first)[0] > 5)
        assert bool(list(job.checkpoints.glob("step-*"))) == saves
        job.hurry()
        joiner = job.start()
        job.note_end(first)
        if saves:
            check(job, job.results(1))
        else:
            assert joiner.wait() != 0
            assert "batches of the job are gone, and there is no checkpoint" in joiner.log.read_text()


@pytest.mark.slow
def test_a_trainer_that_is_asked_to_leave_returns_its_records(tmp_path):
    with elastic_job(tmp_path, least=2, PAUSE=0.1, **ASYNC) as job:
        one, two = job.start(), job.start()
        job.wait(lambda: min(job.step(each)[0] for each in (one, two)) > 2)
        one.send_signal(signal.SIGTERM)
        assert one.wait() == 0
        job.hurry()
        check(job, job.results(1))


def test_a_trainer_that_leaves_gives_its_metrics_to_another_one(tmp_path):
    with elastic_job(tmp_path, least=3, PAUSE=0.1, epochs=1, COUNTED=1, **ASYNC) as job:
        trainers = [job.start(), job.start(), job.start()]
        job.wait(lambda: min(job.batches(each) for each in trainers) > 2)
        first = next(each for each in trainers if each.name == job.group.members[0])  # which reports
        other = next(each for each in trainers if each.name == job.group.members[2])
        for leaver in (first, other):
            leaver.send_signal(signal.SIGTERM)
            assert leaver.wait() == 0
        job.hurry()
        (result,) = job.results(1)
        assert result["metrics"] == {"samples": job.records}


@pytest.mark.slow
def test_all_trainers_that_are_asked_to_leave_save_together(tmp_path):
    with elastic_job(tmp_path, least=2, PAUSE=0.1, SAVE_EVERY=1000, **ASYNC) as job:
        trainers = [job.start(), job.start()]
        job.wait(lambda: min(job.step(each)[0] for each in trainers) > 2)
        for trainer in trainers:
            trainer.send_signal(signal.SIGTERM)
        for trainer in trainers:
            assert trainer.wait() == 0
            job.group.remove(trainer.name)
        job.hurry()
        job.start(), job.start()
        check(job, job.results(2))


@pytest.mark.slow
def test_a_trainer_that_was_only_silent_cannot_train_any_more(tmp_path):
    with elastic_job(tmp_path, least=2, PAUSE=0.1, records=1200, lost_after=3.0, **ASYNC) as job:
        other, silent = job.start(), job.start()
        job.wait(lambda: min(job.step(each)[0] for each in (silent, other)) > 4)
        if job.group.members[0] == silent.name:  # the first one has the folder for as long as it exists
            other, silent = silent, other
        silent.send_signal(signal.SIGSTOP)
        job.wait(lambda: job.step(other)[1] == 1)
        silent.send_signal(signal.SIGCONT)
        assert silent.wait() != 0
        job.hurry()
        check(job, job.results(1))
        assert "The trainers have continued without" in silent.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_lose_and_double_nothing(tmp_path, seed):
    draw = random.Random(seed)
    with elastic_job(tmp_path, least=1, PAUSE=0.03, records=3000, SAVE_EVERY=7, **ASYNC) as job:
        alive = [job.start(), job.start(), job.start()]
        # Before that, only a new generation of servers has rows as they were at the beginning.
        job.wait(lambda: list(job.checkpoints.glob("step-*")))
        for _ in range(12):
            target = max((job.step(each)[0] for each in alive), default=0) + draw.randint(1, 12)
            job.wait(
                lambda target=target: (
                    any(job.step(each)[0] >= target for each in alive) or list(job.notes.glob("result-*"))
                ),
                120,
            )
            if list(job.notes.glob("result-*")):
                break
            for victim in draw.sample(alive, draw.choice([1, 1, 1, 2, len(alive)])):
                if victim.poll() is None:
                    job.kill(victim)
                alive.remove(victim)
            if draw.random() < 0.2:
                job.restart_master()
            while len(alive) < 3:
                alive.append(job.start())
        job.hurry()
        check(job, job.results(1, 180))
