"""Every launched job has a token that its owner alone can read."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch_helpers import spec_of, wait_until
from neighbour import needs_root, run_as_neighbour

from karvan.discovery.directory import Directory
from karvan.launch.token import with_token
from karvan.wire import Security

# A trainer's program that notes its environment, and ends when it is told to.
TRAINER = """
import json, os, sys, time
from pathlib import Path
note = Path(sys.argv[1])
note.with_suffix(".new").write_text(json.dumps(dict(os.environ)))
note.with_suffix(".new").rename(note)
while not note.with_suffix(".end").exists():
    time.sleep(0.05)
"""

ASK = """
for address in sys.argv[1:]:
    try:
        print(Client("service", address).call("ping", deadline=60).head)
    except RefusedError as error:
        print(error)
"""


class Job:
    """A launched job with one trainer that does nothing, one parameter server, and what it said."""

    def __init__(self, folder, extra=""):
        self.folder = folder
        (folder / "train.py").write_text(TRAINER)
        (folder / "job.yaml").write_text(
            f"name: quiet\nentry: {folder / 'train.py'}\nlogs: {folder / 'logs'}\n"
            f"roles:\n  trainers: {{args: [{folder / 'note'}]}}\n{extra}"
        )
        place = folder / "runtime"
        place.mkdir(0o700, exist_ok=True)
        self.output = folder / "output"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "karvan", "launch", str(folder / "job.yaml")],
            stdout=self.output.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(place)},
        )

    def environment(self):
        """That of the trainer, once it runs."""
        note = self.folder / "note"
        wait_until(lambda: note.exists() or self.process.poll() is not None, "the trainer")
        assert note.exists(), self.output.read_text()
        return json.loads(note.read_text())

    def said(self):
        """All that the job has written to the terminal and to its logs."""
        files = [self.output, *(self.folder / "logs").glob("*")]
        return "\n".join(path.read_text() for path in files)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


def test_a_launched_job_has_a_random_token_that_its_owner_alone_can_read(tmp_path):
    with Job(tmp_path) as job:
        given = job.environment()
        path = Path(given["KARVAN_TOKEN_FILE"])
        token = path.read_text().strip()
        assert re.fullmatch("[0-9a-f]{64}", token)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.parent.parent == tmp_path / "runtime"
        assert not any(token in value for value in given.values())
        commands = [place.read_bytes() for place in _own_processes(job.process.pid, "cmdline")]
        assert len(commands) == 3
        assert not any(token.encode() in each for each in commands)
        (tmp_path / "note.end").touch()
        assert job.process.wait(60) == 0
    assert token not in job.said()
    assert f"token file {path}" in job.said()  # by which tools of the user's own join
    assert not path.parent.exists()


def test_a_killed_launcher_leaves_nothing_that_counts(tmp_path):
    with Job(tmp_path) as job:
        first = Path(job.environment()["KARVAN_TOKEN_FILE"])
        token = first.read_text()
        job.process.send_signal(signal.SIGKILL)
        job.process.wait(60)
    assert first.exists()
    (tmp_path / "note").unlink()
    with Job(tmp_path) as job:
        second = Path(job.environment()["KARVAN_TOKEN_FILE"])
        assert second != first
        assert second.read_text() != token
        assert not first.parent.exists()  # the next launcher has removed it


@needs_root
def test_another_user_cannot_talk_to_a_launched_job(tmp_path):
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "data.parquet")
    roles = f"  embedding_workers: 1\n  loaders: 1\ndata: {{train: {tmp_path / 'data.parquet'}}}\n"
    with Job(tmp_path, roles) as job:
        given = job.environment()
        security = Security(token=Path(given["KARVAN_TOKEN_FILE"]).read_text().strip())
        with closing(Directory(given["KARVAN_REGISTRY"], security)) as directory:
            found = [directory.find(role, 0) for role in ("parameter-server", "embedding-worker", "loader")]
        addresses = [given["KARVAN_REGISTRY"], *found]
        said = run_as_neighbour(ASK, *addresses).splitlines()
        assert len(said) == 4
        assert all("refused: expected the job's token" in line for line in said)


@needs_root
def test_another_user_cannot_read_the_token(tmp_path):
    with with_token(spec_of({"trainers": 1})) as spec:
        said = run_as_neighbour(
            "try:\n    print(open(sys.argv[1]).read())\nexcept PermissionError:\n    print('no')",
            spec.token_file,
        )
        assert said == "no\n"


def test_a_token_file_of_the_users_own_wins(tmp_path):
    own = tmp_path / "token"
    own.write_text("1234567890abcdef")
    own.chmod(0o600)
    with with_token(spec_of({"trainers": 1}, token_file=own)) as spec:
        assert spec.token_file == own
    assert own.exists()


def test_check_makes_no_token(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"name: quiet\nentry: {tmp_path / 'train.py'}\n")
    (tmp_path / "runtime").mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    command = [sys.executable, "-m", "karvan", "launch", str(tmp_path / "job.yaml"), "--check"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0
    assert not re.search("[0-9a-f]{64}", said.stdout + said.stderr)
    assert not list((tmp_path / "runtime").iterdir())


def test_launchers_that_start_together_keep_their_tokens(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def start(_):
        with with_token(spec_of({"trainers": 1})) as spec:
            return spec.token_file.read_text()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(start, range(200)))) == 200
    assert not list(tmp_path.iterdir())


def test_a_place_where_others_may_rename_the_folder_is_refused(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))  # not taken: others may enter it
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr("tempfile.tempdir", None)
    with (
        pytest.raises(ValueError, match=r"other users cannot rename .* got .*shared with mode 777"),
        with_token(spec_of({"trainers": 1})),
    ):
        pass
    shared.chmod(0o1777)
    with with_token(spec_of({"trainers": 1})) as spec:
        assert spec.token_file.parent.parent == shared


def _own_processes(launcher, name):
    """Files of /proc of a launcher and of the roles that it has started."""
    found = [Path(f"/proc/{launcher}/{name}")]
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(place.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == launcher:
            found.append(place.parent / name)
    return found
