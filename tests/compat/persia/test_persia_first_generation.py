"""PERSIA's first generation: growing batches, row gradients that the program unscales; the DLRM document."""

import numpy as np
import pytest
import torch
from torch import nn

import karvan as kv


def ids(*samples):
    return [np.array(sample, np.uint64) for sample in samples]


def make_data():
    from persia.prelude import PyPersiaBatchData

    data = PyPersiaBatchData()
    data.add_dense([np.ones((2, 3), np.float32)])
    data.add_dense_i64(np.zeros((2, 1), np.int64))
    data.add_sparse([("user", ids([1], [2])), ("item", ids([1, 2], []))])
    data.add_target(np.array([[1], [0]], np.float32))
    return data


def make_context(**options):
    from persia.ctx import TrainCtx
    from persia.sparse.optim import SGD

    return TrainCtx(sparse_optimizer=SGD(lr=1.0), **options)


def test_batches_have_what_was_added_under_older_and_newer_names():
    from persia.prelude import PyPersiaBatchData

    older, newer = make_data().batch(), PyPersiaBatchData()
    newer.add_non_id_type_feature(np.ones((2, 3), np.float32))
    newer.add_non_id_type_feature(np.zeros((2, 1), np.int64))
    newer.add_id_type_features([("user", ids([1], [2])), ("item", ids([1, 2], []))])
    assert not newer.batch().requires_grad
    newer.add_label(np.array([[1], [0]], np.float32))
    assert newer.batch().to_bytes() == older.to_bytes()
    assert older.requires_grad
    for add in (newer.add_dense_f32, newer.add_dense_f64, newer.add_dense_i32):
        with pytest.raises(TypeError, match="expects a 2-D array of"):
            add(np.zeros(2, np.int16))


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_gradients_of_rows_are_unscaled_and_applied(configure, scale):
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    with make_context(grad_scaler=scaler, data_queue_size=3) as ctx:
        batch = ctx.get_embedding_from_data(make_data())
        (dense, sparse), target = ctx.prepare_features(batch)
        assert [tuple(each.shape) for each in (*dense, *sparse, target)] == [
            (2, 3),
            (2, 1),
            (2, 4),
            (2, 4),
            (2, 1),
        ]
        loss = sparse[0].sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        with pytest.raises(ValueError, match=r"the scale that the loss had .* got 7"):
            ctx.on_after_backward(7.0, 0)
        assert ctx.on_after_backward(scale or 1.0, 0) is True
        (_, after), _ = ctx.prepare_features(batch)
        assert torch.allclose(after[0], sparse[0] - 1)
        assert torch.equal(after[1], sparse[1])


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_are_not_finite_skip_their_slot_or_with_a_scaled_loss_all(configure, scaled):
    from persia.ctx import eval_ctx

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if scaled else None
    with make_context(grad_scaler=scaler) as ctx:
        batch = ctx.get_embedding_from_data(make_data())
        (_, sparse), _ = ctx.prepare_features(batch)
        (2 * sparse[0].sum() + sparse[1].sum() * torch.inf).backward()
        assert ctx.on_after_backward(2.0 if scaled else 1.0, 1) is False
        (_, after), _ = ctx.prepare_features(batch)
        assert torch.equal(sparse[1], after[1])
        assert torch.allclose(after[0], sparse[0] if scaled else sparse[0] - 2)
        with eval_ctx() as evaluation:
            assert all(map(torch.equal, after, evaluation.prepare_features(batch)[1]))


def test_options(configure):
    from persia.ctx import TrainCtx, init_backend
    from persia.data import DataLoader, Dataloader, StreamDataset, StreamingDataset

    assert (Dataloader, StreamDataset) == (DataLoader, StreamingDataset)
    with pytest.warns(UserWarning, match="port=8000 .* listen at no port"):
        make_context(port=8000)
    with pytest.raises(TypeError, match=r"of persia\.sparse\.optim, got Adam"):
        TrainCtx(sparse_optimizer=kv.optim.Adam(), port=None)
    with pytest.raises(NotImplementedError, match="wait_server_ready False"):
        init_backend(wait_server_ready=False)
    with make_context() as ctx:
        batch = ctx.get_embedding_from_data(make_data())
        with pytest.raises(NotImplementedError, match="use on_after_backward"):
            ctx.backward(torch.ones(1))
        with pytest.raises(NotImplementedError, match="use prepare_features"):
            ctx.forward(batch)
        with pytest.raises(ValueError, match="batch_idx from 0 on"):
            ctx.on_after_backward(1.0, -1)


def test_it_learns(configure):
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    dense_optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    with make_context(grad_scaler=scaler) as ctx:
        for number in range(40):
            batch = ctx.get_embedding_from_data(make_data())
            (_, sparse), target = ctx.prepare_features(batch)
            loss = nn.functional.binary_cross_entropy_with_logits(net(torch.cat(sparse, 1)), target)
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            finite = ctx.on_after_backward(scale, number)
            scaler.step(dense_optimizer)
            dense_optimizer.zero_grad()
            if finite:
                scaler.update()
            else:
                scaler.update(scale / 4.0)
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 < losses[0]
