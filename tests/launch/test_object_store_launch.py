"""Launched jobs whose checkpoints are at a URL."""

import os
import signal

import pytest
from elastic_launch import ElasticLaunch
from object_stores import KEYS, object_store

import karvan as kv


@pytest.fixture
def store(monkeypatch, tmp_path):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "cache"))
    with object_store(tmp_path / "store") as made:
        yield made


def launch(store, folder, **options):
    folder.mkdir()
    return ElasticLaunch(folder, checkpoints=store.url("job"), **options)


@pytest.mark.slow
def test_a_job_continues_on_another_machine_from_its_url(store, tmp_path, monkeypatch):
    with launch(store, tmp_path / "job", records=900, pause=0.2, SAVE_EVERY="5") as job:
        job.wait_for_world(2)
        os.kill(next(iter(job.worlds())), signal.SIGKILL)
        job.wait_for_world(1)
        job.wait(lambda: len(kv.Checkpoints(store.url("job")).list()) > 1)
        assert ".karvan-owner.json" in store.names("job")
        job.process.terminate()  # its trainers save
        job.process.wait(120)
    steps = [one.step for one in kv.Checkpoints(store.url("job")).list()]
    assert steps
    assert kv.checkpoint.verify(store.url("job")) == []
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "another"))
    job.launch()
    with job:
        job.wait_for_world(2)
        text = job.finish()
    assert "s3://bucket/job" in text
    assert kv.Checkpoints(store.url("job")).latest().step > steps[-1]
    assert not any((tmp_path / "job").glob("s3:*"))


def test_a_job_whose_url_cannot_be_used_ends_at_once(store, tmp_path):
    store.fail(status=403, method="PUT", match="job", count=100000)
    with launch(store, tmp_path / "job", records=60) as job:
        assert job.process.wait(180) == 3
    text = job.log.read_text()
    assert "s3://bucket/job: checkpoints cannot be written here" in text
    assert "Traceback" not in text
