"""Predictions of trainers that come and go: the files have every record once, whoever dies when."""

import json
from collections import Counter

from elastic_jobs import elastic_job


ROWS = {"servers": 1}


def job_of(folder, **options):
    settings = {"program": "predicting_trainer", "CALLS": "predict", "records": 300, "epochs": 1}
    return elastic_job(folder, **{**settings, **options})


def check(job, number=1, value=0.0):
    """Every record is in the files of a prediction once, with this value, and files say what they have."""
    files = sorted((job.notes / f"predictions-{number}").glob("[0-9]*"))
    batches = [json.loads(path.read_text()) for path in files]
    assert [int(path.name) for path in files] == [each["number"] for each in batches]
    assert [each["number"] for each in batches] == list(range(len(batches)))
    assert Counter(n for each in batches for n in each["record"]) == Counter(range(job.records))
    assert {value for each in batches for value in each["output"]} == {value}
    for each in batches:
        part = int(each["path"].removesuffix(".parquet")[-1])  # which has every third record
        first = 3 * each["first"] + part
        assert each["record"] == list(range(first, first + 3 * each["count"], 3))


def noted(job, trainer, folder="predictions-1"):
    """The numbers of the batches that a trainer has written."""
    path = job.notes / f"predicted-{trainer.pid}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.split()[0] == folder]


def test_a_killed_trainer_leaves_what_it_has_not_acknowledged_to_others(tmp_path):
    with job_of(tmp_path, PAUSE=0.05) as job:
        dead, other = job.start(), job.start()
        job.wait(lambda: min(len(noted(job, each)) for each in (dead, other)) > 3)
        job.kill(dead)
        joiner = job.start()
        job.wait(lambda: noted(job, joiner))
        job.hurry()
        job.results(2)
        check(job)
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
        check(job, value=1.0)
        assert noted(job, joiner)[-1] == "ended"
