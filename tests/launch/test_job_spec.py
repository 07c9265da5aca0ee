"""What a job.yaml may say, and `karvan launch` as far as it starts nothing."""

import socket
import sys
from pathlib import Path

import pytest

from karvan.cli.main import main
from karvan.job.environment import TORCH_NAMES, names, variable
from karvan.job.roles import Role
from karvan.launch import role_programs
from karvan.launch.job_spec import JobSpec, read_spec
from karvan.launch.role_programs import commands_of

WRONG = {
    "an unknown key": ("mod: sync", "unknown key 'mod'; there are: name, entry"),
    "an unknown system": ("system: other", "system: input should be 'persia', got 'other'"),
    "a system with leases": ("system: persia\nsharding: dynamic", "system: persia needs sharding: static"),
    "an unknown role": ("roles: {masters: 1}", "roles: unknown key 'masters'; there are: trainers"),
    "a role's unknown key": ("roles: {trainers: {replica: 1}}", "roles.trainers: unknown key 'replica'"),
    "a port of a trainer": ("roles: {trainers: {port: 1}}", "roles.trainers: unknown key 'port'"),
    "no trainer": ("roles: {trainers: 0}", "roles.trainers.replicas: input should be greater"),
    "no server": ("roles: {parameter_servers: 0}", "roles.parameter_servers: 0 needs sharding: dynamic"),
    "too many ports": ("roles: {parameter_servers: {replicas: 9, port: 65530}}", "need ports up to 65535"),
    "an unknown mode": ("mode: eager", "mode: input should be 'sync', 'hybrid' or 'async', got 'eager'"),
    "reload in mode async": (
        "mode: async\non_server_loss: reload\ncheckpoints: run",
        "on_server_loss reload is for modes sync and hybrid",
    ),
    "a stale sync": ("mode: sync\nstaleness: 2", "mode sync has staleness 1, got 2"),
    "dense steps of a mean": ("dense: {grads_to_wait: 2}", "dense is for mode async, got mode hybrid"),
    "no gradients": (
        "mode: async\ndense: {grads_to_wait: 0}",
        "dense.grads_to_wait: input should be greater",
    ),
    "pulls of a mean": ("dense: {pull_every: 2}", "dense is for mode async, got mode hybrid"),
    "no pulls": ("mode: async\ndense: {pull_every: 0}", "dense.pull_every: input should be greater"),
    "half a pull": ("mode: async\ndense: {pull_every: 1.5}", "dense.pull_every: "),
    "two ways with staleness": (
        "mode: async\ndense: {lr_staleness: true, tolerance: 1}",
        "dense: lr_staleness slows down stale pushes",
    ),
    "no staleness": ("staleness: 0", "staleness: input should be greater than or equal to 1, got 0"),
    "an unknown wire": ("wire: int8", "wire: input should be 'float32', 'bfloat16' or 'float16'"),
    "a name with a blank": ("name: my job", "name: string should match pattern"),
    "no program": ("entry: train.sh", "entry: expected a FILE.py or a CONFIG.yaml, got 'train.sh'"),
    "a program of no loaders": ("loader_entry: load.py", "roles.loaders has no replicas"),
    "an environment that is ours": (
        "roles: {trainers: {env: {KARVAN_ROLE: x}}}",
        "roles.trainers.env: the launcher sets KARVAN_ROLE",
    ),
    "mutual TLS without a CA": ("tls: {cert: c, key: k, mutual: true}", "mutual needs a ca"),
    "half of TLS": ("tls: {cert: c}", "'tls.key' is missing"),
    "a key twice": ("mode: sync\nmode: sync", "the key 'mode' appears twice"),
}


