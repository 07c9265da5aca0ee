"""A job on a Ray cluster whose checkpoints are at a URL: no folder that all nodes see is needed."""

import os
import signal

import pytest
import yaml
from engine_helpers import HAS_RAY, NEEDS_RAY
from object_stores import object_store
from ray_jobs import RayJob

import karvan as kv

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_RAY, reason=NEEDS_RAY)]


class URLJob(RayJob):
    def start(self, command):
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "checkpoints": self.url}))
        return super().start(command)


def test_a_job_on_ray_saves_to_a_url_and_resumes_from_it(tmp_path, ray_address, monkeypatch):
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "cache"))
    with object_store(tmp_path / "store") as store:
        # Nodes do not have the environment of the launcher, so the URL has the credentials.
        URLJob.url = store.url("job").replace("s3://", "s3://somebody:secret@")
        (tmp_path / "job").mkdir()
        with URLJob(tmp_path / "job", "sync", 1, pause=0.3, address=ray_address) as job:
            job.wait_for_step(12, 200)
            pid = int((tmp_path / "job" / "notes" / "step-0").read_text().split()[0])
            os.kill(pid, signal.SIGKILL)
            job.wait_for_line("Generation 1 begins", 120)
            job.finish()
        assert kv.checkpoint.verify(URLJob.url) == []
        assert kv.Checkpoints(URLJob.url).latest().step > 12
    assert "secret" not in job.log.read_text()
    assert not any(tmp_path.glob("**/s3:*"))
