"""Small jobs, and one run of them that many tests look at."""

import pytest
from cli_helpers import Runner, write_clicks, write_jobs


@pytest.fixture
def run(capfd):
    return Runner(capfd)


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder)
    return folder


@pytest.fixture
def place(clicks, tmp_path):
    """A folder with data, config.yaml and job.py."""
    for name in ("train.parquet", "eval.parquet"):
        (tmp_path / name).symlink_to(clicks / name)
    write_jobs(tmp_path)
    return tmp_path


@pytest.fixture
def trained(place, run):
    """The same after `karvan train config.yaml`."""
    assert run("train", place / "config.yaml", "--quiet").code == 0
    return place


@pytest.fixture
def checkpoint(trained):
    """The newest checkpoint of the run."""
    newest = max((trained / "run").glob("step-*"))
    assert newest.name == "step-000000000048"
    return newest
