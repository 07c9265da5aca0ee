"""Trainers that come and go, and lease records that loaders read: every record counts once, whoever dies."""

import torch
from elastic_jobs import elastic_job

from karvan.checkpoint import find


def assert_once(job, results):
    for result in results:
        assert result["times"] == [float(job.epochs)] * job.records
        assert result["samples"] == job.epochs * job.records


def test_a_trainer_and_a_loader_are_killed_and_every_record_counts_once(tmp_path):
    with elastic_job(tmp_path, least=2, records=1600, epochs=1, loaders=2, PAUSE=0.2) as job:
        first, second = job.start(), job.start()
        job.wait(lambda: min(job.step(first), job.step(second)) > (2, 0))
        job.loaders[0].kill()
        before = job.step(second)[0]
        job.wait(lambda: job.step(second)[0] > before + 5)  # the other loader reads for both
        job.start_loader(0, 2)
        first.kill()
        third = job.start()
        job.wait(lambda: job.step(third)[1] == 2)
        job.loaders[1].kill()
        before = job.step(third)[0]
        job.wait(lambda: job.step(third)[0] > before + 5)
        job.hurry()
        assert_once(job, job.results(2))
        assert "Traceback" not in job.logs()


def test_statistics_of_a_loaders_transform_are_in_checkpoints_and_joiners_have_them(tmp_path):
    program = "train/elastic_loader.py"
    with elastic_job(tmp_path, records=1200, loaders=2, loader_program=program, epochs=1, PAUSE=0.2) as job:
        first = job.start()
        job.wait(lambda: job.step(first)[0] > 3)
        second = job.start()
        job.wait(lambda: job.step(second)[1] == 2)
        first.kill()
        job.hurry()
        assert_once(job, job.results(1))
        saved = find(job.checkpoints).state()["transforms"]["scale"]
        assert torch.isfinite(torch.as_tensor(saved["_extra_state"]["scaled"])).all()
