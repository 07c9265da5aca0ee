"""Two jobs and one checkpoint folder: one of them trains, and no record is lost or doubled."""

import os
import signal
import sys

import numpy as np
import pytest
from chaos_helpers import LaunchedJob, mutual_tls
from processes import kill_family

SECURED = pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])


def launch_again(job, name):
    """The same job, as if from another machine; its output goes to a file of its own."""
    job.log = job.folder / name
    command = [sys.executable, "-m", "karvan", "launch", str(job.folder / "job.yaml")]
    return job.start(command, KARVAN_JOBS=str(job.folder / "jobs"))


@pytest.mark.slow
@SECURED
def test_a_second_launcher_is_refused_and_a_killed_first_one_is_replaced(tmp_path, secured):
    extra = mutual_tls(tmp_path) if secured else ""
    with LaunchedJob(tmp_path, "hybrid", 4, extra=extra) as job:
        job.wait_for_step(7)
        first, log = job.process, job.log
        [master] = job.pids("master")
        second = launch_again(job, "second")
        assert second.wait(60) == 2, job.log.read_text()
        refused = job.log.read_text()
        assert f"belongs to a run that is training: process {master} " in refused
        assert "Traceback" not in refused
        assert "Started" not in refused
        job.log = log
        job.wait_for_step(job.step() + 3)
        kill_family(first.pid)  # its machine dies
        first.wait()
        job.process = launch_again(job, "third")
        job.wait_for_line(f"is taken over from process {master} ")
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)
    assert not (tmp_path / "checkpoints" / ".karvan-owner.json").exists()


@pytest.mark.slow
@SECURED
def test_a_first_launcher_that_is_stopped_for_longer_than_its_lease_writes_nothing_more(
    tmp_path, secured, monkeypatch
):
    monkeypatch.setenv("KARVAN_LEASE_SECONDS", "3")
    extra = mutual_tls(tmp_path) if secured else ""
    with LaunchedJob(tmp_path, "hybrid", 4, extra=extra) as job:
        job.wait_for_step(7)
        first, log = job.process, job.log
        [master] = job.pids("master")
        os.kill(master, signal.SIGSTOP)
        try:
            job.process = launch_again(job, "second")
            job.wait_for_line("waiting 3 s for a renewal of its lease")
            job.wait_for_line("did not renew its lease for 3 s")
            job.wait_for_line("Started trainer-0")
            [taker] = [pid for pid in job.pids("master") if pid != master]
            os.kill(master, signal.SIGCONT)
            assert first.wait(60) == 2, log.read_text()
            assert f"was taken over by process {taker} " in log.read_text()
            job.finish()
        finally:
            first.kill()
        np.testing.assert_array_equal(job.records()[0], 1)