@pytest.fixture
def run(capfd, tmp_path, monkeypatch):
    """`run("job.yaml")` is `karvan launch job.yaml`, in a folder with train.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def launch(*arguments):
        code = main(["launch", *arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return launch


def job_text(text):
    """A job that says this, and what every job must say."""
    usual = {"name": "name: test", "entry": "entry: train.py"}
    needed = [line for key, line in usual.items() if not text.startswith(key)]
    return "\n".join([*needed, text])


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_job_is_told_by_key_and_exits_with_2(run, tmp_path, case):
    text, said = WRONG[case]
    (tmp_path / "job.yaml").write_text(job_text(text))
    code, out, err = run("job.yaml", "--check")
    assert (code, out) == (2, "")
    assert err.startswith("error: job.yaml")
    assert said in err
    assert len(err.splitlines()) <= 2


def test_the_example_is_a_job(run, tmp_path):
    code, out, _ = run("--example")
    assert code == 0
    (tmp_path / "job.yaml").write_text(out)
    spec = read_spec(tmp_path / "job.yaml", {})
    assert spec.roles.trainers.args == ["--epochs", "2"]
    train = ("-P", "-m", "karvan", "train", "my.yaml", "--folder", "out/job", "--epochs", "2")
    assert commands_of(spec)["trainer"][1:] == train
    (tmp_path / "my.yaml").touch()
    assert all(f"\n{key}:" in out or f"\n# {key}:" in out for key in JobSpec.model_fields)
    assert run("job.yaml", "--check")[0] == 0


def test_check_shows_roles_and_commands_and_starts_nothing(run, tmp_path):
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    (tmp_path / "job.yaml").write_text(job_text("roles: {trainers: {replicas: 2, args: [--lr, 1e-3, true]}}"))
    code, out, _ = run("job.yaml", "--check", "--set", "roles.loaders=3")
    assert code == 0
    assert "Job test: mode hybrid, staleness 4, wire float32" in out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert rows["trainer"] == f"2 {sys.executable} -P -m karvan.launch.program train.py --lr 0.001 true"
    assert rows["parameter-server"] == f"1 {sys.executable} -P -m karvan role parameter-server"
    assert rows["loader"] == f"3 {sys.executable} -P -m karvan role loader"
    assert "embedding-worker" not in rows
    assert not (tmp_path / "ran").exists()


def test_loaders_run_a_program_of_the_job_if_it_has_one():
    spec = JobSpec.model_validate(
        {
            "name": "a",
            "entry": "t.py",
            "loader_entry": "l.py",
            "roles": {"loaders": {"replicas": 1, "args": [7]}},
        }
    )
    assert commands_of(spec)["loader"] == (sys.executable, "-P", "-m", "karvan.launch.program", "l.py", "7")
    other = commands_of(spec.model_copy(update={"system": "persia"}))
    run = (sys.executable, "-P", "-m", "karvan", "run", "--as", "persia")
    assert other["loader"] == (*run, "l.py", "7")
    assert other["trainer"][:7] == run
    assert other["parameter-server"] == commands_of(spec)["parameter-server"]


@pytest.mark.parametrize(
    ("text", "missing"),
    [("entry: none.py", "none.py"), ("token_file: none", "none"), ("tls: {cert: train.py, key: no}", "no")],
)
def test_files_that_are_not_there_exit_with_3(run, tmp_path, text, missing):
    (tmp_path / "job.yaml").write_text(job_text(text))
    code, _, err = run("job.yaml", "--check")
    assert code == 3
    assert f"there is no file {missing}." in err


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 1), ("hybrid", 4), ("async", 4)])
def test_staleness_follows_the_mode(mode, staleness):
    assert JobSpec.model_validate({"name": "a", "entry": "t.py", "mode": mode}).staleness == staleness


@pytest.mark.parametrize(
    ("dense", "expected"),
    [
        (None, {}),
        ({"lr_staleness": True}, {"LR_STALENESS": "1", "PULL_EVERY": "1"}),
        ({"pull_every": 4}, {"LR_STALENESS": "0", "PULL_EVERY": "4"}),
        (
            {"grads_to_wait": 2, "tolerance": 0},
            {"LR_STALENESS": "0", "GRADS_TO_WAIT": "2", "TOLERANCE": "0"},
        ),
    ],
)
def test_trainers_find_the_dense_options_in_their_environment(dense, expected):
    spec = JobSpec.model_validate({"name": "a", "entry": "t.py", "mode": "async", "dense": dense})
    found = role_programs.environment_of(spec, Role.TRAINER, 0, registry="a:1", generation=0)
    names = {name: found[f"KARVAN_{name}"] for name in expected}
    assert names == expected
    assert ("KARVAN_GRADS_TO_WAIT" in found) == ("GRADS_TO_WAIT" in expected)


@pytest.mark.parametrize(
    ("more", "stays"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.0.0.2"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "example.org"}, False),
        ({"registry_port": 4000}, False),
        ({"roles": {"parameter_servers": {"port": 4000}}}, False),
        ({"tls": {"cert": "c", "key": "k", "ca": "a", "mutual": True}}, False),
    ],
)
def test_a_job_without_ports_stays_on_its_machine(more, stays):
    assert JobSpec.model_validate({"name": "a", "entry": "t.py", **more}).stays_here == stays


def test_the_pages_list_every_key_and_every_name_of_the_environment():
    docs = Path(__file__).parents[2] / "docs"
    page, environment = ((docs / name).read_text() for name in ("launch.md", "launch_environment.md"))
    keys = [name for name in JobSpec.model_fields if name != "roles"]
    keys += [f"roles.{name}" for name in JobSpec.model_fields["roles"].annotation.model_fields]
    variables = [*map(variable, names()), *TORCH_NAMES]
    assert [name for name in keys if f"`{name}`" not in page] == []
    assert [name for name in variables if f"`{name}`" not in environment] == []


def test_a_port_of_the_registry_that_is_taken_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"name: a\nentry: {tmp_path / 'train.py'}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["launch", str(tmp_path / "job.yaml"), "--set", f"registry_port={port}"]) == 75
    told = capsys.readouterr().err
    assert told.startswith(f"error: registry expected to listen at 127.0.0.1:{port}, got: ")
    assert "--debug" not in told


ELASTIC = {
    "min above max": (
        "sharding: dynamic\nroles: {trainers: {min: 3, max: 2}}",
        "expected min <= replicas <= max",
    ),
    "bounds of fixed shares": ("roles: {trainers: {min: 1, max: 2}}", "min and max needs sharding: dynamic"),
    "fixed batches of fixed shares": ("global_batches: 2", "global_batches needs sharding: dynamic"),
    "fixed batches in mode hybrid": (
        "sharding: dynamic\nglobal_batches: 2",
        "global_batches fixes the bits only in mode sync",
    ),
    "tries of fixed shares": ("max_task_tries: 2", "max_task_tries needs sharding: dynamic"),
    "bad records of fixed shares": ("skip_bad_records: 0", "skip_bad_records needs sharding: dynamic"),
    "bad records of fixed batches": (
        "sharding: dynamic\nmode: sync\nglobal_batches: 2\nskip_bad_records: 1",
        "skip_bad_records is for records that are leased, but global_batches fixes the records of every step",
    ),
    "mode async that waits": (
        "sharding: dynamic\nmode: async\ndense: {grads_to_wait: 2}",
        "neither grads_to_wait nor tolerance",
    ),
    "mode async without servers": (
        "sharding: dynamic\nmode: async\nroles: {parameter_servers: 0}",
        "mode async has dense parameters on servers",
    ),
    "mode async with fixed batches": (
        "sharding: dynamic\nmode: async\nglobal_batches: 2",
        "global_batches fixes the bits only in mode sync",
    ),
    "embedding workers without loaders": (
        "sharding: dynamic\nroles: {embedding_workers: 1}",
        "for batches that loaders send: expected both roles, got parameter_servers: 1, loaders: 0",
    ),
    "embedding workers without servers": (
        "sharding: dynamic\nroles: {embedding_workers: 1, loaders: 1, parameter_servers: 0}",
        "expected both roles, got parameter_servers: 0, loaders: 1",
    ),
    "continue with fixed shares": ("on_trainer_loss: continue", "on_trainer_loss: continue needs sharding"),
    "reload": ("sharding: dynamic\non_server_loss: reload\ncheckpoints: run", "goes back to a checkpoint"),
}


@pytest.mark.parametrize(("text", "message"), ELASTIC.values(), ids=ELASTIC)
def test_an_elastic_job_that_cannot_work_is_refused(run, tmp_path, text, message):
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(job_text(text))
    code, out, err = run("job.yaml", "--check")
    assert (code, out) == (2, "")
    assert message in err


def test_an_elastic_job_starts_with_most_trainers_unless_told_otherwise(tmp_path):
    def trainers(text):
        (tmp_path / "job.yaml").write_text(job_text(f"sharding: dynamic\nroles: {{trainers: {text}}}"))
        found = read_spec(tmp_path / "job.yaml", {}).roles.trainers
        return found.least, found.replicas, found.most

    assert trainers("3") == (3, 3, 3)
    assert trainers("{min: 1, max: 4}") == (1, 4, 4)
    assert trainers("{replicas: 2, min: 1, max: 4}") == (1, 2, 4)
