"""Statistics of a loader's transform: in the checkpoint, back from it, and missed before training begins."""

import logging

import pytest
import torch
from train_helpers import batches, everything, model, records, trainer

import karvan as kv
from karvan.checkpoint import CheckpointError


def features(name="features", column="price"):
    return kv.FeatureEngine([kv.Feature(column).normalise()], name=name)


def columns(rows=192, seed=0):
    return {name: column.numpy() for name, column in records(rows, seed).items()}


def read(engine, seed=0):
    return kv.data.read(columns(seed=seed), 16, transform=engine)


def statistics(engine):
    return engine.get_extra_state()["price"].tolist()


def fitted(seed=0, **options):
    return features(**options).fit(kv.data.read(columns(seed=seed), 16))


def test_a_checkpoint_has_the_statistics_and_a_new_program_gets_them_back(tmp_path):
    engine = fitted()
    net = model()
    first = trainer(net, checkpoints=tmp_path)
    first.fit(read(engine), max_steps=5)
    expected = torch.cat([output for output, _ in first.predict(read(engine, seed=9))])

    unfitted, again = features(), model()
    resumed = trainer(again, checkpoints=tmp_path)
    resumed.fit(read(unfitted), max_steps=12)  # before the first batch is read
    assert statistics(unfitted) == statistics(engine)
    straight = model()
    trainer(straight).fit(read(engine), max_steps=12)
    assert everything(again).keys() == everything(straight).keys()
    assert all(torch.equal(value, everything(straight)[name]) for name, value in everything(again).items())

    other, loaded = features(), model()
    checkpoint = next(kv.checkpoint.Checkpoint(path) for path in sorted(tmp_path.glob("step-*")))
    state = checkpoint.load(loaded)
    loaded.load_state_dict(state["model"])
    checkpoint.load_transforms(other)
    got = torch.cat([output for output, _ in trainer(loaded).predict(read(other, seed=9))])
    assert checkpoint.step == 5
    assert torch.equal(got, expected)


def test_the_statistics_of_a_checkpoint_win_over_those_of_todays_data(tmp_path, caplog):
    engine = fitted()
    trainer(checkpoints=tmp_path).fit(read(engine), max_steps=3)
    today = fitted(seed=1)
    assert statistics(today) != statistics(engine)
    with caplog.at_level(logging.WARNING):
        trainer(checkpoints=tmp_path).fit(read(today), max_steps=5)
    assert statistics(today) == statistics(engine)
    assert "'features' had other statistics" in caplog.text


def test_an_engine_without_statistics_is_an_error_before_training_begins(tmp_path):
    begun = []

    class Begins(kv.callbacks.Callback):
        def on_fit_begin(self, trainer):
            begun.append(trainer)

    for data, options in (
        (read(features()), {}),
        (batches(), {"eval_data": read(features())}),
    ):
        with pytest.raises(ValueError, match="FeatureEngine 'features' has no statistics yet for 'price'"):
            trainer(callbacks=[Begins()], checkpoints=tmp_path).fit(data, **options)
    inside = torch.nn.Sequential(features(), model())
    with pytest.raises(ValueError, match="FeatureEngine 'features' has no statistics yet"):
        trainer(inside, callbacks=[Begins()]).fit(batches())
    assert begun == []
    with pytest.raises(ValueError, match="loader without this transform"):
        next(iter(read(features())))


def test_two_engines_need_two_names(tmp_path):
    with pytest.raises(ValueError, match="Two different transforms have the name 'features'"):
        trainer().fit(read(fitted()), eval_data=read(fitted(seed=1)))
    stateless = [kv.FeatureEngine([kv.Feature("price").log1p()]) for _ in range(2)]
    trainer().fit(read(stateless[0]), eval_data=read(stateless[1]), max_steps=1)

    mine, other = fitted(), fitted(seed=1, name="evaluation")
    trainer(checkpoints=tmp_path).fit(read(mine), eval_data=read(other), max_steps=2)
    engines = features(), features("evaluation")
    kv.checkpoint.find(tmp_path).load_transforms(*engines)
    assert [statistics(engine) for engine in engines] == [statistics(mine), statistics(other)]


