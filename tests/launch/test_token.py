"""Every launched job has a token that its owner alone can read."""

import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest
from forked_programs import ForkedProgram, run_forked
from free_ports import free_port
from launch_helpers import wait_until
from neighbour import needs_root, run_as_neighbour
from processes import family_of, kill_family

from karvan.discovery.directory import Directory
from karvan.launch.run_folder import RunFolder, RunFolderError, make_certificate, make_private, make_token
from karvan.wire import Client, RefusedError, Security, Server, Service, WireError

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
        print(Client("service", address).call("ping", deadline=1).head)
    except (ValueError, WireError) as error:
        print(error)
    try:
        if address.startswith("unix:"):
            socket.socket(socket.AF_UNIX).connect(address.removeprefix("unix:"))
            print("connected")
    except PermissionError:
        print("closed")
"""


class Job:
    """A launched job with one trainer that does nothing, one parameter server, and what it said."""

    def __init__(self, folder, extra="", kind=ForkedProgram):
        self.folder = folder
        (folder / "train.py").write_text(TRAINER)
        (folder / "job.yaml").write_text(
            f"name: quiet\nentry: {folder / 'train.py'}\nlogs: {folder / 'logs'}\n"
            f"roles:\n  trainers: {{args: [{folder / 'note'}]}}\n{extra}"
        )
        self.output = folder / "output"
        self.process = kind(
            [sys.executable, "-m", "karvan", "launch", str(folder / "job.yaml")],
            stdout=self.output.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "KARVAN_JOBS": str(folder / "jobs")},
        )

    def environment(self):
        """That of the trainer, once it runs."""
        note = self.folder / "note"
        wait_until(lambda: note.exists() or self.process.poll() is not None, "the trainer")
        assert note.exists(), self.output.read_text()
        return json.loads(note.read_text())

    def commands(self):
        """The command lines of all its seven processes; none while there are more or fewer."""
        found = []
        for pid in family_of(self.process.pid):
            with suppress(OSError):  # one that a role has started, and that has just ended
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        return found if len(found) == 7 else []

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


@pytest.fixture
def core_dumps():
    """Whoever is started writes core dumps, if the system lets it; whether it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    yield hard != 0
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_a_launched_job_has_a_random_token_that_its_owner_alone_can_read(tmp_path, core_dumps):
    with Job(tmp_path, kind=subprocess.Popen) as job:
        given = job.environment()
        path = Path(given["KARVAN_TOKEN_FILE"])
        token = path.read_text().strip()
        assert re.fullmatch("[0-9a-f]{64}", token)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path == tmp_path / "jobs" / "quiet" / "token"
        assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
        assert not any(token in value for value in given.values())
        commands = wait_until(job.commands, "the launcher, the master, two roles, and their keepers")
        assert not any(token.encode() in each for each in commands)
        limits = [Path(f"/proc/{pid}/limits").read_text() for pid in family_of(job.process.pid)]
        assert len(limits) == 7
        if core_dumps:
            assert all(re.search(r"Max core file size +1 ", each) for each in limits)
        (tmp_path / "note.end").touch()
        assert job.process.wait(60) == 0
    assert token not in job.said()
    assert f"token file {path}" in job.said()  # by which tools of the user's own join
    assert not path.exists()


def test_a_killed_job_leaves_nothing_that_counts(tmp_path):
    with Job(tmp_path) as job:
        token = Path(job.environment()["KARVAN_TOKEN_FILE"]).read_text()
        kill_family(job.process.pid)
        job.process.wait(60)
    (tmp_path / "note").unlink()
    wait_until(lambda: not RunFolder(tmp_path / "jobs" / "quiet").runs)
    with Job(tmp_path) as job:
        assert Path(job.environment()["KARVAN_TOKEN_FILE"]).read_text() != token


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
        assert len(said) == 8
        assert all(re.search("folder of this user|Permission denied", line) for line in said[::2])
        assert said[1::2] == ["closed"] * 4


def test_sockets_are_in_a_short_private_folder_that_goes_with_the_job(tmp_path, monkeypatch):
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    (short := base / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(short))
    for place, folders in ((base / "run", 0), (tmp_path / ("long" * 30), 1)):
        place.mkdir(exist_ok=True)
        with Job(place) as job:
            registry = Path(job.environment()["KARVAN_REGISTRY"].removeprefix("unix:"))
            made = list(short.glob("karvan-*"))
            assert len(made) == folders
            assert registry.parent == (made[0] if folders else place / "jobs" / "quiet")
            assert stat.S_ISSOCK(registry.stat().st_mode)
            assert stat.S_IMODE(registry.parent.stat().st_mode) == 0o700
            kill_family(job.process.pid)
            job.process.wait(60)
        assert registry.exists()  # until the next start
        (place / "note").unlink()
        wait_until(lambda place=place: not RunFolder(place / "jobs" / "quiet").runs)
        with Job(place) as job:
            assert job.environment()
            assert len(list(short.glob("karvan-*"))) == folders
            (place / "note.end").touch()
            assert job.process.wait(60) == 0
        assert not list(short.glob("karvan-*"))
        assert not list((place / "jobs" / "quiet").glob("*.sock"))
    shutil.rmtree(base)


