"""PERSIA's batches and slots: checks, dtypes, order, layouts of vectors."""

import numpy as np
import pytest
import torch

DTYPES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64", "uint8"]


def ids(*samples):
    return [np.array(sample, np.uint64) for sample in samples]


def looked_up(batch, train=False, **options):
    """The features of a batch: numbers, vectors, labels; by a context that trains, or evaluates after one."""
    from persia.ctx import TrainCtx
    from persia.embedding.optim import SGD

    net = torch.nn.Linear(1, 1)
    with TrainCtx(
        model=net,
        embedding_optimizer=SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        mixed_precision=False,
        **options,
    ) as ctx:
        return ctx.prepare_features(ctx.get_embedding_from_data(batch))


def make_batch(features, **options):
    from persia.embedding.data import IDTypeFeature, Label, PersiaBatch

    made = [IDTypeFeature(name, data) for name, data in features.items()]
    return PersiaBatch(made, labels=[Label(np.ones((made[0].batch_size, 1), np.float32))], **options)


def test_batches_are_checked():
    from persia.embedding.data import (
        IDTypeFeature,
        IDTypeFeatureWithSingleID,
        Label,
        NonIDTypeFeature,
        PersiaBatch,
    )

    one = IDTypeFeature("user", ids([1], [2, 3]))
    label = Label(np.ones(2, np.float32))
    with pytest.raises(RuntimeError, match="expects labels, got none"):
        PersiaBatch([one])
    PersiaBatch([one], requires_grad=False)
    with pytest.raises(ValueError, match="2 samples in 'label_anonymous', got 3"):
        PersiaBatch([one], labels=[Label(np.ones(3, np.float32))])
    with pytest.raises(ValueError, match="3 samples in 'user', got 2"):
        PersiaBatch([one], labels=[label], batch_size=3)
    with pytest.raises(ValueError, match="at most 65535 samples, got 65536"):
        PersiaBatch([IDTypeFeatureWithSingleID("user", np.ones(65536, np.uint64))], requires_grad=False)
    with pytest.raises(ValueError, match="at least one feature of ids"):
        PersiaBatch([], labels=[label])
    with pytest.raises(ValueError, match="'user' twice"):
        PersiaBatch([one, one], labels=[label])
    with pytest.raises(TypeError, match="ids of uint64, got int64"):
        IDTypeFeature("user", [np.ones(2, np.int64)])
    with pytest.raises(ValueError, match="in one dimension"):
        IDTypeFeatureWithSingleID("user", np.ones((2, 2), np.uint64))
    with pytest.raises(TypeError, match="got float16"):
        NonIDTypeFeature(np.ones(2, np.float16))
    with pytest.raises(TypeError, match="meta as bytes"):
        PersiaBatch([one], labels=[label], meta="text")


def test_numbers_labels_and_meta_arrive_exactly(configure):
    from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch

    generator = np.random.default_rng(0)
    arrays = [generator.integers(0, 2, (3, 2)).astype(dtype) for dtype in DTYPES]
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("user", np.array([1, 2, 2**64 - 1], np.uint64))],
        [NonIDTypeFeature(array) for array in arrays],
        [Label(array, f"label {number}") for number, array in enumerate(arrays)],
        meta=bytes(range(256)),
    )
    from persia.ctx import eval_ctx

    for each in (batch, PersiaBatch.from_bytes(batch.to_bytes())):
        with eval_ctx() as ctx:
            data = ctx.get_embedding_from_data(each)
            non_ids, _, labels = ctx.prepare_features(data)
        assert data.meta == bytes(range(256))
        assert data.label_names == [f"label {number}" for number in range(8)]
        for received in (non_ids, labels):
            assert [str(tensor.dtype).removeprefix("torch.") for tensor in received] == DTYPES
            assert all(np.array_equal(*pair) for pair in zip(received, arrays, strict=True))


def test_vectors_come_in_the_order_of_the_batch_and_empty_samples_are_zero(configure):
    configure({"slots_config": {"user": {"dim": 4}, "item": {"dim": 2}, "shop": {"dim": 8}}})
    batch = make_batch({"item": ids([1, 2], []), "user": ids([1], [1])})
    _, (item, user), _ = looked_up(batch)
    assert (item.shape, user.shape) == ((2, 2), (2, 4))
    assert item[0].any()
    assert not item[1].any()
    assert torch.equal(user[0], user[1])
    assert float(user.detach().abs().max()) <= 0.01


