"""The environment variables of a job: what is written is read again, and wrong values are named."""

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from karvan.job.address import is_loopback
from karvan.job.environment import (
    ASYNC,
    HYBRID,
    LAUNCHED,
    MODES,
    SYNC,
    DenseSettings,
    JobEnvironment,
    ServerLoss,
    names,
    set_variables,
    variable,
)
from karvan.job.roles import Role, all_roles, start_order

WORD = st.text("abc./:-_ä", min_size=1)
NUMBER = st.integers(0, 2**31)
VALUES = {
    "str": WORD,
    "Verbatim": st.builds("{}{}{}".format, st.sampled_from(["", " "]), WORD, st.sampled_from(["", " "])),
    "int": NUMBER,
    "int | None": st.none() | NUMBER,
    "float | None": st.none() | st.floats(0, 1e9),
    "bool | None": st.none() | st.booleans(),
    "Role | None": st.none() | st.sampled_from(all_roles()),
    "ServerLoss | None": st.none() | st.sampled_from(ServerLoss),
    "Mapping[Role, int]": st.dictionaries(st.sampled_from(start_order()), NUMBER),
    "Mapping[Role, tuple[str, ...]]": st.dictionaries(
        st.sampled_from([role for role in all_roles() if role.start is not None and role.listens]),
        st.lists(WORD, min_size=1).map(tuple),
    ),
}
ENVIRONMENTS = st.builds(
    JobEnvironment, **{field.name: VALUES[field.type] for field in fields(JobEnvironment)}
)


@given(ENVIRONMENTS)
def test_what_is_written_is_read_again(job):
    written = job.variables()
    assert JobEnvironment.read(written) == job
    assert JobEnvironment.read({**written, "KARVAN_NOT_OURS": "x", "PATH": "/bin"}) == job


def test_nothing_set_gives_the_defaults():
    assert JobEnvironment.read({}) == JobEnvironment()
    assert JobEnvironment.read(dict.fromkeys(map(variable, names()), "")) == JobEnvironment()
    assert JobEnvironment.read({"KARVAN_HOST": " a ", "KARVAN_CHECKPOINTS": " a "}) == JobEnvironment(
        host="a", checkpoints=" a "
    )


def test_without_a_mapping_the_process_is_read(monkeypatch):
    monkeypatch.setenv("KARVAN_INDEX", "3")
    assert JobEnvironment.read().index == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("KARVAN_PORT", "x", "KARVAN_PORT expects a whole number, got 'x'"),
        ("KARVAN_THREADS", "1.5", "KARVAN_THREADS expects a whole number, got '1.5'"),
        ("KARVAN_LEASE_SECONDS", "long", "KARVAN_LEASE_SECONDS expects seconds, got 'long'"),
        ("KARVAN_TLS_MUTUAL", "yes", "KARVAN_TLS_MUTUAL expects 0 or 1, got 'yes'"),
        ("KARVAN_ROLE", "cook", "KARVAN_ROLE expects one of parameter-server, .*trainer, master, got 'cook'"),
        (
            "KARVAN_ON_SERVER_LOSS",
            "fail",
            "KARVAN_ON_SERVER_LOSS expects one of rollback, reload, got 'fail'",
        ),
    ],
)
def test_a_wrong_value_names_its_variable(name, text, message):
    with pytest.raises(ValueError, match=message):
        JobEnvironment.read({name: text})


