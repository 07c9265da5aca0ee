"""A PERSIA program continues from a checkpoint of PERSIA, which was imported."""

import os

import numpy as np
import pytest
import torch
from foreign_files import sign_of, write_persia
from torch import nn

import karvan as kv
from karvan.checkpoint import import_persia
from karvan.cli.main import main

SLOTS = {
    "slots_config": {"user": {"dim": 4}, "item": {"dim": 4}, "other": {"dim": 4}},
    "feature_groups": {"things": ["item", "other"]},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, non_id_tensors, embedding_tensors):
        return self.layer(torch.cat(embedding_tensors, 1)).sigmoid()


def batches(first, last):
    """Some batches of a stream that is always the same."""
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch

    for number in range(first, last):
        generator = np.random.default_rng(number)
        users, items = generator.integers(0, 30, (2, 16)).astype(np.uint64)
        yield PersiaBatch(
            [IDTypeFeatureWithSingleID("user", users), IDTypeFeatureWithSingleID("item", items)],
            [],
            [Label((users % 2).astype(np.float32)[:, None])],
        )


def trained(optimizer, first, last, load=None, rows_only=False):
    """Losses of some batches, the net and its rows by table."""
    from persia.ctx import TrainCtx

    torch.manual_seed(0)
    net = Net()
    losses = []
    dense = torch.optim.SGD(net.parameters(), lr=0.1)
    with TrainCtx(
        model=net, embedding_optimizer=optimizer, dense_optimizer=dense, mixed_precision=False
    ) as ctx:
        if load is not None:
            (ctx.load_embedding if rows_only else ctx.load_checkpoint)(str(load))
        for batch in batches(first, last):
            output, labels = ctx.forward(ctx.get_embedding_from_data(batch))
            losses.append(float(ctx.backward(nn.functional.binary_cross_entropy(output, labels[0]))))
        embedded = ctx.open()[1]
        rows = {table.name: table.snapshot() for table in embedded.embeddings.tables()}
        return losses, net, rows


@pytest.mark.parametrize("shared", [False, True])
def test_training_continues_with_the_bits_of_one_that_never_stopped(configure, tmp_path, shared):
    """The rows of the first half are written as PERSIA does, and imported."""
    from persia.embedding.optim import Adagrad

    configure(SLOTS)
    optimizer = Adagrad(lr=0.1, vectorwise_shared=shared)
    whole, _, _ = trained(optimizer, 0, 24)
    first, net, rows = trained(optimizer, 0, 10)
    groups = ["things", "user"]  # feature groups come first
    signs = [
        (sign_of(int(key), groups.index(name)), vector, state)
        for name in groups
        for key, vector, state in zip(rows[name].keys, rows[name].vectors, rows[name].state, strict=True)
    ]
    write_persia(tmp_path / "dump", signs, servers=2, shards=3, dense=net.state_dict())
    made = import_persia(tmp_path / "dump", tmp_path / "imported", os.environ["PERSIA_EMBEDDING_CONFIG"])
    assert [(table.name, table.optimizer) for table in made.tables] == [
        (name, "Adagrad by row" if shared else "Adagrad") for name in groups
    ]
    rest, _, _ = trained(optimizer, 10, 24, load=tmp_path / "imported")
    assert first + rest == whole


def test_rows_alone_can_be_loaded(configure, tmp_path):
    from persia.embedding.optim import SGD

    configure(SLOTS)
    vectors = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    write_persia(tmp_path / "dump", [(sign_of(key, 1), vectors[key], ()) for key in range(30)])
    import_persia(tmp_path / "dump", tmp_path / "imported", os.environ["PERSIA_EMBEDDING_CONFIG"])
    _, _, rows = trained(SGD(lr=0.1), 0, 0, load=tmp_path / "imported", rows_only=True)
    found = {int(key): vector for key, vector in zip(rows["user"].keys, rows["user"].vectors, strict=True)}
    assert found.keys() == set(range(30))
    assert all(np.array_equal(found[key], vectors[key]) for key in found)
    assert len(rows["things"].keys) == 0


