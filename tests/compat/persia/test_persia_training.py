"""PERSIA's contexts in one process: batches, features, training, evaluation, checkpoints."""

import numpy as np
import pytest
import torch
from torch import nn

import karvan as kv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, non_id_tensors, embedding_tensors):
        return self.layers(torch.cat([*non_id_tensors, *embedding_tensors], 1)).sigmoid()


def make_batch(generator, samples=32, **options):
    from persia.embedding.data import (
        IDTypeFeature,
        IDTypeFeatureWithSingleID,
        Label,
        NonIDTypeFeature,
        PersiaBatch,
    )

    users = generator.integers(0, 50, samples).astype(np.uint64)
    items = [generator.integers(0, 30, generator.integers(0, 4)).astype(np.uint64) for _ in range(samples)]
    numbers = generator.random((samples, 2), np.float32)
    labels = ((users % 2).astype(np.float32) + numbers[:, 0] > 0.8).astype(np.float32)[:, None]
    return PersiaBatch(
        [IDTypeFeature("item", items), IDTypeFeatureWithSingleID("user", users)],
        [NonIDTypeFeature(numbers, "numbers")],
        [Label(labels, "click")],
        **options,
    )


def make_dataset(batches, seed=0, **options):
    from persia.data import IterableDataset

    class Dataset(IterableDataset):
        def __iter__(self):
            generator = np.random.default_rng(seed)
            for _ in range(batches):
                yield make_batch(generator, **options)

        def __len__(self):
            return batches

    return Dataset(buffer_size=4)


def train(steps=40, prepared=False, mixed_precision=False, **options):
    """The net, its losses and the size of its tables after training."""
    from persia.ctx import TrainCtx
    from persia.data import DataLoader
    from persia.embedding.optim import Adagrad

    torch.manual_seed(0)
    net = Net()
    losses = []
    with TrainCtx(
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        mixed_precision=mixed_precision,
        **({} if prepared else {"model": net}),
        **options,
    ) as ctx:
        for data in DataLoader(make_dataset(steps), embedding_staleness=1, reproducible=True):
            if prepared:
                non_ids, embeddings, labels = ctx.prepare_features(data)
                output = net(non_ids, embeddings)
            else:
                output, labels = ctx.forward(data)
            loss = nn.functional.binary_cross_entropy(output, labels[0])
            losses.append(float(ctx.backward(loss)))
        return net, losses, ctx.get_embedding_size()


def by_hand(steps=40):
    """The same with Karvan's own names."""
    torch.manual_seed(0)
    net = Net()
    engine = kv.EmbeddingEngine({"user": kv.Table(4), "item": kv.Table(4)})
    sparse = kv.optim.Adagrad(
        engine, lr=0.1, initial_accumulator_value=0.01, accumulate="last", weight_bound=10
    )
    dense = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for batch in make_dataset(steps):
        lists = [sample.astype(np.int64).tolist() for sample in batch.id_type_features[0].data]
        users = torch.from_numpy(batch.id_type_features[1].data.astype(np.int64))
        out = engine({"user": users, "item": kv.Ragged.from_lists(lists)})
        numbers = torch.from_numpy(batch.non_id_type_features[0].data)
        labels = torch.from_numpy(batch.labels[0].data)
        loss = nn.functional.binary_cross_entropy(net([numbers], [out["item"], out["user"]]), labels)
        loss.backward()
        sparse.step()
        dense.step()
        dense.zero_grad()
        losses.append(float(loss.detach()))
    return net, losses, [sum(engine.sizes().values())]


