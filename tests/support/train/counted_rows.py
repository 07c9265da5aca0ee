"""Elastic jobs with rows on servers: their modes, rows that count records, and jobs with fixed batches."""

from checkpoint_bits import rows_of, state_of
from elastic_jobs import elastic_job

MODES = {
    "hybrid": {"KARVAN_MODE": "hybrid", "KARVAN_STALENESS": 4},
    "sync": {"KARVAN_MODE": "sync"},
    "async": {"KARVAN_MODE": "async", "KARVAN_STALENESS": 4},
}


def check(job, results):
    """Every record was trained once in every epoch, by its parameter and by its row."""
    for result in results:
        assert result["times"] == [float(job.epochs)] * job.records
        assert result["rows"] == [float(job.epochs)] * job.records
        assert result["samples"] == job.epochs * job.records


def train_planned(folder, trainers, disturb=None, **options):
    """The state and the rows that a job with fixed batches ends with."""
    folder.mkdir()
    options = {"KARVAN_GLOBAL_BATCHES": 3, "records": 200, "epochs": 2, **MODES["sync"], **options}
    with elastic_job(folder, program="planned_trainer", servers=2, least=trainers, **options) as job:
        started = [job.start() for _ in range(trainers)]
        if disturb is not None:
            disturb(job, started)
        job.hurry()
        path = job.results(1)[0]["path"]
        return state_of(path), rows_of(path)
