"""Launched jobs of two trainers that fail: the reason once, no traceback of those that merely follow."""

import subprocess
import sys

import pytest
from support_paths import support_path


def launch(folder, how):
    (folder / "job.yaml").write_text(
        f"name: failing\nentry: {support_path('cluster/failing_trainer.py')}\nmode: sync\n"
        f"checkpoints: {folder / 'run'}\n"
        f"roles: {{trainers: {{replicas: 2, args: [{how}], threads: 1}}, parameter_servers: 1}}\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "karvan", "launch", str(folder / "job.yaml")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("usage", 2, "error: checkpoint_every must be at least 1 or None, got 0."),
        ("data", 3, "error: nowhere/*.parquet: There is no such file"),
    ],
)
def test_an_error_of_karvan_is_one_line_and_ends_the_job_at_once(tmp_path, how, code, said):
    done = launch(tmp_path, how)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("Started trainer-0") == 1
    assert done.stderr.count(said) == 1  # what the launcher says in the end
    assert f"{said}" in done.stderr.splitlines()[-2] + done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_error_of_the_program_shows_its_traceback_once_for_each_attempt(tmp_path):
    done = launch(tmp_path, "own")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "trainer-0 ended with code 1, again without a newer checkpoint." in done.stderr
    assert done.stdout.count("Started trainer-0") == 3
    assert done.stdout.count("trainer-0 | Traceback (most recent call last)") == 3
    assert "trainer-1 | Traceback" not in done.stdout
    assert "ValueError: a mistake of mine" in done.stderr
    followed = [line for line in done.stdout.splitlines() if line.startswith("trainer-1 | error: ")]
    assert all("Rank 0" in line for line in followed)
