"""A launched job that grows and shrinks while it learns ends as good as one that is left alone."""

import pytest
from checkpoint_bits import assert_same, rows_of, state_of
from elastic_launch import ElasticLaunch
from support_paths import support_path

import karvan as kv
from karvan.cli.main import main

pytestmark = pytest.mark.slow


class ClickLaunch(ElasticLaunch):
    """A job that learns a click log."""

    program = support_path("launch/click_trainer.py")

    def write_data(self):
        log = kv.data.synthetic.ClickLog(users=200, items=100, categories=10)
        log.write(self.data, rows=self.records, files=8)


def train(folder, *, disturb, **options):
    """The AUC that a job ends with, and the bits of its parameters and rows."""
    folder.mkdir()
    trainers = "{replicas: 2, min: 1, max: 4}"
    with ClickLaunch(folder, records=120_000, trainers=trainers, **options) as job:
        if disturb:
            job.wait_for_world(2)
            for _ in range(2):
                assert main(["scale", str(folder / "job.yaml"), "trainers=4"]) == 0
                job.wait_for_world(4)
                assert main(["scale", str(folder / "job.yaml"), "trainers=1"]) == 0
                job.wait_for_world(1)
        results = job.results()
    assert len({result["auc"] for result in results}) == 1
    path = results[0]["path"]
    return results[0]["auc"], state_of(path), rows_of(path)


def test_the_auc_is_that_of_a_job_that_is_left_alone(tmp_path):
    alone, _, _ = train(tmp_path / "alone", disturb=False, pause=0.0)
    varying, _, _ = train(tmp_path / "varying", disturb=True, pause=0.2)
    assert alone > 0.7
    assert abs(varying - alone) < 0.001


def test_in_mode_sync_the_bits_are_those_of_a_job_that_is_left_alone(tmp_path):
    settings = {"mode": "sync\nglobal_batches: 4"}
    auc, state, rows = train(tmp_path / "alone", disturb=False, pause=0.0, **settings)
    varying_auc, varying_state, varying_rows = train(
        tmp_path / "varying", disturb=True, pause=0.2, **settings
    )
    assert varying_auc == auc
    assert_same(state, varying_state)
    assert rows == varying_rows != {}
