"""Members of an elastic run that load the same checkpoint: servers fill their tables once."""

import pytest
import torch
from elastic_helpers import DIM, Run, spec_of

import karvan as kv
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.wire import Server

SAVED = [5.0, 5.0]
UNKNOWN = [0.0, 0.0]


@pytest.fixture
def path(tmp_path):
    """A checkpoint with one row."""
    model = kv.EmbeddingEngine({"t": kv.Table(DIM, init=kv.init.Constant(5.0))})
    model({"t": torch.tensor([3])})
    checkpoints = kv.Checkpoints(tmp_path)
    checkpoints.save(1, {}, model)
    checkpoints.wait()
    return str(checkpoints.latest().path)


def fill(member, path):
    head = {"path": path, "tables": {"t": {"keep": False, "initial": [0.0] * DIM, "extra": False}}}
    assert [answer.head.damaged for answer in member.all("fill", head)] == [[], []]


def row(member):
    return member.pull(1, {"t": {3: 1}}, training=False)["t"][3].tolist()


def test_a_member_that_was_started_again_leaves_the_rows_that_others_use(path):
    with Server(ParameterServer(0, 2)) as one, Server(ParameterServer(1, 2)) as two:
        addresses = [one.address, two.address]
        with Run(addresses, [spec_of("t")]) as run:
            first, joiner = run.member(0), run.member(1)
            assert row(first) == UNKNOWN
            fill(first, path)
            assert row(joiner) == SAVED
            first.all("clear", {"table": "t"})
            fill(joiner, path)
            assert row(joiner) == UNKNOWN  # nothing was filled
            fill(first, path)  # it knows what it does
            assert row(first) == SAVED
            first.pull(2, {"t": {3: 1}})
            first.push(1, [2], [{"t": {3: (1.0, 1.0)}}])
            first.commit(1, [(0, 1)])
            assert row(first) not in (SAVED, UNKNOWN)
            fill(joiner, path)  # what was trained since is not of the checkpoint
            assert row(joiner) == SAVED
        with Run(addresses, [spec_of("t")]) as run:  # which empties the tables
            fill(run.member(1), path)
            assert row(run.member(1)) == SAVED
