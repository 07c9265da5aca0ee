"""Launched elastic jobs: trainers are killed, come and go; every record counts once, without a rollback."""

import os
import signal

import pytest
from elastic_launch import ElasticLaunch

from karvan.cli.main import main


@pytest.mark.slow
def test_a_launched_job_restarts_a_killed_loader_and_nobody_goes_back(tmp_path):
    options = {"epochs": 1, "trainers": "{replicas: 1}", "servers": 1, "loaders": 1}
    with ElasticLaunch(tmp_path, records=300, **options) as job:
        job.wait_for_world(1)
        os.kill(job.pids("loader")[0], signal.SIGKILL)
        text = job.finish()
    assert "loader-0 was killed by SIGKILL; it is restarted." in text
    assert "Generation 1 begins" not in text
    assert job.pids("loader") == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_a_job_whose_only_trainer_is_preempted_is_not_done(tmp_path, mode):
    with ElasticLaunch(tmp_path, mode=mode, trainers="{replicas: 1}", servers=1) as job:
        job.wait_for_world(1)
        os.kill(*job.pids("trainer"), signal.SIGTERM)
        text = job.finish()
    assert "trainer-0 has left; it is restarted." in text


@pytest.mark.slow
def test_a_launched_job_replaces_a_trainer_and_nobody_goes_back(tmp_path):
    with ElasticLaunch(tmp_path, records=3000) as job:
        job.wait_for_world(2)
        os.kill(next(iter(job.worlds())), signal.SIGKILL)
        job.wait_for_world(1)
        job.wait_for_world(2)
        os.kill(job.pids("master")[0], signal.SIGKILL)
        text = job.finish()
    assert "was killed by SIGKILL; the others continue, and it is restarted." in text
    assert "Generation 1 begins" not in text
    assert job.pids("trainer") == job.pids("parameter-server") == []


@pytest.mark.slow
def test_a_job_grows_and_shrinks_while_it_runs(tmp_path, capsys):
    trainers = "{replicas: 2, min: 1, max: 4}"
    with ElasticLaunch(tmp_path, records=3000, trainers=trainers, pause=0.1) as job:
        job.wait_for_world(2)
        for _ in range(2):
            assert main(["scale", str(tmp_path / "job.yaml"), "trainers=4"]) == 0
            job.wait_for_world(4)
            assert main(["scale", str(tmp_path / "job.yaml"), "trainers=1"]) == 0
            job.wait_for_world(1)
        assert main(["scale", str(tmp_path / "job.yaml"), "trainers=5"]) != 0
        assert "expected 1 to 4 trainers, got 5" in capsys.readouterr().err
        text = job.finish()
    assert "Generation 1 begins" not in text


@pytest.mark.slow
def test_a_trainer_that_comes_too_late_finds_nothing_to_do(tmp_path):
    with ElasticLaunch(tmp_path, records=60, pause=0.3) as job:
        job.wait_for_world(2)
        os.kill(next(iter(job.worlds())), signal.SIGKILL)
        job.wait_for_world(1)
        text = job.finish()  # the other one ends before the replacement is there
    assert "nothing more to do" in text


@pytest.mark.slow
def test_a_bad_record_ends_the_job_at_once_or_is_skipped_when_it_is_launched_again(tmp_path):
    keys = "max_task_tries: 2\nmax_restarts: 1000\nrestart_window: 1"
    with ElasticLaunch(tmp_path, records=240, pause=0, restarts=keys, POISON="31") as job:
        assert job.process.wait(120) == 3
        text = job.log.read_text()
    record = f"record 10 of {job.data / '1.parquet'} (epoch"
    failure = f"{record} 0) failed 2 times. The last error: ValueError: 31 is poison ({job.program}, line "
    assert failure in text.splitlines()[-1]
    assert "Traceback" not in text
    assert "restarted" not in text
    assert job.pids("trainer") == []
    settings = (tmp_path / "job.yaml").read_text().replace("max_task_tries: 2", "skip_bad_records: 2")
    (tmp_path / "job.yaml").write_text(settings)
    job.launch()
    with job:
        text = job.finish(without=[31])
    for epoch in (0, 1):
        assert f"Skipped {record} {epoch}), bad record {epoch + 1} of the job: ValueError" in text
    assert "WARNING: 2 bad records skipped, because they raised errors." in text
