"""What a Trainer computes: the numbers of a plain PyTorch loop, and what its options add to them."""

import math

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from train_helpers import StopAt, assert_same, batches, everything, loader, model, trainer

import karvan as kv


def plain_loop(
    data,
    epochs=1,
    gradient_accumulation_steps=1,
    change=lambda net: None,
    loss_of=functional.binary_cross_entropy_with_logits,
):
    """What a user would write without a Trainer."""
    net = model()
    dense = torch.optim.Adam(net.parameters(), lr=0.01)
    sparse = kv.optim.Adagrad(net, lr=0.1)
    for _ in range(epochs):
        groups: list[list] = [[]]
        for batch in data:
            if len(groups[-1]) == gradient_accumulation_steps:
                groups.append([])
            groups[-1].append(batch)
        for group in groups:
            for batch in group:
                loss = loss_of(net(batch), batch["label"])
                (loss / len(group)).backward()
            change(net)
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
    return net


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("data", [batches, loader])
def test_the_trainer_gives_the_bits_of_a_plain_loop(data, ahead):
    expected = plain_loop(data(), epochs=2)
    net = model()
    result = trainer(net, prefetch=ahead, metrics={"auc": kv.metrics.AUC()}).fit(data(), epochs=2)
    assert (result.step, result.epoch, result.trained, result.stopped) == (24, 2, 24, None)
    assert result.samples == 2 * 12 * 16
    assert_same(net, expected)


@given(
    size=st.sampled_from([33, 100, 124, 250]) | st.integers(17, 300),
    rows=st.integers(1, 400),
    kind=st.sampled_from(["bce", "mse"]),
    shuffle=st.sampled_from([0, 64]),
)
def test_the_bits_are_those_of_a_plain_loop_whatever_the_size_of_batches(size, rows, kind, shuffle):
    """Also in the last batch of an epoch, which is smaller, and cut from the middle of a piece."""
    losses = {
        "bce": (kv.losses.BinaryCrossEntropy(), functional.binary_cross_entropy_with_logits),
        "mse": (kv.losses.MeanSquaredError(), functional.mse_loss),
    }
    ours, torchs = losses[kind]
    net = model()
    trainer(net, loss=ours).fit(loader(rows, size, shuffle=shuffle))
    assert_same(net, plain_loop(loader(rows, size, shuffle=shuffle), loss_of=torchs))


@pytest.mark.parametrize("accumulate", [2, 5])
def test_accumulated_gradients_are_means_and_so_is_that_of_a_shorter_last_group(accumulate):
    net = model()
    result = trainer(net, gradient_accumulation_steps=accumulate).fit(batches(), epochs=2)
    assert result.step == 2 * math.ceil(12 / accumulate)
    assert_same(net, plain_loop(batches(), 2, accumulate))


def test_accumulating_equal_batches_is_like_one_of_them():
    """With the mean of equal gradients, dense and sparse steps are those of a single batch."""
    one, two = model(dropout=0.0), model(dropout=0.0)
    batch = batches(1)[0]
    trainer(one).fit([batch])
    trainer(two, gradient_accumulation_steps=4).fit([batch] * 4)
    for name, value in everything(one).items():
        if "counts" not in name and "last_steps" not in name:
            torch.testing.assert_close(everything(two)[name], value, rtol=1e-5, atol=1e-6)


def test_evaluation_during_a_fit_changes_no_bit():
    plain = model()
    trainer(plain).fit(batches(), epochs=2)
    watched = model()
    # Other keys, and a loader of torch, which draws from the global generator.
    others = torch.utils.data.DataLoader(batches(5, seed=9), batch_size=None, shuffle=True)
    fit = trainer(watched, metrics={"auc": kv.metrics.AUC()})
    result = fit.fit_and_evaluate(batches(), others, epochs=2, eval_every=3)
    assert_same(plain, watched)
    assert set(result.evaluation) == {"loss", "auc"}


def test_evaluate_changes_nothing_and_leaves_modes_as_they_were():
    net = model()
    fit = trainer(net, metrics={"auc": kv.metrics.AUC()})
    fit.fit(batches(4))
    net.net.eval()
    before, random = everything(net), torch.get_rng_state()
    step, training_auc = net.embeddings.step, fit.metrics["auc"].compute()
    first, second = fit.evaluate(batches(5, seed=3)), fit.evaluate(loader(80, seed=3))
    after = everything(net)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert (net.training, net.net.training, net.last.training) == (True, False, True)
    assert torch.equal(torch.get_rng_state(), random)
    assert (net.embeddings.step, fit.step, fit.metrics["auc"].compute()) == (step, 4, training_auc)
    assert first["auc"] == second["auc"]
    assert first["loss"] == pytest.approx(second["loss"])


