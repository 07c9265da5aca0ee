"""What trainers of `predicting_trainer.py` have predicted, in the folder of a job's notes."""

import json
from collections import Counter


def check_predictions(job, number=1, value=0.0):
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


def predicted_by(job, pid, number=1):
    """The numbers of the batches of a prediction that a trainer has written, and "ended" if it has."""
    path = job.notes / f"predicted-{pid}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.split()[0] == f"predictions-{number}"]
