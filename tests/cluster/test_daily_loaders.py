"""Tomorrow's data by loaders: the job's data section changes from day to day, the run continues."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from daily_training import fit
from role_loaders import Loaders

import karvan as kv

ROWS, BATCH = 40, 5
LOADER = ["-m", "karvan", "role", "loader"]


def write_day(folder, day):
    """Ids of its own for every day, in a file that is called the same every day."""
    path = folder / f"{day}"
    path.mkdir()
    pyarrow.parquet.write_table(
        pa.table({"id": np.arange(day * 1000, day * 1000 + ROWS)}), path / "part-0.parquet"
    )
    return json.dumps({"files": str(path), "batch_size": BATCH, "shuffle": 10})


def test_a_stream_continues_with_the_next_days_data_on_another_number_of_loaders(tmp_path):
    days = {day: write_day(tmp_path, day) for day in (1, 2)}
    run = tmp_path / "run"
    with Loaders(1, command=LOADER, KARVAN_DATA=days[1]) as loaders:
        assert loaders.stream().identity() == kv.data.read(str(tmp_path / "1"), 3).identity()
        assert fit(loaders.stream(), run, stop_at=3)[0].step == 3
        with Loaders(2, command=LOADER, KARVAN_DATA=days[2]) as others:
            with pytest.raises(ValueError, match="trained 0 epochs and 3 batches"):
                fit(others.stream(), run)
            assert fit(loaders.stream(), run)[0].step == 8
            assert fit(others.stream(), run, stop_at=11)[0].step == 11
            result, times = fit(others.stream(), run)
            assert (result.step, result.epoch) == (16, 1)
            assert fit(others.stream(), run)[0].trained == 0
    assert times == {day * 1000 + each: 1.0 for day in (1, 2) for each in range(ROWS)}


@pytest.mark.parametrize("mode", ["epochs", "once"])
def test_loaders_that_send_batches_themselves_have_the_identity_of_the_jobs_data(mode, monkeypatch):
    with Loaders(1, mode, ROWS, BATCH) as loaders:
        assert loaders.stream().identity() is None
        found = []
        for files in ("day=15", "day=16", "day=15"):
            monkeypatch.setenv("KARVAN_DATA", json.dumps({"files": files}))
            found.append(loaders.stream().identity().id)
    assert found[0] == found[2] != found[1]


PROGRAM = """
import os
import karvan as kv
kv.connect("remote", timeout=60)
from daily_training import fit
result, times = fit(kv.data.from_loaders(timeout=60), os.environ["KARVAN_CHECKPOINTS"])
ids = sorted({key // 1000 for key in times})
print("SEEN", result.step, result.trained, ids, set(times.values()), flush=True)
"""


@pytest.mark.slow
def test_a_launched_job_continues_when_its_data_section_changes(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)

    def launch(data):
        job = tmp_path / "job.yaml"
        job.write_text(
            f"name: daily\nentry: {program}\nmode: sync\ncheckpoints: {tmp_path}/run\n"
            f"roles: {{trainers: 1, parameter_servers: 1, loaders: 2}}\ndata: {data}\n"
        )
        command = [sys.executable, "-m", "karvan", "launch", str(job)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    days = {day: write_day(tmp_path, day) for day in (1, 2)}
    assert "SEEN 8 8 [1] {1.0}" in launch(days[1])
    assert "SEEN 16 8 [1, 2] {1.0}" in launch(days[2])
    assert "SEEN 16 0 [1, 2] {1.0}" in launch(days[2])
