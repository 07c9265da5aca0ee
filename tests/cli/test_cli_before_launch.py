"""Commands under the system's limits: one clear line before anything begins, instead of a crash inside."""

import json
import os
import resource
import subprocess
import sys

import pytest

from karvan.system_limits import limits, require_limits

LOW = {
    "open files": (resource.RLIMIT_NOFILE, 64),
    "address space": (resource.RLIMIT_AS, 1 << 30),
}


def karvan(*arguments, low=(), cwd=None):
    def lower():
        for kind, value in low:
            resource.setrlimit(kind, (value, value))

    command = [sys.executable, "-m", "karvan", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=cwd, preexec_fn=lower, check=False
    )


@pytest.fixture
def job(tmp_path):
    (tmp_path / "train.py").write_text("print('the program has begun')\n")
    (tmp_path / "job.yaml").write_text("name: limits\nentry: train.py\n")
    return tmp_path


@pytest.mark.parametrize("name", LOW)
def test_a_job_under_too_low_a_limit_does_not_begin(job, name):
    ended = karvan("launch", "job.yaml", low=[LOW[name]], cwd=job)
    assert ended.returncode == 1, ended
    assert "the program has begun" not in ended.stdout
    line = ended.stderr.strip()
    assert line.startswith("error: A job of 2 processes expects a limit of at least"), line
    assert name in line
    assert "ulimit -H" in line
    assert "\n" not in line


@pytest.mark.parametrize("command", ["train", "role"])
def test_other_commands_that_run_for_long_say_so_too(job, command):
    given = ["parameter-server"] if command == "role" else ["my.yaml"]
    ended = karvan(command, *given, low=[LOW["open files"]], cwd=job)
    assert ended.returncode == 1, ended
    assert "open files, got 64" in ended.stderr


def test_a_soft_limit_is_raised_to_what_is_allowed(job):
    (job / "train.py").write_text(
        "import resource; print('files:', resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 256:
        pytest.skip("this system allows few open files")
    program = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256)); "
    program += "os.execv(sys.executable, [sys.executable, '-m', 'karvan', 'launch', 'job.yaml'])"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=job, check=False
    )
    assert "files: 256" in ended.stdout, ended


def test_doctor_shows_the_limits(tmp_path):
    ended = karvan("doctor", "--json", "-", "--folder", tmp_path, low=[LOW["open files"]])
    found = {each["what"]: each for each in json.loads(ended.stdout)}
    assert found["open files"]["state"] == "missing"
    assert "64" in found["open files"]["value"]
    assert {"address space", "processes and threads"} <= found.keys()
    assert ended.returncode == 1


def test_more_processes_need_more_open_files():
    few, many = (limits(count)[0].needed for count in (1, 100))
    assert 64 < few < many


def test_without_low_limits_nothing_is_refused():
    if os.environ.get("CI") and not all(limit.enough for limit in limits(4)):
        pytest.skip("this system's own limits are low")
    require_limits(4)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= limits(4)[0].needed


def test_a_token_or_a_folder_that_cannot_be_used_ends_a_launch_before_it_begins(job):
    (job / "token").write_text("two\nlines\n")
    ended = karvan("launch", "job.yaml", "--check", "--set", "token_file=token", cwd=job)
    assert ended.returncode == 2
    assert "error: token_file expects one line" in ended.stderr
    (job / "file").write_text("")
    ended = karvan("launch", "job.yaml", "--set", "checkpoints=file", cwd=job)
    assert ended.returncode == 3
    assert "checkpoints expects a folder that this user may write to, got file" in ended.stderr
    assert "the program has begun" not in ended.stdout
