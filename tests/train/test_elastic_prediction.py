"""Predictions of trainers that come and go: the files have every record once, whoever dies when."""

import random
import signal
import time
from collections import Counter

import pyarrow.parquet as pq
import pytest
from elastic_jobs import elastic_job
from hypothesis import given
from hypothesis import strategies as st
from prediction_files import check_predictions, predicted_by

from karvan.distributed.elastic import Standing, Standings


def job_of(folder, **options):
    settings = {
        "program": "predicting_trainer",
        "CALLS": "predict",
        "records": 300,
        "epochs": 1,
        "lost_after": 60,
    }
    return elastic_job(folder, **{**settings, **options})


def noted(job, trainer, number=1):
    return predicted_by(job, trainer.pid, number)


def test_a_killed_trainer_leaves_what_it_has_not_acknowledged_to_others(tmp_path):
    with job_of(tmp_path, PAUSE=0.05) as job:
        dead, other = job.start(), job.start()
        job.wait(lambda: min(len(noted(job, each)) for each in (dead, other)) > 3)
        job.kill(dead)
        joiner = job.start()
        job.wait(lambda: noted(job, joiner))
        job.hurry()
        job.results(2)
        check_predictions(job)
        written = [noted(job, each) for each in (dead, other, joiner)]
        assert min(map(len, written)) > 1
        again = Counter(each for its in written for each in its if each != "ended")
        assert max(again.values()) <= 2
        assert sum(count - 1 for count in again.values()) <= 1  # the batch that was not acknowledged
        assert job.work.ledger.leases == job.work.ledger.waiting == []


def test_one_that_was_started_again_gets_the_model_of_the_others_while_they_predict(tmp_path):
    with job_of(tmp_path, CALLS="fit,predict", PAUSE=0.1, least=2, CHECKPOINTS=0) as job:
        dead, other = job.start(), job.start()
        job.wait(lambda: min(len(noted(job, each)) for each in (dead, other)) > 1)
        job.kill(dead)
        joiner = job.start()
        job.wait(lambda: noted(job, joiner))
        job.hurry()
        (one, two) = job.results(2)
        assert one["step"] == two["step"] > 0
        check_predictions(job, value=1.0)
        assert noted(job, joiner)[-1] == "ended"


def test_predictions_between_fits_have_the_model_of_their_time(tmp_path):
    with job_of(tmp_path, CALLS="predict,fit,predict,predict,fit,predict", least=2) as job:
        job.start(), job.start()
        job.results(2)
        for number, value in enumerate([0.0, 1.0, 1.0, 2.0], 1):
            check_predictions(job, number, value)


@pytest.mark.slow
def test_one_that_was_started_again_skips_what_is_over(tmp_path):
    calls = "fit,predict,fit,predict"
    with job_of(tmp_path, CALLS=calls, PAUSE=0.1, STEP_PAUSE=0.1, least=2) as job:
        dead, other = job.start(), job.start()
        job.wait(lambda: len(noted(job, dead, 1)) > 1)
        (job.notes / "hurry").touch()
        job.wait(lambda: "ended" in noted(job, other, 1))
        (job.notes / "hurry").unlink()
        step = job.step(other)[0]
        job.wait(lambda: job.step(other)[0] > step + 1)  # in the second fit
        job.kill(dead)
        second = job.start()
        job.wait(lambda: job.step(second)[1] == 2)
        job.hurry()
        job.wait(lambda: noted(job, other, 2))
        (job.notes / "hurry").unlink()
        job.kill(second)
        third = job.start()  # while the other one is in the last prediction
        job.wait(lambda: noted(job, third, 2))
        job.hurry()
        job.results(2)
        check_predictions(job, 1, 1.0)
        check_predictions(job, 2, 2.0)
        assert noted(job, second, 1) == noted(job, third, 1) == ["ended"]


def test_iterators_that_are_closed_early_leave_their_records_to_others(tmp_path):
    with job_of(tmp_path, CALLS="peek,predict", PAUSE=0.1, least=2) as job:
        trainers = [job.start(), job.start(), job.start()]
        job.wait(lambda: all("ended" in noted(job, each, 1) for each in trainers))
        job.hurry()
        job.results(3)
        peeked = [noted(job, each, 1) for each in trainers]
        assert [len(each) for each in peeked] == [3, 3, 3]
        check_predictions(job, 2)


MODES = {
    "sync": {"KARVAN_MODE": "sync"},
    "hybrid": {"KARVAN_MODE": "hybrid", "KARVAN_STALENESS": 4},
    "async": {"KARVAN_MODE": "async", "KARVAN_STALENESS": 4},
}


@pytest.mark.parametrize(
    "mode", ["async", *(pytest.param(m, marks=pytest.mark.slow) for m in ("sync", "hybrid"))]
)
def test_rows_on_servers_and_a_master_that_is_restarted(tmp_path, mode):
    with job_of(tmp_path, CALLS="fit,predict", PAUSE=0.1, least=2, servers=2, **MODES[mode]) as job:
        dead, other = job.start(), job.start()
        job.wait(lambda: min(len(noted(job, each)) for each in (dead, other)) > 1)
        job.restart_master()
        before = len(noted(job, other))
        job.wait(lambda: len(noted(job, other)) > before + 1)
        job.kill(dead)
        joiner = job.start()
        job.wait(lambda: noted(job, joiner))
        job.hurry()
        job.results(2)
        check_predictions(job, value=2.0)  # by its parameter and by its row