def test_a_raw_slot_gives_all_vectors_and_a_mask(configure):
    configure({"slots_config": {"item": {"dim": 2, "sample_fixed_size": 3, "embedding_summation": False}}})
    _, (raw,), _ = looked_up(make_batch({"item": ids([7], [], [1, 2, 3, 4])}))
    assert raw.shape == (3, 3, 3)
    assert raw[:, :, 2].tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert raw[2, :, :2].all()
    assert not raw[1].any()


def test_sqrt_scaling_hash_stacks_and_groups(configure):
    configure(
        {
            "slots_config": {
                "sum": {"dim": 4},
                "scaled": {"dim": 4, "sqrt_scaling": True},
                "alone": {"dim": 4},
                "stack": {"dim": 2, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 10}},
            },
            "feature_index_prefix_bit": 12,
            "feature_groups": {"both": ["sum", "scaled"]},
        }
    )
    several = ids([1, 2, 3, 4])
    names = dict.fromkeys(("sum", "scaled", "alone"), several)
    stack = ids([12, 23, 34, 56, 78, 90])
    _, (total, scaled, alone, _), _ = looked_up(make_batch({**names, "stack": stack}))
    assert torch.allclose(scaled, total / 2)
    assert not torch.allclose(alone, total)

    from persia.ctx import eval_ctx

    with eval_ctx() as ctx:
        engine = ctx.open()[1].embeddings
        assert [table.name for table in engine.tables()] == ["both", "alone", "stack"]


def test_an_unknown_feature_is_named(configure):
    with pytest.raises(
        KeyError, match="'shop', but the embedding configuration has no such slot, only: user, item"
    ):
        looked_up(make_batch({"shop": ids([1])}))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({}, "slots_config"),
        ({"slots_config": {}}, "at least one slot"),
        ({"slots_config": {"user": {}}}, "user.dim"),
        ({"slots_config": {"user": {"dim": 4}}, "feature_groups": {"a": ["item"]}}, "names the slot 'item'"),
        (
            {"slots_config": {"user": {"dim": 4}}, "feature_groups": {"a": ["user"], "b": ["user"]}},
            "in two groups, 'a' and 'b'",
        ),
        (
            {"slots_config": {"user": {"dim": 4}, "item": {"dim": 4}}, "feature_groups": {"user": ["item"]}},
            "the name of a slot that is not in it, 'user'",
        ),
        (
            {"slots_config": {"user": {"dim": 4, "sqrt_scaling": True, "embedding_summation": False}}},
            "sqrt_scaling scales a sum",
        ),
        ({"slots_config": {"user": {"dim": 4}}, "feature_index_prefix_bit": 64}, "feature_index_prefix_bit"),
    ],
)
def test_wrong_embedding_configurations_are_errors_that_name_the_key(configure, content, text):
    from persia.ctx import eval_ctx

    configure(content)
    with eval_ctx() as ctx, pytest.raises(ValueError, match=text):
        ctx.open()


def test_older_names_of_the_configuration_are_known(configure):
    configure({"slot_configs": {"user": {"dim": 3}}})
    _, (user,), _ = looked_up(make_batch({"user": ids([1])}))
    assert user.shape == (1, 3)


def test_limits_of_rows(configure):
    from persia.embedding import EmbeddingConfig

    batch = make_batch({"user": ids([1]), "item": ids([1])})
    config = EmbeddingConfig(emb_initialization=(0.5, 0.6))
    _, (user, _), _ = looked_up(batch, embedding_config=config)
    assert ((user >= 0.5) & (user < 0.6)).all()
    _, (user, _), _ = looked_up(batch, embedding_config=EmbeddingConfig(admit_probability=0))
    assert not user.any()
    with pytest.raises(ValueError, match=r"p from 0 to 1, got 1\.5"):
        looked_up(batch, embedding_config=EmbeddingConfig(admit_probability=1.5))


def admitted(times):
    """How many of 500 ids have rows after each was seen some times, at a probability of 0.1."""
    from persia.ctx import TrainCtx
    from persia.embedding import EmbeddingConfig
    from persia.embedding.optim import SGD

    net = torch.nn.Linear(4, 1)
    batch = make_batch({"user": ids(*([number] for number in range(500)))})
    with TrainCtx(
        embedding_optimizer=SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(admit_probability=0.1),
        mixed_precision=False,
    ) as ctx:
        for _ in range(times):
            _, (user,), _ = ctx.prepare_features(ctx.get_embedding_from_data(batch))
            ctx.backward(net(user).mean())
        return ctx.get_embedding_size()


def test_an_id_is_admitted_with_a_probability_at_every_miss(configure):
    configure({"slots_config": {"user": {"dim": 4}}})
    assert 20 <= admitted(1)[0] <= 90  # 50, give or take four to six standard deviations
    assert admitted(200) == [500]
