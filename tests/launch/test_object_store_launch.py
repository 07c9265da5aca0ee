"""Launched jobs whose checkpoints are at a URL."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from chaos_helpers import LaunchedJob
from elastic_launch import ElasticLaunch
from object_stores import KEYS, object_store
from support_paths import support_path

import karvan as kv

RECORDS = 960


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


class URLJob(LaunchedJob):
    """A job with two trainers and two servers, whose checkpoints are at a URL."""

    def __init__(self, folder, url, *arguments, **more):
        self.url = url
        folder.mkdir()
        super().__init__(folder, *arguments, **more)

    def start(self, command, **environment):
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "checkpoints": self.url}))
        return super().start(command, **environment)

    def pids(self, role):
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                values = place.read_bytes().split(b"\0")
                if {f"KARVAN_ROLE={role}".encode(), f"KARVAN_CHECKPOINTS={self.url}".encode()} <= {*values}:
                    found.append(int(place.parent.name))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reload", "rollback"])
def test_a_killed_server_takes_its_rows_from_the_url(store, tmp_path, loss):
    program = support_path("cluster/reload_program.py")
    more = {"trainers": 2, "pause": 0.1, "program": program, "write_data": write_records}
    extra = f"on_server_loss: {loss}\n"
    with URLJob(tmp_path / "job", store.url("job"), "hybrid", 4, extra=extra, **more) as job:
        job.wait_for_step(8)
        os.kill(job.pids("parameter-server")[0], signal.SIGKILL)
        job.wait_for_line("with the rows of step" if loss == "reload" else "Generation 1 begins")
        job.finish()
    newest = kv.Checkpoints(store.url("job")).latest()
    assert newest.verify() == []
    rows = np.concatenate([rows.vectors[:, 0] for rows in newest.parts("record")])
    assert {*rows.tolist()} <= {0.0, 1.0}
    if loss == "rollback":
        assert rows.tolist() == [1.0] * RECORDS


def write_records(folder):
    for part, ids in enumerate(np.array_split(np.arange(RECORDS), 4)):
        columns = {"record": ids, "label": ids.astype(np.float32)}
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")
