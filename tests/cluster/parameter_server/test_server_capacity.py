"""`roles.parameter_servers.capacity`: rows of one server over all tables."""

import re
import sys
from subprocess import PIPE

import numpy as np
import pytest
import torch
from cluster_helpers import serving
from forked_programs import ForkedProgram

import karvan as kv
from karvan import distributed
from karvan.cluster.parameter_server.service import ParameterServer, make
from karvan.cluster.role_process import RoleSettings
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.store import MemoryStore
from karvan.wire import Server

NAMES = ("user", "item")


def train(engine, steps=30):
    """Rows of both tables after some steps, and the most that there were after any of them."""
    optimizer = kv.optim.Adagrad(engine, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    most = 0
    for _ in range(steps):
        out = engine({name: torch.randint(0, 60, (8,), generator=generator) for name in NAMES})
        (out["user"].sum() + out["item"].square().sum()).backward()
        optimizer.step()
        most = max(most, sum(engine.table(name).rows for name in NAMES))
    return [engine.store.table(name).snapshot() for name in NAMES], most


def make_engine(store=None):
    return kv.EmbeddingEngine({"user": kv.Table(4), "item": kv.Table(2)}, seed=1, store=store)


def test_a_server_trains_the_rows_that_memory_with_the_same_capacity_has():
    expected, most = train(make_engine(MemoryStore(capacity=25)))
    assert most == 25
    with Server(ParameterServer(capacity=25)) as server:
        distributed.connect("remote", servers=[server.address])
        received, most = train(make_engine())
        distributed.disconnect()
    assert most == 25
    for rows, same in zip(received, expected, strict=True):
        for one, other in zip(rows, same, strict=True):
            np.testing.assert_array_equal(one, other)


def test_each_server_has_the_capacity_and_lookups_that_run_ahead_stay_within_it():
    with (
        Server(ParameterServer(0, 2, capacity=15)) as one,
        Server(ParameterServer(1, 2, capacity=15)) as other,
    ):
        distributed.connect("remote", servers=[one.address, other.address], staleness=4)
        rows, most = train(make_engine())
        distributed.disconnect()
    assert most == 30
    assert min(len(each.keys) for each in rows) > 0
    with serving(2) as addresses:  # without a limit
        distributed.connect("remote", servers=addresses)
        assert train(make_engine())[1] > 100


def test_a_role_takes_its_capacity_from_the_environment():
    settings = RoleSettings.from_environment(Role.PARAMETER_SERVER, {"KARVAN_CAPACITY": "7"})
    with Server(make(settings)) as server:
        distributed.connect("remote", servers=[server.address])
        assert train(make_engine(), steps=3)[1] == 7
        distributed.disconnect()


@pytest.mark.slow
def test_a_process_takes_its_capacity_as_an_option():
    command = [
        sys.executable,
        "-m",
        "karvan",
        "role",
        "parameter-server",
        "--capacity",
        "7",
        "--threads",
        "1",
    ]
    process = ForkedProgram(command, stderr=PIPE)
    try:
        address = re.search(r" at (\S+:\d+)$", process.stderr.readline().strip())[1]
        distributed.connect("remote", servers=[address])
        assert train(make_engine(), steps=3)[1] == 7
        distributed.disconnect()
    finally:
        process.kill()
        process.wait()


def test_a_capacity_that_means_nothing_is_an_error():
    with pytest.raises(ValueError, match="needs a capacity of at least 1 row, got 0"):
        ParameterServer(capacity=0)
    with pytest.raises(ValueError, match="loader has no rows: expected a capacity of parameter-server only"):
        RoleSettings(Role.LOADER, JobEnvironment(capacity=5))
