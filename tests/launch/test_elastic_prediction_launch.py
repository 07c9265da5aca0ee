"""Launched elastic jobs that predict: trainers and masters are killed, and every record is predicted once."""

import os
import signal

import pytest
from elastic_launch import ElasticLaunch
from prediction_files import check_predictions, predicted_by
from support_paths import support_path

pytestmark = pytest.mark.slow


class PredictionLaunch(ElasticLaunch):
    """A job whose trainers write their predictions."""

    program = support_path("train/predicting_trainer.py")

    def predicting(self, least=1):
        """The trainers that run, and have written as many batches."""
        return [pid for pid in self.pids("trainer") if len(predicted_by(self, pid)) >= least]


def kill_while_it_predicts(job):
    """Kill one of two trainers, then the master, and check that all is predicted without going back."""
    job.wait(lambda: len(job.predicting(2)) == 2)
    dead, other = job.predicting()
    os.kill(dead, signal.SIGKILL)
    job.wait(lambda: len(set(job.predicting()) - {dead}) == 2)  # the one that replaces it takes part
    before = len(predicted_by(job, other))
    os.kill(job.pids("master")[0], signal.SIGKILL)
    job.wait(lambda: len(predicted_by(job, other)) > before + 2)
    job.results()
    text = job.log.read_text()
    assert "was killed by SIGKILL; the others continue, and it is restarted." in text
    assert "Generation 1 begins" not in text
    assert job.pids("trainer") == job.pids("parameter-server") == []


OPTIONS = {"records": 1500, "epochs": 1, "pause": 0.5, "CALLS": "fit,predict"}


def test_a_launched_job_predicts_after_training_and_again_when_it_is_launched_again(tmp_path):
    with PredictionLaunch(tmp_path, **OPTIONS) as job:
        kill_while_it_predicts(job)
    check_predictions(job, value=2.0)
    for path in (*job.notes.glob("predict*/*"), *job.notes.glob("predicted-*"), job.notes / "hurry"):
        path.unlink()
    settings = (tmp_path / "job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(settings.replace("fit,predict", "load,predict"))
    job.launch()
    with job:
        kill_while_it_predicts(job)
    check_predictions(job, value=2.0)


def test_a_launched_job_of_mode_async_predicts_after_training(tmp_path):
    with PredictionLaunch(tmp_path, mode="async", **OPTIONS) as job:
        kill_while_it_predicts(job)
    check_predictions(job, value=2.0)