@pytest.mark.slow
def test_all_trainers_die_and_the_next_ones_predict_the_rest(tmp_path):
    with job_of(tmp_path, CALLS="fit,predict", PAUSE=0.1, least=2, servers=1) as job:
        trainers = [job.start(), job.start()]
        job.wait(lambda: min(len(noted(job, each)) for each in trainers) > 3)
        for each in trainers:
            job.kill(each)
        before = {number for each in trainers for number in noted(job, each)}
        job.hurry()
        new = [job.start(), job.start()]
        job.results(2)
        check_predictions(job, value=2.0)
        again = before & {number for each in new for number in noted(job, each)}
        assert len(again) <= 2  # those that were not acknowledged


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_kills(tmp_path, seed):
    draw = random.Random(seed)
    calls = "fit,predict,predict,fit,predict"
    with job_of(tmp_path, CALLS=calls, PAUSE=0.1, STEP_PAUSE=0.05, records=900, servers=1) as job:
        alive = [job.start(), job.start(), job.start()]
        job.wait(lambda: list(job.checkpoints.glob("step-*")))
        for _ in range(12):
            time.sleep(draw.uniform(0.0, 4.0))
            if list(job.notes.glob("result-*")):
                break
            for victim in draw.sample(alive, draw.choice([1, 1, 1, 2])):
                if victim.poll() is None:
                    job.kill(victim)
                alive.remove(victim)
            if draw.random() < 0.2:
                job.restart_master()
            while len(alive) < 3:
                alive.append(job.start())
        job.hurry()
        job.results(1, 180)
        for number, value in enumerate([2.0, 2.0, 4.0], 1):
            check_predictions(job, number, value)


def test_a_record_that_raises_an_error_is_named(tmp_path):
    with job_of(tmp_path, POISON=31, least=1) as job:
        trainer = job.start()
        assert trainer.wait() != 0
        text = trainer.log.read_text()
        assert f"record 10 of {job.data / '1.parquet'}" in text
        assert "this record is poison" in text


@pytest.mark.slow
def test_one_that_was_started_again_loads_a_checkpoint_while_others_predict_with_its_rows(tmp_path):
    with job_of(tmp_path, CALLS="load,predict", PAUSE=0.1, servers=2) as job:
        fitted = job.start(CALLS="fit")
        job.results(1)
        job.note_end(fitted)
        dead, other = job.start(), job.start()
        job.wait(lambda: min(len(noted(job, each)) for each in (dead, other)) > 1)
        job.kill(dead)
        joiner = job.start()
        job.wait(lambda: noted(job, joiner))
        job.hurry()
        job.results(3)
        check_predictions(job, value=2.0)


def test_tables_of_predictions_have_every_record_once(tmp_path):
    with job_of(tmp_path, CALLS="write", PAUSE=0.05) as job:
        dead, other = job.start(), job.start()
        job.wait(lambda: min(len(noted(job, each)) for each in (dead, other)) > 3)
        job.kill(dead)
        job.hurry()
        job.results(1)
        table = pq.read_table(sorted((job.notes / "written").glob("part-*.parquet")))
        assert sorted(table["record"].to_pylist()) == list(range(300))
        assert set(table["prediction"].to_pylist()) == {0.0}


def test_a_trainer_that_was_asked_to_leave_its_fit_predicts_nothing(tmp_path):
    with job_of(tmp_path, CALLS="fit,predict", STEP_PAUSE=0.2, least=2) as job:
        leaver, other = job.start(), job.start()
        job.wait(lambda: job.step(leaver)[1] == job.step(other)[1] == 2)
        leaver.send_signal(signal.SIGTERM)
        assert leaver.wait(60) == 0
        job.hurry()
        job.results(2)
        check_predictions(job, value=1.0)
        assert noted(job, leaver) == ["ended"]


def test_two_predictions_at_a_time_are_an_error(tmp_path):
    with job_of(tmp_path, CALLS="both") as job:
        trainer = job.start()
        assert trainer.wait() != 0
        assert "Expected one prediction at a time" in trainer.log.read_text()


standings = st.lists(
    st.builds(
        lambda call, begun, finished, actions: Standing(call, begun, begun or finished, actions, None),
        st.integers(1, 4),
        st.booleans(),
        st.booleans(),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
)


@given(standings)
def test_trainers_of_a_round_agree_on_who_shares_what_with_whom(said):
    found = Standings(said)
    ranks = range(len(said))
    if any(each.begun for each in said):
        assert found.first.begun  # it has what it shares
    assert found.together == (len({each.call for each in said}) == 1)
    for rank in ranks:
        skips = said[rank].call < found.passed
        if skips and not said[rank].knows:
            assert found.receives(rank)  # it has the model when it comes to the call of the others
        assert not (skips and said[rank].knows)  # nobody skips what it has not finished
        if said[rank].begun:
            assert not found.receives(rank)
    if found.shares and not found.first.begun:
        assert found.receives(found.leader)  # who begins alone, and shares what it loads