@pytest.mark.parametrize("prepared", [False, True])
def test_training_gives_the_bits_of_karvans_own_names(configure, prepared):
    expected, received = by_hand(), train(prepared=prepared)
    assert received[1] == expected[1]
    assert received[2] == expected[2]
    assert received[1][-1] < received[1][0]
    for mine, own in zip(received[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, own)


def test_backward_returns_the_scaled_loss_and_an_overflow_divides_the_scale(configure):
    from persia.ctx import TrainCtx
    from persia.data import DataLoader
    from persia.embedding.optim import SGD

    net = Net()
    with TrainCtx(
        model=net,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        grad_scalar_update_factor=8,
    ) as ctx:
        scale = ctx.grad_scaler.get_scale()
        before = [each.clone() for each in net.parameters()]
        for number, data in enumerate(DataLoader(make_dataset(3))):
            output, labels = ctx.forward(data)
            loss = nn.functional.binary_cross_entropy(output, labels[0])
            if number == 1:
                loss = loss * torch.inf
            if number == 0:
                assert float(ctx.backward(loss)) == float(loss.detach()) * scale
                assert not all(map(torch.equal, net.parameters(), before))
                before = [each.clone() for each in net.parameters()]
            else:
                ctx.backward(loss)
            if number == 1:
                assert ctx.grad_scaler.get_scale() == scale / 8
                assert all(map(torch.equal, net.parameters(), before))


def test_scaling_the_loss_changes_no_bit(configure):
    assert train()[1] == [loss / 65536 for loss in train(mixed_precision=True)[1]]


def test_evaluation_inside_of_training_changes_nothing(configure):
    from persia.ctx import TrainCtx, cnt_ctx, eval_ctx
    from persia.data import DataLoader
    from persia.embedding.optim import Adagrad

    torch.manual_seed(0)
    net = Net()
    losses = []
    with TrainCtx(
        model=net,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        mixed_precision=False,
    ) as ctx:
        test_loader = DataLoader(make_dataset(2, seed=7, samples=40, requires_grad=False))
        assert len(test_loader) == 2
        for number, data in enumerate(DataLoader(make_dataset(40))):
            output, labels = ctx.forward(data)
            loss = nn.functional.binary_cross_entropy(output, labels[0])
            losses.append(float(ctx.backward(loss)))
            if number == 20:
                sizes = ctx.get_embedding_size()
                with eval_ctx(model=net) as evaluation:
                    assert cnt_ctx() is evaluation
                    outputs = [evaluation.forward(data) for data in test_loader]
                assert [tuple(output.shape) for output, _ in outputs] == [(40, 1), (40, 1)]
                assert not outputs[0][0].requires_grad
                assert torch.equal(
                    outputs[0][1][0],
                    torch.from_numpy(next(iter(make_dataset(1, seed=7, samples=40))).labels[0].data),
                )
                assert ctx.get_embedding_size() == sizes
                assert cnt_ctx() is ctx
                assert net.training
    assert cnt_ctx() is None
    assert losses == train()[1]
    with eval_ctx(model=net) as evaluation:  # the rows stay with their net
        again = [evaluation.forward(data)[0] for data in DataLoader(make_dataset(2, seed=7, samples=40))]
    assert not torch.equal(again[0], outputs[0][0])  # it was trained since
    assert evaluation.preprocess_mode.name == "EVAL"


def trained(steps, folder=None, load=None, fresh=True):
    """Losses of some steps, before which a checkpoint may be loaded and after which one may be saved."""
    from persia.ctx import TrainCtx
    from persia.data import DataLoader
    from persia.embedding.optim import Adam

    torch.manual_seed(3)
    net = Net()
    losses = []
    with TrainCtx(
        model=net, embedding_optimizer=Adam(lr=0.01), dense_optimizer=torch.optim.Adam(net.parameters())
    ) as ctx:
        loader = DataLoader(make_dataset(40))
        if load is not None:
            ctx.load_checkpoint(str(load))
        for number, data in enumerate(loader):
            output, labels = ctx.forward(data)
            losses.append(float(ctx.backward(nn.functional.binary_cross_entropy(output, labels[0]))))
            if number + 1 == steps:
                break
        if folder is not None:
            ctx.dump_checkpoint(str(folder), blocking=False)
            ctx.wait_for_dump_embedding()
        return losses


def test_a_checkpoint_continues_with_the_same_bits(configure, tmp_path):
    whole = trained(30)
    first = trained(12, folder=tmp_path / "run")
    rest = trained(18, load=tmp_path / "run")
    assert first + rest == whole


def test_rows_alone_are_saved_loaded_and_cleared(configure, tmp_path):
    from persia.ctx import eval_ctx

    net, _, sizes = train(5)
    batch = make_batch(np.random.default_rng(1))
    with eval_ctx(model=net) as ctx:
        data = ctx.get_embedding_from_bytes(batch.to_bytes())
        expected = ctx.prepare_features(data)
        ctx.dump_embedding(str(tmp_path / "rows"), blocking=True)
        assert ctx.get_embedding_size() == sizes
        ctx.clear_embeddings()
        assert ctx.get_embedding_size() == [0]
        assert not ctx.prepare_features(data)[1][0].any()
        ctx.load_embedding(str(tmp_path / "rows"))
        assert ctx.get_embedding_size() == sizes
        again = ctx.prepare_features(data)
    for one, other in zip(expected, again, strict=True):
        assert all(map(torch.equal, one, other))