def test_the_loss_of_an_evaluation_is_the_mean_over_samples():
    net = model()
    fit = trainer(net)
    whole = batches(3, 10)
    pieces = [kv.Batch({n: e[a:b] for n, e in whole[0].items()}) for a, b in ((0, 3), (3, 10))] + whole[1:]
    assert fit.evaluate(pieces)["loss"] == pytest.approx(fit.evaluate(whole)["loss"], rel=1e-6)


def test_predict_gives_outputs_and_columns_and_can_be_left_early():
    net = model()
    fit = trainer(net)
    data = batches(3)
    found = list(fit.predict(data, columns=["label", "user"]))
    net.eval()
    with torch.no_grad():
        for (output, columns), batch in zip(found, data, strict=True):
            assert torch.equal(output, net(batch))
            assert torch.equal(columns["user"], batch["user"])
            assert list(columns) == ["label", "user"]
    net.train()
    for _ in fit.predict(data):
        assert torch.is_grad_enabled()  # the caller's code does not run in the mode of predictions
        assert net.training
        break
    with pytest.raises(KeyError, match="no column 'age' in the batch, which has: user, item"):
        next(fit.predict(data, columns=["age"]))


def test_predictions_are_written_in_files_that_appear_when_they_are_complete(tmp_path):
    fit, data = trainer(), batches(3)

    def fails_at_the_end():
        yield from fit.predict(data, columns=["user"])
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        kv.train.write_predictions(fails_at_the_end(), tmp_path / "out", sigmoid=True)
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == [f"rank-00000-{place:08d}.parquet" for place in range(3)]
    for path, batch, (output, _) in zip(files, data, fit.predict(data), strict=True):
        table = pq.read_table(path)
        assert table.column_names == ["user", "prediction"]
        assert table["user"].to_pylist() == batch["user"].tolist()
        assert table["prediction"].to_pylist() == output.sigmoid().tolist()
    assert kv.train.write_predictions(fit.predict(data), tmp_path / "out") == sum(
        map(len, (b["user"] for b in data))
    )


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"), [(None, 30, 30), (2, 30, 24), (3, 30, 30), (1, None, 12)]
)
def test_whichever_comes_first_ends_the_fit(epochs, steps, expected):
    result = trainer().fit(batches(), epochs=epochs, max_steps=steps)
    assert result.step == result.trained == expected
    assert result.epoch == expected // 12


def test_a_second_fit_continues_with_model_and_step_and_counts_its_epochs_from_0():
    net = model()
    fit = trainer(net)
    assert [(result.step, result.epoch) for result in (fit.fit(batches()) for _ in range(2))] == [
        (12, 1),
        (24, 1),
    ]
    other = model()
    trainer(other).fit(batches(), epochs=2)
    assert_same(net, other)


def test_a_loader_left_in_the_middle_of_an_epoch_goes_on_behind_the_last_batch_trained():
    for ahead in (0, 2):
        data = loader()
        seen = trainer(prefetch=ahead).fit(data, max_steps=5).samples
        assert seen + sum(batch.samples for batch in data) == 12 * 16


def test_data_that_ends_for_good_is_an_error_where_more_of_it_is_needed():
    fit = trainer()
    assert fit.fit(iter(batches(3))).step == 3
    with pytest.raises(ValueError, match="Epoch 1 must have at least one batch"):
        fit.fit(iter(batches(3)), max_steps=5)
    with pytest.raises(ValueError, match="Epoch 0 must have at least one batch"):
        fit.fit([])