def test_another_name_or_other_features_than_the_checkpoints_are_an_error(tmp_path):
    trainer(checkpoints=tmp_path).fit(read(fitted()), max_steps=2)
    with pytest.raises(ValueError, match=r"transform 'features', but the data has transform 'renamed'"):
        trainer(checkpoints=tmp_path).fit(read(fitted(name="renamed")), max_steps=3)
    found = kv.checkpoint.find(tmp_path)
    with pytest.raises(
        CheckpointError, match="statistics of transform 'renamed', got statistics of 'features'"
    ):
        found.load_transforms(features("renamed"))
    with pytest.raises(
        CheckpointError, match=r"transform 'features' is another: .* expects statistics of 'label'"
    ):
        found.load_transforms(features(column="label"))


def test_statistics_stay_in_the_run_while_its_data_has_no_transform(tmp_path):
    engine = fitted()
    trainer(checkpoints=tmp_path).fit(read(engine), max_steps=2)
    trainer(checkpoints=tmp_path).fit(batches(), max_steps=4)
    again = features()
    kv.checkpoint.find(tmp_path).load_transforms(again)
    assert statistics(again) == statistics(engine)


def train(ctx, data, steps):
    for batch, _ in zip(ctx.loader(data), range(steps), strict=False):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels))


def test_a_stream_of_a_loader_has_its_transform(tmp_path):
    engine = fitted()
    trainer(checkpoints=tmp_path).fit(kv.data.Stream(read(engine)), max_steps=2)
    again = features()
    trainer(checkpoints=tmp_path).fit(kv.data.Stream(read(again)), max_steps=4)
    assert statistics(again) == statistics(engine)


def test_contexts_keep_and_restore_statistics(tmp_path):
    engine = fitted()
    net = model()
    with kv.TrainContext(net, dense_optimizer=torch.optim.Adam, sparse_optimizer=kv.optim.SGD(lr=0.1)) as ctx:
        train(ctx, read(engine), 3)
        ctx.save(tmp_path)
    unfitted = features()
    again = model()
    with kv.TrainContext(
        again, dense_optimizer=torch.optim.Adam, sparse_optimizer=kv.optim.SGD(lr=0.1)
    ) as ctx:
        ctx.load(tmp_path)
        train(ctx, read(unfitted), 1)
    assert statistics(unfitted) == statistics(engine)

    with (
        pytest.raises(ValueError, match="has no statistics yet"),
        kv.TrainContext(
            model(), dense_optimizer=torch.optim.Adam, sparse_optimizer=kv.optim.SGD(lr=0.1)
        ) as ctx,
    ):
        train(ctx, read(features()), 1)
    new = features()
    with kv.InferContext(model(), tmp_path) as ctx:
        got = torch.cat([ctx.predict(batch) for batch in ctx.loader(read(new, seed=4))])
    with kv.InferContext(net) as ctx:
        expected = torch.cat([ctx.predict(batch) for batch in ctx.loader(read(engine, seed=4))])
    assert torch.equal(got, expected)


def test_a_single_pass_has_all_records_and_leaves_the_position_alone():
    engine = fitted()
    loader = kv.data.read(columns(), 16, shuffle=50, transform=engine, epochs=3)
    next(iter(loader))
    position = loader.state_dict()
    plain = torch.cat([batch["price"] for batch in loader.single_pass(transformed=False)])
    assert torch.equal(plain, records(192)["price"])
    scaled = torch.cat([batch["price"] for batch in loader.single_pass()])
    assert torch.equal(scaled, engine({"price": plain})["price"])
    assert loader.state_dict() == position


def test_a_warm_start_takes_the_statistics_of_engines_in_the_model(tmp_path):
    def net(column="price"):
        return torch.nn.Sequential(features(column=column), model())

    trained = net()
    trained[0].fit(batches())
    trainer(trained, checkpoints=tmp_path).fit(batches(), max_steps=2)
    new = net()
    report = kv.checkpoint.warm_start(new, tmp_path)
    assert statistics(new[0]) == statistics(trained[0])
    assert report.dense["0._extra_state"] == "0._extra_state"
    other = net("label")
    assert "other features" in kv.checkpoint.warm_start(other, tmp_path).left_dense["0._extra_state"]
    left = net()
    kv.checkpoint.warm_start(left, tmp_path, dense="1.*")
    assert left[0].unfitted == ["price"]
