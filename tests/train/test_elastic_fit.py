"""Trainers that come and go train every record exactly once in every epoch, without going back."""

import json
import os
import signal
from collections import Counter

import pytest
import torch
from elastic_jobs import elastic_job


@pytest.fixture
def job(tmp_path):
    with elastic_job(tmp_path, PAUSE=0.2) as made:
        yield made


def check(job, results):
    """Every record was trained once in every epoch, and all trainers have the same."""
    for result in results:
        assert result["times"] == [float(job.epochs)] * job.records
        assert result["samples"] == job.epochs * job.records
        assert result["step"] == results[0]["step"]
        assert result["evaluation"] == results[0]["evaluation"]


@pytest.mark.slow
def test_one_trainer_alone(job):
    job.hurry()
    job.start()
    (result,) = job.results(1)
    check(job, [result])
    assert result["step"] == result["trained"]


def test_a_trainer_that_is_killed_costs_nobody_a_step(tmp_path):
    with elastic_job(tmp_path, PAUSE=0.2, least=2, epochs=1, COUNTED=1) as job:
        for result in _kill_one(job):
            assert result["metrics"] == {"samples": job.records}  # those of the killed one, too
            assert result["evaluation"]["samples"] == job.records


def _kill_one(job):
    one, two = job.start(), job.start()
    job.wait(lambda: job.step(one)[1] == job.step(two)[1] == 2)
    before = job.step(two)[0]
    one.kill()
    job.wait(lambda: job.step(two)[0] > before and job.step(two)[1] == 1)
    three = job.start()
    job.wait(lambda: job.step(three)[1] == 2)
    job.hurry()
    results = job.results(2)
    check(job, results)
    assert [two.wait(60), three.wait(60)] == [0, 0]
    assert max(result["trained"] for result in results) == results[0]["step"]  # nobody went back
    return results


@pytest.mark.parametrize("servers", [0, 1])
def test_averages_have_the_same_bits_whoever_comes_and_goes(tmp_path, servers):
    with elastic_job(tmp_path, servers=servers, PAUSE=0.1, epochs=1, AVERAGED=1) as job:
        one = job.start()
        job.wait(lambda: job.step(one)[0] > 6)
        two = job.start()
        job.wait(lambda: job.step(two)[1] == 2)
        one.kill()
        job.wait(lambda: job.step(two)[1] == 1)
        two.kill()  # and the next one begins with a checkpoint
        three, four = job.start(), job.start()
        job.wait(lambda: job.step(three)[1] == job.step(four)[1] == 2)
        job.hurry()
        results = job.results(2)
        check(job, results)
        average = torch.load(job.notes / "parameters-1.pt")
        for step in range(2, results[0]["step"] + 1):
            average.lerp_(torch.load(job.notes / f"parameters-{step}.pt"), 1 - 0.75)
        assert not torch.equal(average, torch.ones(job.records))
        for result in results:
            assert torch.equal(torch.tensor(result["averages"]), average)


def test_averages_in_mode_async_are_an_error_before_training(tmp_path):
    with elastic_job(tmp_path, servers=1, KARVAN_MODE="async", AVERAGED=1) as job:
        trainer = job.start()
        assert trainer.wait(60) != 0
        assert "expected mode sync or hybrid, or no EMA" in trainer.log.read_text()
        assert not list(job.notes.glob("parameters-*"))


def test_a_trainer_that_is_terminated_finishes_its_batch_and_leaves(job):
    one, two = job.start(), job.start()
    job.wait(lambda: job.step(one)[1] == job.step(two)[1] == 2)
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 0, job.logs()
    job.wait(lambda: job.step(two)[1] == 1)
    job.hurry()
    check(job, job.results(1))


def test_all_trainers_die_and_the_next_ones_continue_from_the_checkpoint(job):
    one, two = job.start(), job.start()
    job.wait(lambda: min(job.step(one)[0], job.step(two)[0]) > 12)
    one.kill()
    two.kill()
    job.hurry()
    three = job.start()
    (result,) = job.results(1)
    check(job, [result])
    assert 0 < result["step"] - result["trained"] <= 15
    assert three.wait(60) == 0


def _other_data(job):
    """Tomorrow the job has other data, and another master."""
    (job.data / "2.parquet").unlink()
    job.restart_master()
    job.hurry()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_other_data_follows_a_fit_that_ended_by_max_steps_within_an_epoch(tmp_path, mode):
    servers = 1 if mode == "async" else 0
    with elastic_job(tmp_path, epochs=1, servers=servers, KARVAN_MODE=mode, MAX_STEPS=5) as job:
        job.start().wait(60)
        _other_data(job)
        job.start(MAX_STEPS=1000)
        assert sorted(each["trained"] for each in job.results(2)) == [5, 50], job.logs()