class Topic:
    """Data that grows at its end and has a position."""

    def __init__(self, start=0):
        self.all, self.position = batches(start), 0

    def identity(self):
        return kv.data.Identity("clicks", "topic clicks", grows=True)

    def __iter__(self):
        while self.position < len(self.all):
            self.position += 1
            yield self.all[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_data_that_grows_may_have_nothing_new(tmp_path, caplog):
    topic = Topic()
    counts = []
    for number in (0, 3, 3, 5):
        topic.all = batches(number)
        caplog.clear()
        fit = trainer(checkpoints=tmp_path / "run")
        result = fit.fit(topic, eval_data=batches(1))
        counts.append((result.trained, result.step))
        assert ("topic clicks: no new messages" in caplog.text) == (not result.trained)
    assert counts == [(0, 0), (3, 3), (0, 3), (2, 5)]


def test_several_outputs_have_a_loss_each_and_all_are_logged():
    net = model(heads=["ctr", "cvr"])
    loss = kv.losses.Sum(
        {
            "ctr": kv.losses.BinaryCrossEntropy(output="ctr"),
            "cvr": kv.losses.BinaryCrossEntropy("click", "cvr", weight="label"),
        },
        weights={"cvr": 0.5},
    )
    metrics = {"auc": kv.metrics.AUC(output="ctr"), "cvr_auc": kv.metrics.AUC(output="cvr", label="click")}
    logs = []

    class Watch(kv.callbacks.Callback):
        def on_step_end(self, trainer, step):
            logs.append({name: float(value) for name, value in step.losses.items()})

    result = trainer(net, loss=loss, metrics=metrics, callbacks=[Watch()]).fit(batches(), epochs=4)
    assert set(logs[0]) == {"loss", "loss/ctr", "loss/cvr"}
    assert logs[0]["loss"] == pytest.approx(logs[0]["loss/ctr"] + logs[0]["loss/cvr"])
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert set(result.metrics) == {"auc", "cvr_auc"}
    assert result.metrics["auc"] > 0.7


def test_clipping_is_that_of_torch():
    def clip(net):
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.02)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)

    net = model()
    trainer(net, clip_norm=0.05, clip_value=0.02).fit(batches())
    assert_same(net, plain_loop(batches(), change=clip))
    assert not torch.equal(net.last.weight, plain_loop(batches()).last.weight)


@pytest.mark.parametrize("part", ["dense", "sparse"])
def test_a_gradient_that_is_not_finite_leaves_out_both_steps(part):
    def loss(output, batch):
        wrong = float("inf") if part == "dense" else float("nan")
        bad = (batch["price"] > 2).any()
        value = functional.binary_cross_entropy_with_logits(output, batch["label"])
        if bad and part == "dense":  # the sparse gradients stay finite
            return value.detach() + net.last.bias.sum() * wrong
        return value * wrong if bad else value

    data = batches(6)
    poisoned = dict(data[3]) | {"price": data[3]["price"] + 10}
    net, other = model(dropout=0.0), model(dropout=0.0)
    result = trainer(net, loss=loss).fit([*data[:3], poisoned, *data[4:]])
    trainer(other, loss=loss).fit([*data[:3], *data[4:]])
    assert (result.step, result.skipped) == (6, 1)
    one, two = everything(net), everything(other)
    # The rows of the batch that was left out were looked up, though: there may be more of them.
    assert torch.equal(one["net.0.weight"], two["net.0.weight"])
    assert all(bool(value.isfinite().all()) for value in one.values())
    known = set(two["user.keys"].tolist())
    kept = torch.tensor([key in known for key in one["user.keys"].tolist()])
    assert torch.equal(one["user.vectors"][kept], two["user.vectors"])
    assert torch.equal(one["user.state"][kept], two["user.state"])


def test_without_the_check_torch_takes_what_comes():
    net = model()
    fit = trainer(net, loss=lambda output, batch: output.sum() * float("nan"), nonfinite="apply")
    assert fit.fit(batches(1)).skipped == 0
    assert net.last.weight.isnan().all()


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_schedulers_move_both_rates_after_each_step_or_epoch(per):
    fit = trainer(scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), schedule_per=per)
    fit.fit(batches(3), epochs=2)
    moves = 6 if per == "step" else 2
    rates = [optimizer.param_groups[0]["lr"] for optimizer in fit.update.optimizers.values()]
    assert rates == pytest.approx([0.01 * 0.5**moves, 0.1 * 0.5**moves])


def test_schedulers_can_be_given_for_one_optimizer_or_ready_made():
    net = model()
    dense = torch.optim.SGD(net.parameters(), lr=1.0)
    sparse = kv.optim.SGD(net, lr=1.0)
    ready = torch.optim.lr_scheduler.StepLR(dense, 1, gamma=0.5)
    halve = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)  # noqa: E731
    for scheduler, expected in ((ready, [0.25, 1.0]), ({"sparse": halve}, [0.25, 0.25])):
        fit = trainer(net, dense_optimizer=dense, sparse_optimizer=sparse, scheduler=scheduler)
        fit.fit(batches(2))
        assert [dense.param_groups[0]["lr"], sparse.param_groups[0]["lr"]] == expected
    with pytest.raises(ValueError, match="no optimizer for the scheduler of 'both'"):
        trainer(net, dense_optimizer=dense, sparse_optimizer=sparse, scheduler={"both": halve})


