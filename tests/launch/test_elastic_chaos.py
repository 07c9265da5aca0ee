"""Launched elastic jobs whose processes are killed and stopped at random: every record counts once.

Each run prints what was done to it (`-rP`), and leaves it in the file `disturbances` of its folder. Runs are
apart from each other: `-n 8` runs eight at a time.
"""

import re

import pytest
from checkpoint_bits import assert_same, rows_of, state_of
from elastic_chaos import Chaos, ChaosLaunch
from support_paths import support_path

pytestmark = pytest.mark.slow
KEPT = {"history.jsonl", "master", "work.db", "job.json", "lock", "logs", "outcome.json"}


def tell(folder, text):
    """Say how often a job was disturbed."""
    print(text)
    (folder / "disturbances").write_text(text)


def check_nothing_is_left(job):
    """No process of the job, and no file that only one that was killed could have left."""
    assert job.family() == []
    folders = [job.checkpoints, job.checkpoints / "master", job.run_folder]
    names = {path.name for folder in folders for path in folder.iterdir()}
    assert {name for name in names if not re.fullmatch(r"step-\d{12}", name)} <= KEPT


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("mode", ["hybrid", "sync", "async"])
def test_random_kills_and_stops_lose_and_double_nothing(tmp_path, mode, loaders, seed):
    with ChaosLaunch(tmp_path, mode=mode, loaders=loaders) as job:
        chaos = Chaos(job, seed)
        try:
            chaos.run()
            job.finish()
        finally:
            tell(tmp_path, f"mode {mode}, {loaders} loaders, seed {seed}: {chaos}")
        check_nothing_is_left(job)


class PlannedLaunch(ChaosLaunch):
    """A job whose steps have fixed batches."""

    program = support_path("train/planned_trainer.py")

    def __init__(self, folder, **options):
        options = {"records": 2000, "pause": 0.3, "SAVE_EVERY": "5", **options}
        super().__init__(folder, mode="sync", extra="global_batches: 4\n", **options)

    def bits(self):
        """What it ends with."""
        path = self.results()[0]["path"]
        return state_of(path), rows_of(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with PlannedLaunch(folder, environment={"KARVAN_JOBS": str(folder / "jobs")}) as job:
        return job.bits()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("loaders", [0, 2])
def test_random_kills_and_stops_change_no_bit(tmp_path, undisturbed, loaders, seed):
    with PlannedLaunch(tmp_path, loaders=loaders) as job:
        chaos = Chaos(job, seed)
        try:
            chaos.run()
            state, rows = job.bits()
        finally:
            tell(tmp_path, f"global_batches, {loaders} loaders, seed {seed}: {chaos}")
        check_nothing_is_left(job)
    assert_same(state, undisturbed[0])
    assert rows == undisturbed[1]
