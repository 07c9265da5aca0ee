"""Launched jobs in which a process lives but does nothing: it is reported, with its stacks, and replaced."""

import time
from pathlib import Path

import numpy as np
import pytest
from chaos_helpers import LaunchedJob, mutual_tls
from support_paths import support_path

LOADER = support_path("cluster/stall_loader.py")
TRAINER = support_path("cluster/stall_trainer.py")


def extra_of(folder, secured, more=""):
    return f"stall_timeout: 15\n{more}{mutual_tls(folder) if secured else ''}"


def wait_for(condition, job, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, job.log.read_text()
        time.sleep(0.05)


def stacks_of(job, name):
    return "\n".join(line for line in job.log.read_text().splitlines() if line.startswith(f"{name} | "))


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])
def test_the_only_trainer_whose_main_thread_blocks_is_replaced(tmp_path, secured):
    extra = extra_of(tmp_path, secured)
    with LaunchedJob(tmp_path, "hybrid", 4, extra=extra, program=TRAINER) as job:
        job.wait_for_step(7)
        before = job.pids("trainer")
        (tmp_path / "notes" / "block").touch()
        job.wait_for_line("trainer-0 has made no progress for")
        job.wait_for_line("trainer-0 was killed by SIGKILL")
        assert "block_for_ever" in stacks_of(job, "trainer-0")
        (tmp_path / "notes" / "block").unlink()
        wait_for(lambda: set(job.pids("trainer")) - set(before), job)
        job.finish()
        np.testing.assert_array_equal(job.records()[0], 1)


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_loader_whose_source_hangs_is_replaced_and_nobody_else(tmp_path, trainers, secured):
    more = f"loader_entry: {LOADER}\n"
    roles = {"trainers": trainers, "loaders": 1, "workers": 1}
    with LaunchedJob(tmp_path, "hybrid", 4, **roles, extra=extra_of(tmp_path, secured, more)) as job:
        job.wait_for_step(5)
        others = {role: job.pids(role) for role in ("trainer", "parameter-server", "embedding-worker")}
        (tmp_path / "notes" / "hang").touch()
        job.wait_for_line("loader-0 has made no progress for")
        job.wait_for_line("loader-0 was killed by SIGKILL")
        (tmp_path / "notes" / "hang").unlink()
        assert "hang_for_ever" in stacks_of(job, "loader-0")
        said = next(line for line in job.log.read_text().splitlines() if "loader-0 has made no" in line)
        assert "for it" in said
        assert "trainer-" in said  # the others wait for that one
        step = job.step()
        job.wait_for_step(step + 3)
        assert {role: job.pids(role) for role in others} == others
        job.finish()
        if trainers == 1:
            np.testing.assert_array_equal(job.records()[0], 1)
        assert job.log.read_text().count("has made no progress") == 1


@pytest.mark.slow
def test_code_of_the_user_between_fits_may_take_long(tmp_path):
    with LaunchedJob(tmp_path, "sync", 1, extra="stall_timeout: 3\n", program=TRAINER) as job:
        (tmp_path / "notes" / "dawdle").touch()
        wait_for((tmp_path / "notes" / "dawdling").exists, job)
        time.sleep(8)  # more than twice the time that a fit would have
        (tmp_path / "notes" / "dawdle").unlink()
        job.finish()
        assert "no progress" not in job.log.read_text()
        assert Path(tmp_path / "notes" / "done-0").exists()