def test_a_misspelled_name_is_one_warning(monkeypatch, caplog):
    monkeypatch.delenv("KARVAN_JOBS", raising=False)  # which all tests set
    monkeypatch.setenv("KARVAN_THREAD", "4")
    monkeypatch.setenv("KARVAN_MASTER_PORT", "tcp://10.0.0.1:80")  # as Kubernetes sets it for a service
    monkeypatch.setenv("KARVAN_OF_MY_OWN", "x")
    for _ in range(2):
        assert JobEnvironment.read() == JobEnvironment()
    expected = "The environment variable KARVAN_THREAD is unknown and ignored. Did you mean KARVAN_THREADS?"
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_counts_and_addresses_by_role():
    names = [f"KARVAN_{role}_COUNT" for role in ("TRAINER", "PARAMETER_SERVER", "EMBEDDING_WORKER", "LOADER")]
    job = JobEnvironment.read({name: str(number + 1) for number, name in enumerate(names)})
    assert [job.counts[role] for role in start_order()] == [2, 3, 4, 1]
    written = {"KARVAN_PARAMETER_SERVER_ADDRESSES": "a:1,b:2", "KARVAN_LOADER_ADDRESSES": "c:3"}
    job = JobEnvironment.read({**written, "KARVAN_TRAINER_ADDRESSES": "nobody listens"})
    assert job.addresses == {Role.PARAMETER_SERVER: ("a:1", "b:2"), Role.LOADER: ("c:3",)}
    assert written.items() <= job.variables().items()


def test_options_are_set_and_those_that_are_not_given_stay():
    environment = {"KARVAN_PORT": "7", "KARVAN_INDEX": "1"}
    set_variables(environment, {"index": 2, "port": None, "tls_mutual": True, "checkpoints": Path("a/b")})
    assert environment == {
        "KARVAN_PORT": "7",
        "KARVAN_INDEX": "2",
        "KARVAN_TLS_MUTUAL": "1",
        "KARVAN_CHECKPOINTS": "a/b",
    }


def test_the_launcher_leaves_variables_of_users_alone():
    assert {"KARVAN_ROLE", "KARVAN_OWNER", "KARVAN_ON_SERVER_LOSS"} <= set(LAUNCHED)
    assert not {"KARVAN_ADVERTISE", "KARVAN_DEBUG", "KARVAN_LOADER_ADDRESSES"} & set(LAUNCHED)


def test_no_other_module_names_a_variable_to_read():
    """Messages and docstrings may name variables; whoever reads or sets one goes by `JobEnvironment`."""
    package = Path(__file__).parents[2] / "karvan"
    accesses = ("environ[", "environ.get(", "given.get(", "environment.get(", "getenv(")
    found = [
        f"{path.name}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if "KARVAN_" in line and any(access in line for access in accesses)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("mode", "staleness", "joint_rows", "joint_steps", "on_servers", "per_step"),
    [(SYNC, 1, True, True, False, 4), (HYBRID, 4, False, True, False, 4), (ASYNC, 4, False, False, True, 2)],
)
def test_what_each_mode_decides(mode, staleness, joint_rows, joint_steps, on_servers, per_step):
    assert MODES[mode.name] is mode
    assert mode.default_staleness == staleness
    assert (mode.joint_rows, mode.joint_steps, mode.dense_on_servers) == (joint_rows, joint_steps, on_servers)
    assert mode.gradients_per_step(4, DenseSettings(grads_to_wait=2)) == per_step
    mode.check_staleness(staleness)
    mode.check_server_loss(ServerLoss.ROLLBACK)
    mode.check_dense(())


def test_what_a_mode_does_not_allow():
    for mode in MODES.values():
        with pytest.raises(ValueError, match="staleness must be at least 1, got 0"):
            mode.check_staleness(0)
    with pytest.raises(ValueError, match="mode sync has staleness 1, got 2"):
        SYNC.check_staleness(2)
    with pytest.raises(ValueError, match="reload is for modes sync and hybrid"):
        ASYNC.check_server_loss(ServerLoss.RELOAD)
    with pytest.raises(ValueError, match="tolerance is for mode async, got mode hybrid"):
        HYBRID.check_dense(["tolerance"])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True)),
        *(("0.0.0.0", False), ("10.0.0.1", False), ("::", False), ("example.org", False), ("", False)),
    ],
)
def test_loopback_hosts(host, expected):
    assert is_loopback(host) is expected