@pytest.mark.parametrize("where", ["registry_port", "host"])
def test_a_job_at_ports_has_mutual_tls_by_itself(tmp_path, where):
    port = free_port()
    extra = f"registry_port: {port}\n" if where == "registry_port" else "host: 0.0.0.0\n"
    with Job(tmp_path, extra) as job:
        given = job.environment()
        security = Security.from_environment(given)
        assert security.mutual
        files = [Path(given[f"KARVAN_TLS_{name}"]) for name in ("CERT", "KEY", "CA")]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert {path.parent for path in files} == {tmp_path / "jobs" / "quiet"}
        registry = given["KARVAN_REGISTRY"]
        assert registry.startswith("127.") == (where == "registry_port")
        with closing(Directory(registry, security)) as directory:
            server = directory.find("parameter-server", 0)
        stranger = Security(token=security.token, ca=security.ca, name=security.name)
        with Client("registry", registry, security) as peer:
            assert peer.call("ping").head["service"] == "registry"
        with (
            Client("server", server, security) as peer,
            pytest.raises(RefusedError, match="expected the hello with 'generation'"),  # it was let in
        ):
            peer.call("ping")
        for here in (registry, server):
            with (
                Client("service", here, stranger) as peer,
                pytest.raises(WireError, match="perhaps it expects a certificate"),
            ):
                peer.call("ping", deadline=0.5)
        environment = {**os.environ, "KARVAN_JOBS": str(tmp_path / "jobs")}
        status = run_forked([sys.executable, "-m", "karvan", "status", "quiet"], env=environment)
        assert "Job quiet: running" in status.stdout
        (tmp_path / "note.end").touch()
        assert job.process.wait(60) == 0
    assert not any(path.exists() for path in files)
    assert "PRIVATE" not in job.said()


def test_each_job_has_a_certificate_that_no_other_job_trusts(tmp_path):
    securities = []
    for name in ("one", "other"):
        (folder := tmp_path / name).mkdir()
        given = make_certificate(folder)
        files = {key: given[key].read_bytes() for key in ("cert", "key", "ca")}
        securities.append(Security(token="secret" * 6, mutual=True, name=given["name"], **files))
    one, other = securities
    with Server(Service(), security=one) as server:
        with Client("service", server.address, one) as peer:
            assert peer.call("ping").head["service"] == "service"
        for wrong in (other, replace(one, cert=other.cert, key=other.key), replace(one, name="elsewhere")):
            with Client("service", server.address, wrong) as peer, pytest.raises((WireError, RefusedError)):
                peer.call("ping", deadline=0.5)
        options = {"tls_root_certs": one.ca, "override_hostname": one.name}
        with (
            flight.FlightClient(f"grpc+tls://{server.address}", **options) as client,
            pytest.raises(flight.FlightUnavailableError),  # one that reads it says "expected the job's token"
        ):
            list(client.do_action(flight.Action("x", bytes(2**20))))


@needs_root
def test_another_user_cannot_read_the_token(tmp_path):
    for parent in (tmp_path, *tmp_path.parents):  # all may look for it
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    make_private(tmp_path / "jobs" / "quiet")
    make_token(tmp_path / "jobs" / "quiet" / "token")
    said = run_as_neighbour(
        "try:\n    print(open(sys.argv[1]).read())\nexcept PermissionError:\n    print('no')",
        tmp_path / "jobs" / "quiet" / "token",
    )
    assert said == "no\n"


def test_a_token_file_of_the_users_own_wins(tmp_path):
    own = tmp_path / "token"
    own.write_text("1234567890abcdef")
    own.chmod(0o600)
    with Job(tmp_path, f"token_file: {own}\n") as job:
        assert job.environment()["KARVAN_TOKEN_FILE"] == str(own)
        (tmp_path / "note.end").touch()
        assert job.process.wait(60) == 0
    assert own.read_text() == "1234567890abcdef"


def test_check_makes_no_token(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"name: quiet\nentry: {tmp_path / 'train.py'}\n")
    monkeypatch.setenv("KARVAN_JOBS", str(tmp_path / "jobs"))
    command = [sys.executable, "-m", "karvan", "launch", str(tmp_path / "job.yaml"), "--check"]
    said = run_forked(command)
    assert said.returncode == 0
    assert not re.search("[0-9a-f]{64}", said.stdout + said.stderr)
    assert not (tmp_path / "jobs").exists()


def test_of_launchers_that_start_together_one_runs_the_job(tmp_path):
    with Job(tmp_path) as one, Job(tmp_path) as other:  # either may be the first
        wait_until(lambda: one.process.poll() is not None or other.process.poll() is not None, "a refusal")
        runs, refused = (one, other) if one.process.poll() is None else (other, one)
        assert refused.process.poll() == 2
        runs.environment()
        assert runs.process.poll() is None
        (tmp_path / "note.end").touch()
        assert {one.process.wait(60), other.process.wait(60)} == {0, 2}


def test_a_place_where_others_may_rename_the_folder_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for jobs in (shared, shared / "jobs"):
        with pytest.raises(RunFolderError, match=r"other users cannot rename .* got .*shared with mode 777"):
            make_private(jobs / "quiet")
    shared.chmod(0o1777)
    make_private(shared / "own" / "quiet")
    assert stat.S_IMODE((shared / "own" / "quiet").stat().st_mode) == 0o700
