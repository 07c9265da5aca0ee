"""The commands that commands print to be run next work, in an empty folder: training without code."""

import os
import re
import shlex
import sys
from pathlib import Path

import pyarrow.csv
import pytest
from forked_programs import run_forked

ROWS = ["--rows", "10000"]  # of the log, to be quick


@pytest.fixture
def shell(tmp_path):
    """Runs a line such as `karvan train --example > my.yaml` in an empty folder."""
    folder = tmp_path / "new"
    folder.mkdir()
    settings = {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "KARVAN_JOBS": str(tmp_path / "jobs")}

    def run(line):
        words = shlex.split(line, comments=True)
        assert words[0] == "karvan"
        target = words[words.index(">") + 1] if ">" in words else None
        words = words[1 : words.index(">")] if target else words[1:]
        words += ROWS * (words[0] == "demo")
        command = [sys.executable, "-m", "karvan", *words]
        ran = run_forked(command, env={**os.environ, **settings}, cwd=folder)
        if target:
            (folder / target).write_text(ran.stdout)
        return ran

    run.folder = folder
    return run


def _printed(text):
    """The commands that a text tells to run."""
    return re.findall(r"^(?:# )? +(karvan .*?)(?:  .*)?$", text, re.MULTILINE)


def test_the_commands_of_the_example_config_run_as_printed(shell):
    shell("karvan train --example > my.yaml")
    missing = shell("karvan train my.yaml")
    assert missing.returncode == 3
    assert missing.stderr.endswith("\nTo write a click log there: karvan demo --data out/clicks\n")
    commands = _printed((shell.folder / "my.yaml").read_text())
    assert [line.split()[1] for line in commands] == [
        "demo",
        "train",
        "evaluate",
        "predict",
        "inspect",
        "plot",
    ]
    for line in commands:
        ran = shell(line)
        assert ran.returncode == 0, (line, ran.stderr)
        assert max(map(len, ran.stdout.splitlines()), default=0) <= 160
    assert (shell.folder / "out/run/plot.html").exists()
    assert (shell.folder / "out/run.jsonl").exists()
    predictions = pyarrow.csv.read_csv(shell.folder / "predictions.csv")
    assert predictions.column_names == ["user", "item", "prediction"]


def test_demo_data_prints_commands_that_run(shell):
    written = shell("karvan demo --data here")
    assert written.returncode == 0
    assert "Wrote 10,000 samples" in written.stdout
    commands = _printed(written.stdout)
    assert "--set" in commands[1]  # the folder is not that of the example
    for line in commands[:2]:
        ran = shell(line)
        assert ran.returncode == 0, (line, ran.stderr)
    again = shell("karvan demo --data here")
    assert again.returncode == 2
    assert "--data expects a folder without a log" in again.stderr


def test_the_commands_of_the_example_job_run_as_printed(shell):
    shell("karvan launch --example > job.yaml")
    missing = shell("karvan launch job.yaml")
    assert missing.returncode == 3
    assert missing.stderr.endswith("To write one: karvan train --example > my.yaml\n")
    commands = _printed((shell.folder / "job.yaml").read_text())
    assert [line.split()[1] for line in commands] == ["demo", "train", "launch"]
    for line in commands:
        ran = shell(line)
        assert ran.returncode == 0, (line, ran.stderr)
    assert "trainer-0 | Step" in ran.stdout
    assert "trainer-1 | Step" not in ran.stdout  # the result is shown once
    assert list((shell.folder / "out/job").glob("step-*"))


def test_the_demo_prints_commands_that_run(shell):
    ran = shell("karvan demo")
    assert ran.returncode == 0
    assert re.search(r"^AUC +0\.\d{4}, the best possible is 0\.\d{4}", ran.stdout, re.MULTILINE)
    assert max(map(len, ran.stdout.splitlines())) <= 80
    commands = _printed(ran.stdout)
    assert [line.split()[1] for line in commands] == ["plot", "inspect", "demo", "train", "train"]
    for line in commands[:2]:  # the others are in the tests above
        assert shell(line).returncode == 0
    assert not Path(shell.folder / "out/demo/clicks").exists()
    assert shell("karvan demo").returncode == 0  # it replaces the first one
