"""What tests of the references' behaviours share: clusters, small models, and checks against plain Python."""

import numpy as np
import pytest
import reference as ref
import torch
from slow_rows import first_vector
from worker_helpers import Cluster

import karvan as kv
from karvan import distributed
from karvan.dense.remote import DenseServerProxy
from karvan.embedding import HashStack
from karvan.ragged import Padded

WAYS = ["trainer", "worker"]  # who has the ids: the trainer's threads, or an embedding worker


def slow(*values):
    """Processes take long to start, so those of four servers are for `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


MOVES = [(1, 2), slow(2, 4), slow(4, 1)]  # from so many servers to so many
on_all = pytest.mark.parametrize(
    ("servers", "way"),
    [(2, "trainer"), (2, "worker"), slow(1, "trainer"), slow(4, "trainer"), slow(4, "worker")],
)


class Clusters(dict):
    """By the number of parameter servers, started when needed; several have an embedding worker with them."""

    def __missing__(self, servers):
        cluster = self[servers] = Cluster(servers, int(servers > 1))
        cluster.wait()
        return cluster


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def keys_of(handle):
    return sorted(handle.keys().tolist())


def first(table, keys, dim, **options):
    return torch.from_numpy(np.stack([first_vector(table, key, dim, **options) for key in keys]))


def values_of(handle, keys):
    return dict(zip(keys, handle.vectors(list(keys)).tolist(), strict=True))


def check_layout(send, rows, **options):
    """A lookup and a step of SGD against the slow reference; gives the engine's output."""
    stack = options.pop("stack", None)
    slow = ref.look_up(ref.Feature(4, stack=stack, **options), rows)
    table = kv.Table(4, name="products", hash_stack=stack and HashStack(*stack), **options)
    engine = kv.EmbeddingEngine({"f": table})
    optimizer = kv.optim.SGD(engine, lr=1.0)
    output = engine(send({"f": kv.Ragged.from_lists(rows)}))["f"]
    values = output.values if isinstance(output, Padded) else output
    vectors = {key: torch.from_numpy(first_vector("products", key, 4)) for _, key, _ in slow.terms}
    assert tuple(values.shape) == slow.shape
    torch.testing.assert_close(values.double(), slow.forward(vectors.get), rtol=1e-6, atol=1e-8)
    gradient = torch.randn(values.shape)
    torch.autograd.backward(values, gradient)
    optimizer.step()
    handle = engine.table("products")
    assert keys_of(handle) == sorted(vectors)
    moved = slow.backward(gradient)
    expected = torch.stack([vectors[key].double() - moved[key] for key in vectors])
    torch.testing.assert_close(handle.vectors(list(vectors)).double(), expected, rtol=1e-5, atol=1e-6)
    return output


class Visits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"visitors": kv.Table(4)})
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.out(self.embeddings(batch)["visitors"]).squeeze(1)


def visits(way):
    """A trainer's context, and the stream of the loader that it trains on."""
    ctx = kv.TrainContext(
        Visits(), sparse_optimizer=kv.optim.SGD(lr=0.1), dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    return ctx, kv.data.from_loaders(loaders=1, ids=["visitors"] if way == "worker" else [])


class Scaled(torch.nn.Module):
    """Its table `a` has a bad gradient where `scale` is bad; `b` and the bias have a good one."""

    def __init__(self):
        super().__init__()
        init = kv.init.Constant(0.5)
        self.embeddings = kv.EmbeddingEngine({"a": kv.Table(1, init=init), "b": kv.Table(1, init=init)})
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        out = self.embeddings(batch)
        return out["a"].squeeze(1) * batch["scale"] + out["b"].squeeze(1) + self.bias


class Line(torch.nn.Module):
    """A weight, 0 at first, on the servers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, batch):
        return batch["x"] @ self.weight.T


def push(number, value, version, trainer, sequence, server=0):
    peer = DenseServerProxy(distributed.current().servers, server, number)
    gradient = {} if value is None else {"weight": torch.tensor([[float(value)]])}
    return peer.push_gradients(gradient, version, trainer=trainer, sequence=sequence)


def weight_of(number, servers=1):
    """The version and value on the server that has it."""
    for server in range(servers):
        version, parameters = DenseServerProxy(distributed.current().servers, server, number).pull()
        if "weight" in parameters:
            return version, parameters["weight"].item(), server
    raise AssertionError("no server has it")