def test_one_optimizer_is_enough_if_the_other_half_is_said_to_be_frozen():
    net = model()
    before = everything(net)
    trainer(net, dense_optimizer=None, frozen=["net", "last"]).fit(batches(3))
    assert torch.equal(everything(net)["net.0.weight"], before["net.0.weight"])
    assert net.embeddings.table("user").rows
    other = model()
    trainer(other, sparse_optimizer=None, frozen=["user", "item"]).fit(batches(3))
    assert not torch.equal(everything(other)["net.0.weight"], before["net.0.weight"])


def test_a_callback_stops_a_fit_after_its_step():
    result = trainer(callbacks=[StopAt(5)]).fit(batches())
    assert (result.step, result.stopped) == (5, "enough")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0 or None, got 0.0"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, auto, got 'fp8'"),
        ({"precision": "fp16"}, "'fp16' needs a CUDA device, but the model is on cpu"),
        ({"progress": "loud"}, "progress must be one of auto, bar, plain, none"),
        ({"schedule_per": "hour"}, "schedule_per must be 'step' or 'epoch', got 'hour'"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1 or None, got 0"),
        ({"prefetch": -1}, "prefetch must not be negative, got -1"),
        ({"log_every": 0}, "log_every must be at least 1, got 0"),
        ({"dense_optimizer": kv.optim.SGD(lr=0.1)}, "SGD of kv.optim is for rows"),
        ({"sparse_optimizer": torch.optim.SGD}, "sparse_optimizer must be one of kv.optim"),
        ({"dense_optimizer": lambda p: 3}, "a function that makes one of parameters, but it made int"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        trainer(**options)


def test_goals_that_make_no_sense_are_refused():
    fit = trainer()
    for options, message in (
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"eval_every": 5}, "eval_every=5 needs eval_data"),
    ):
        with pytest.raises(ValueError, match=message):
            fit.fit(batches(2), **options)


def test_losses_that_are_no_number_are_refused():
    for loss, message in (
        (lambda output, batch: output, "The loss must be one number"),
        (lambda output, batch: 3.0, "The loss must be a tensor, got float"),
        (lambda output, batch: {}, "got an empty mapping"),
        (lambda output, batch: {"a": output}, "Loss 'a' must be one number"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            trainer(loss=loss).fit(batches(1))
    with pytest.raises(TypeError, match="A batch must be a Batch, another mapping"):
        trainer(loss=lambda output, batch: output.sum()).fit([(1, 2)])


def clicked(number):
    """Batches whose label column is "click" alone."""
    return [{**dict(each), "click": each["label"]} for each in batches(number)]


def test_a_metric_without_a_label_counts_the_losses_only_label():
    loss = kv.losses.BinaryCrossEntropy(label="click")
    data = clicked(4)
    for batch in data:
        del batch["label"]
    auc = kv.metrics.AUC()
    result = trainer(loss=loss, metrics={"auc": auc}).fit(data, eval_data=data[:1])
    assert 0 < result.metrics["auc"] < 1
    assert auc.label == "click"
    trainer(metrics={"auc": auc})  # the next Trainer's loss has another label
    assert auc.label == "label"


def test_a_metric_of_a_head_counts_the_label_of_the_heads_loss():
    loss = kv.losses.Sum(
        {
            "ctr": kv.losses.BinaryCrossEntropy("click", "ctr"),
            "cvr": kv.losses.BinaryCrossEntropy("label", "cvr"),
        }
    )
    metrics = {"ctr": kv.metrics.AUC(output="ctr"), "cvr": kv.metrics.AUC(output="cvr")}
    fit = trainer(model(heads=["ctr", "cvr"]), loss=loss, metrics=metrics)
    assert [fit.metrics[name].label for name in metrics] == ["click", "label"]


def test_a_metric_without_a_label_is_an_error_where_losses_have_several():
    loss = kv.losses.Sum(
        {"click": kv.losses.BinaryCrossEntropy("click"), "buy": kv.losses.BinaryCrossEntropy("buy")}
    )
    expected = r"metric 'auc'.*: click, buy.*AUC\(label='click'\)"
    with pytest.raises(ValueError, match=expected):
        trainer(loss=loss, metrics={"auc": kv.metrics.AUC()})
