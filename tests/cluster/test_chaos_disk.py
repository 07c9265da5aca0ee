"""Launched jobs whose disk fills, empties and is made read-only: every record is trained once."""

import re
import time

import numpy as np
import pytest
from chaos_helpers import LaunchedJob, mutual_tls
from small_disk import small_disk


def wait_for(job, condition, what):
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, f"waited for {what}:\n{job.log.read_text()}"
        assert job.process.poll() is None, job.log.read_text()
        time.sleep(0.02)


def newest(disk):
    return max((path.name for path in disk.folder.glob("step-*")), default="")


def failures(job):
    return re.findall(r"The checkpoint of step (\d+) was NOT saved", job.log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])
def test_a_disk_fills_and_empties_and_is_read_only_for_a_while(tmp_path, secured):
    extra = mutual_tls(tmp_path) if secured else ""
    with (
        small_disk(tmp_path / "checkpoints", "16m") as disk,
        LaunchedJob(tmp_path, "hybrid", 4, loaders=1, workers=1, pause=0.2, extra=extra) as job,
    ):
        wait_for(job, lambda: newest(disk), "the first checkpoint")
        for begin, end in ((disk.fill, disk.empty), (disk.make_read_only, disk.make_writable)):
            before, count = newest(disk), len(failures(job))
            begin()
            wait_for(job, lambda count=count: len(failures(job)) > count, "a failed save")
            assert newest(disk) >= before  # what was there has stayed
            end()
            wait_for(job, lambda before=before: newest(disk) > before, "a newer checkpoint")
        job.kill("trainer", 3)
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)
        log = job.log.read_text()
    assert "No space left on device" in log
    assert "Read-only file system" in log
    assert "Traceback" not in log
    # Each failure was reported once, unless the job has gone back and met it again.
    assert "Generation 1" in log
    first = log.partition("Generation 1")[0]
    steps = re.findall(r"The checkpoint of step (\d+) was NOT saved", first)
    assert len(steps) == len(set(steps))


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_trainers_as_a_temporary_failure_until_it_is_empty(tmp_path):
    with (
        small_disk(tmp_path / "checkpoints", "16m") as disk,
        LaunchedJob(tmp_path, "sync", 1, trainers=2, pause=0.05) as job,
    ):
        wait_for(job, lambda: newest(disk), "the first checkpoint")
        disk.fill()
        wait_for(job, lambda: job.log.read_text().count("(a temporary failure)") >= 4, "four temporary ends")
        disk.empty()
        job.finish()
        np.testing.assert_array_equal(job.records()[1], 1)
        log = job.log.read_text()
    assert "Traceback" not in log
    assert re.search(r"trainer-\d \| error: .*No space left on device", log)
