"""What tests of mode async share: servers in this process, and what checkpoints have."""

import contextlib

import numpy as np
import torch
from async_programs import loss
from cluster_helpers import serving

from karvan import distributed
from karvan.checkpoint import Checkpoint
from karvan.dense.remote import DenseServerProxy


def content(folder, step):
    """All that a checkpoint has of rows, parameters and optimizers, as arrays by name."""
    checkpoint = Checkpoint(folder / f"step-{step:012d}")
    found = {
        (table, number): np.concatenate(column)
        for table in checkpoint.manifest.tables
        for number, column in enumerate(zip(*checkpoint.parts(table), strict=True))
    }
    state = checkpoint.state()
    found |= {name: each for name, each in state["model"].items() if isinstance(each, torch.Tensor)}
    for number, slots in state["dense_optimizer"]["state"].items():
        found |= {(number, name): torch.as_tensor(each) for name, each in slots.items()}
    return found, state["dense_optimizer"]["param_groups"]


def assert_same(one, other, step):
    (found, groups), (expected, expected_groups) = content(one, step), content(other, step)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not np.array_equal(found[name], expected[name])] == []
    assert groups == expected_groups


@contextlib.contextmanager
def connected(servers, **options):
    """Servers in this process, and a connection to them in mode async."""
    with serving(servers) as addresses:
        distributed.connect("remote", servers=addresses, mode="async", **{"staleness": 1, **options})
        yield


class Intruder:
    """A loss during whose first calls somebody else makes steps, without gradients, on some servers."""

    def __init__(self, times, steps=1, servers=(0,)):
        self.times, self.steps, self.servers, self.sequence = times, steps, servers, 0

    def __call__(self, output, batch):
        if self.times and distributed.current().servers is not None:
            self.times -= 1
            for _ in range(self.steps):
                for number in self.servers:
                    server = DenseServerProxy(distributed.current().servers, number, 1)
                    version, _ = server.pull()
                    assert server.push_gradients({}, version, trainer="b", sequence=self.sequence).accepted
                self.sequence += 1
        return loss(output, batch)
