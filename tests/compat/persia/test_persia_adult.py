"""PERSIA's Adult example, in one process: it learns as much as there, and the same bits every time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from persia_job import PersiaJob

HERE = Path(__file__).parent / "adult"
ADULT = HERE.parent.parent.parent.parent.parent / "shared" / "data" / "adult"
GATE = 0.89

pytestmark = pytest.mark.skipif(not ADULT.exists(), reason="needs the Adult data")


def environment(**more):
    """The variables of PERSIA's example."""
    return {
        **os.environ,
        "PERSIA_EMBEDDING_CONFIG": str(HERE / "embedding_config.yml"),
        "ADULT_DATA": str(ADULT),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def result_of(output):
    """Rows of each server and AUC, as the trainer prints them."""
    rows, auc = re.search(r"rows \[(.*)\], auc (\S+)", output).groups()
    return [int(each) for each in rows.split(",")], float(auc)


@pytest.mark.slow
def test_it_reaches_its_auc_twice_with_identical_bits():
    command = [sys.executable, "-m", "karvan", "run", "--as", "persia", str(HERE / "train.py")]
    runs = [
        subprocess.run(command, env=environment(ADULT_ALONE="1"), capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    (rows, auc), again = (result_of(run.stdout) for run in runs)
    assert ((rows, auc)) == again
    assert rows == [102]
    assert auc >= GATE


@pytest.mark.slow
def test_roles_compute_the_bits_of_one_process(tmp_path):
    limited = {**environment(ADULT_BATCHES="60")}
    command = [sys.executable, "-m", "karvan", "run", "--as", "persia", str(HERE / "train.py")]
    alone = subprocess.run(command, env={**limited, "ADULT_ALONE": "1"}, capture_output=True, text=True)
    _, expected = result_of(alone.stdout)
    roles = {
        "nn-worker": [[HERE / "train.py"]],
        "data-loader": [[HERE / "data_loader.py"]],
        "embedding-worker": [["--port", 0]],
        "embedding-parameter-server": [["--port", 0]],
    }
    job = PersiaJob(tmp_path, {}, **limited)
    try:
        _, received = result_of(job.run(roles, list(roles)))
    finally:
        job.close()
    assert received == expected