def test_data_whose_predecessor_was_not_trained_to_its_end_is_an_error_until_that_is_dropped(tmp_path):
    with elastic_job(tmp_path, epochs=1, PAUSE=0.2) as job:
        stopped = job.start()
        job.wait(lambda: job.step(stopped)[0] > 3)
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait(60) == 0
        _other_data(job)
        refused = job.start()
        assert refused.wait(60) == 1
        assert "not trained to its end" in refused.log.read_text()
        assert "drop_unfinished=True" in refused.log.read_text()
        job.start(DROP=1)
        (result,) = job.results(1)
        assert result["trained"] == 50, job.logs()


def test_all_trainers_are_terminated_and_save(job):
    one, two = job.start(), job.start()
    job.wait(lambda: min(job.step(one)[0], job.step(two)[0]) > 3)
    for trainer in (one, two):
        trainer.send_signal(signal.SIGTERM)
    assert [one.wait(60), two.wait(60)] == [0, 0]
    assert job.group.has_left(one.name)  # they have ended, but are not done
    assert job.group.has_left(two.name)
    stopped = max(job.step(one)[0], job.step(two)[0])
    resumed = job.start()
    job.wait(lambda: job.step(resumed)[0] > 20)
    job.hurry()
    (result,) = job.results(1)
    check(job, [result])
    assert result["step"] - result["trained"] == stopped
    history = [json.loads(line) for line in (job.checkpoints / "history.jsonl").read_text().splitlines()]
    first = next(each for each in history if each["kind"] == "train" and each["step"] > stopped)
    assert first["samples_per_second"] <= 40  # 8 in 0.2 s at most: without those before the resume


def test_a_master_that_is_restarted_is_found_again(job):
    one, two = job.start(), job.start()
    job.wait(lambda: job.step(one)[1] == job.step(two)[1] == 2)
    job.restart_master()
    before = job.step(one)[0]
    job.wait(lambda: job.step(one)[0] > before + 10)
    one.kill()
    job.hurry()
    check(job, job.results(1))


def test_a_trainer_that_hangs_or_dies_costs_an_evaluation_its_tasks_alone(tmp_path):
    with elastic_job(tmp_path, records=960, epochs=1, least=2) as job:
        hangs, other = job.start(HANG=1), job.start()
        job.wait(lambda: (job.notes / f"evaluated-{hangs.pid}").exists())

        def evaluated():
            path = job.notes / f"evaluated-{other.pid}"
            return [int(line) for line in path.read_text().split()] if path.exists() else []

        job.wait(lambda: not job.work.ledger.waiting)  # the other one takes all that is left
        leases = [each for each in job.work.ledger.leases if each.holder.startswith("trainer-0 ")]
        held = sum(each.task.records for each in leases)
        job.wait(lambda: len(evaluated()) == 960 - held)
        assert 0 < held < 480
        hangs.kill()
        (result,) = job.results(1)
        check(job, [result])
        assert result["evaluation"] == {"loss": 2.0}
        assert Counter(evaluated()) == Counter(range(960))  # what it had evaluated before was not lost
        assert job.work.ledger.leases == job.work.ledger.waiting == []


@pytest.mark.parametrize("both", [False, True])
def test_trainers_that_die_in_the_final_save_leave_it_to_others(tmp_path, both):
    with elastic_job(tmp_path, records=120, least=2, HOLD=1) as job:
        trainers = job.start(), job.start()
        (saver,) = job.wait(lambda: list(job.notes.glob("saves-*")))
        assert job.work.progress()["export"] == "open"
        for trainer in trainers:
            if both or saver.name == f"saves-{trainer.pid}":
                trainer.kill()
        if both:
            job.start(), job.start()
        job.wait(lambda: len(list(job.notes.glob("saves-*"))) == 2)
        assert job.work.progress()["export"] == "open"
        assert not list(job.notes.glob("result-*"))
        (job.notes / "save").touch()
        results = job.results(1 + both)
        check(job, results)
        assert job.work.progress()["export"] == "done"
        assert job.work.ledger.leases == job.work.ledger.waiting == []
        assert (job.checkpoints / f"step-{results[0]['step']:012d}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_kills(tmp_path, seed):
    import random

    order = random.Random(seed)
    with elastic_job(tmp_path, PAUSE=0.2, records=1500, epochs=2, SAVE_EVERY=7) as job:
        alive = [job.start(), job.start(), job.start()]
        job.wait(lambda: all(job.step(each)[1] for each in alive))
        for _ in range(8):
            job.wait(lambda: all(job.step(each)[1] for each in alive) or list(job.notes.glob("result-*")))
            if list(job.notes.glob("result-*[0-9]")):
                break
            victim = order.choice(alive)
            os.kill(victim.pid, order.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            victim.wait(60)
            alive.remove(victim)
            alive.append(job.start())
        job.hurry()
        check(job, job.results(1))
