"""Launched elastic jobs: trainers are killed, come and go; every record counts once, without a rollback."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_paths import support_path

from karvan.cli.main import main

PROGRAM = support_path("train/elastic_trainer.py")


class ElasticLaunch:
    """`karvan launch` of a job that counts how often each record is trained."""

    def __init__(self, folder, records=600, epochs=2, trainers="{replicas: 2}", pause=0.1, mode="hybrid"):
        self.folder, self.records, self.epochs = folder, records, epochs
        self.data, self.notes = folder / "data", folder / "notes"
        for each in (self.data, self.notes):
            each.mkdir()
        (self.data / "records").write_text(str(records))
        for part in range(3):
            mine = [number for number in range(records) if number % 3 == part]
            pq.write_table(pa.table({"record": pa.array(mine, pa.int64())}), self.data / f"{part}.parquet")
        arguments = [str(self.data), str(folder / "checkpoints"), str(self.notes), str(epochs)]
        settings = {"PAUSE": str(pause), "ROWS": "1"}
        section = f"{trainers[:-1]}, args: {json.dumps(arguments)}, env: {json.dumps(settings)}, threads: 1}}"
        (folder / "job.yaml").write_text(
            f"name: elastic\nentry: {PROGRAM}\nmode: {mode}\nsharding: dynamic\n"
            f"checkpoints: {folder / 'checkpoints'}\nmax_restarts: 1000\nrestart_window: 1\n"
            f"roles:\n  trainers: {section}\n  parameter_servers: {{replicas: 2, threads: 1}}\n"
        )
        self.log = folder / "log"
        command = [sys.executable, "-m", "karvan", "launch", str(folder / "job.yaml")]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def pids(self, role):
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                values = place.read_bytes().split(b"\0")
                checkpoints = f"KARVAN_CHECKPOINTS={self.folder / 'checkpoints'}".encode()
                if f"KARVAN_ROLE={role}".encode() in values and checkpoints in values:
                    found.append(int(place.parent.name))
        return found

    def worlds(self):
        """The steps and the number of trainers that living trainers have noted last."""
        found = {}
        for path in self.notes.glob("step-*"):
            with suppress(OSError, ValueError):
                step, world = path.read_text().split()
                if Path(f"/proc/{path.name.removeprefix('step-')}").exists():
                    found[int(path.name.removeprefix("step-"))] = (int(step), int(world))
        return found

    def wait(self, condition, seconds=120.0):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def wait_for_world(self, world, seconds=120.0):
        """Wait until this many trainers train together."""
        self.wait(
            lambda: len(self.worlds()) >= world and {each for _, each in self.worlds().values()} == {world},
            seconds,
        )

    def finish(self):
        (self.notes / "hurry").touch()
        assert self.process.wait(180) == 0, self.log.read_text()
        results = [json.loads(path.read_text()) for path in self.notes.glob("result-*[0-9]")]
        assert results
        for result in results:
            assert result["times"] == [float(self.epochs)] * self.records
            assert result["rows"] == [float(self.epochs)] * self.records
        return self.log.read_text()


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
@pytest.mark.parametrize("mode", ["hybrid", "sync"])
@pytest.mark.parametrize("seed", range(4))
def test_random_kills_lose_and_double_nothing(tmp_path, mode, seed):
    draw = random.Random(seed)
    with ElasticLaunch(tmp_path, records=4000, trainers="{replicas: 3}", pause=0.1, mode=mode) as job:
        job.wait(lambda: job.worlds())
        for _ in range(14):
            victims = draw.choices(
                ["trainer", "parameter-server", "master"], [6, 1, 1], k=draw.choice([1, 1, 2])
            )
            for role in victims:
                if pids := job.pids(role):
                    how = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(pids), signal.SIGKILL if role != "trainer" else how)
            time.sleep(draw.uniform(0.0, 6.0))
            if job.process.poll() is not None or list(job.notes.glob("result-*")):
                break
        job.finish()


def test_a_trainer_that_comes_too_late_finds_nothing_to_do(tmp_path):
    with ElasticLaunch(tmp_path, records=60, pause=0.3) as job:
        job.wait_for_world(2)
        os.kill(next(iter(job.worlds())), signal.SIGKILL)
        job.wait_for_world(1)
        text = job.finish()  # the other one ends before the replacement is there
    assert "nothing more to do" in text