def test_buckets_of_a_hash_stack_are_found_again(configure, tmp_path):
    """A slot with a hash stack: PERSIA saves buckets, which are the keys of Karvan's table, too."""
    stack = {"hash_stack_rounds": 2, "embedding_size": 10}
    configure({"slots_config": {"user": {"dim": 4, "hash_stack_config": stack}, "item": {"dim": 4}}})
    buckets = np.eye(20, 4, dtype=np.float32) + np.arange(20, dtype=np.float32)[:, None]
    write_persia(tmp_path / "dump", [(sign_of(key, 0), buckets[key], ()) for key in range(20)])
    import_persia(tmp_path / "dump", tmp_path / "imported", os.environ["PERSIA_EMBEDDING_CONFIG"])
    from persia.ctx import eval_ctx
    from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch

    ids = np.array([12, 23, 34, 56, 78, 90], np.uint64)
    expected = {12: (2, 18), 23: (5, 10), 34: (0, 11), 56: (6, 17), 78: (7, 12), 90: (8, 16)}
    with eval_ctx(model=Net()) as ctx:
        ctx.load_embedding(str(tmp_path / "imported"))
        zeros = IDTypeFeatureWithSingleID("item", ids)
        batch = PersiaBatch([IDTypeFeatureWithSingleID("user", ids), zeros], requires_grad=False)
        _, (users, _), _ = ctx.prepare_features(ctx.get_embedding_from_data(batch))
    for user, vector in zip(ids, users, strict=True):
        one, two = expected[int(user)]
        assert vector.tolist() == (buckets[one] + buckets[two]).tolist()


PROGRAM = """
import numpy as np
import sys
import torch
from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, non_id_tensors, embedding_tensors):
        return self.layer(embedding_tensors[0])


net = Net()
dense = torch.optim.SGD(net.parameters(), lr=0.0)
sparse = Adagrad(lr=0.5)
with TrainCtx(model=net, embedding_optimizer=sparse, dense_optimizer=dense, mixed_precision=False) as ctx:
    ctx.load_checkpoint(sys.argv[1])
    ids = np.array([3], np.uint64)
    batch = PersiaBatch([IDTypeFeatureWithSingleID("user", ids)], [], [Label(np.ones((1, 1), np.float32))])
    output, labels = ctx.forward(ctx.get_embedding_from_data(batch))
    ctx.backward(output.sum())
    ctx.dump_checkpoint(sys.argv[2])
"""


def test_a_program_run_as_persia_trains_the_imported_rows(configure, tmp_path):
    configure({"slots_config": {"user": {"dim": 2}}})
    (tmp_path / "train.py").write_text(PROGRAM)
    rows = [(sign_of(3, 0), (1.0, 2.0), (0.25, 4.0)), (sign_of(4, 0), (5.0, 6.0), (1.0, 1.0))]
    dense = {"layer.weight": torch.tensor([[2.0, 4.0]]), "layer.bias": torch.zeros(1)}
    write_persia(tmp_path / "dump", rows, dense=dense)
    dump, imported, after = (str(tmp_path / name) for name in ("dump", "imported", "after"))
    config = ["--embedding-config", os.environ["PERSIA_EMBEDDING_CONFIG"]]
    assert main(["import-checkpoint", "--from", "persia", dump, imported, *config]) == 0
    assert main(["run", "--as", "persia", str(tmp_path / "train.py"), imported, after]) == 0
    trained_row = kv.checkpoint.row(after, "user", 3)
    # The gradient is (2, 4), and PERSIA's Adagrad divides by the accumulator as it was.
    np.testing.assert_allclose(trained_row.vector, [1 - 0.5 * 2 / 0.5, 2 - 0.5 * 4 / 2], rtol=1e-5)
    np.testing.assert_allclose(trained_row.state, [0.25 + 4, 4 + 16], rtol=1e-6)
    other = kv.checkpoint.row(after, "user", 4)
    assert (other.vector.tolist(), other.state.tolist()) == ([5, 6], [1, 1])
