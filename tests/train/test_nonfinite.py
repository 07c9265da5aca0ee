"""Labels that cannot be meant, and steps that are skipped: errors and warnings that name the columns."""

import io
import logging

import pytest
import torch
from torch.nn import functional
from train_helpers import batches, model, trainer

import karvan as kv


def with_values(values, column="label", batch=1, count=4):
    """Batches of which one has these values in the first samples of a column."""
    made = batches(count)
    changed = made[batch][column].clone()
    changed[: len(values)] = torch.tensor(values, dtype=changed.dtype)
    made[batch] = kv.Batch({**made[batch], column: changed})
    return made


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            [NAN, NAN, 1.0],
            r"Column 'label' has NaN in 2 of 16 samples, but BinaryCrossEntropy needs a number",
        ),
        ([INF], "Column 'label' has infinity in 1 of 16 samples"),
        ([1.0, 5.0, 3.0], "Column 'label' has 2 of 16 labels outside of 0 to 1, such as 5, but BinaryCross"),
        ([-1.0], "has 1 of 16 labels outside of 0 to 1, such as -1, .* make them 0 or 1"),
    ],
)
@pytest.mark.parametrize("ahead", [0, 2])
def test_labels_that_cannot_be_meant_are_an_error_in_their_step(values, says, ahead):
    net = model()
    fit = trainer(net, prefetch=ahead)
    with pytest.raises(ValueError, match=says):
        fit.fit(with_values(values))
    assert fit.step == 1  # the batch before was trained
    with pytest.raises(ValueError, match=says):
        fit.evaluate(with_values(values))
    assert len(list(fit.predict(with_values(values)))) == 4  # which needs no labels


def test_labels_of_other_losses_may_be_any_number_but_a_number():
    loss = kv.losses.MeanSquaredError()
    assert trainer(loss=loss).fit(with_values([5.0, -3.0])).trained == 4
    with pytest.raises(ValueError, match="NaN in 1 of 16 samples, but MeanSquaredError needs"):
        trainer(loss=loss).fit(with_values([NAN]))


def test_each_of_several_losses_looks_at_its_labels():
    heads = ["ctr", "cvr"]
    losses = {
        name: kv.losses.BinaryCrossEntropy(output=name, label=label)
        for name, label in zip(heads, ("label", "click"), strict=True)
    }
    with pytest.raises(ValueError, match="Column 'click' has 1 of 16 labels outside"):
        trainer(model(heads=heads), loss=kv.losses.Sum(losses)).fit(with_values([2.0], "click"))


def test_a_label_outside_of_the_range_is_fine_if_its_sample_does_not_count():
    data = [kv.Batch({**batch, "seen": (batch["label"] >= 0).float()}) for batch in with_values([-1.0, -1.0])]
    assert trainer(loss=kv.losses.BinaryCrossEntropy(weight="seen")).fit(data).trained == 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float64, torch.bfloat16])
def test_labels_of_any_type_are_looked_at(dtype):
    data = [kv.Batch({**batch, "label": batch["label"].to(dtype)}) for batch in batches(2)]
    assert trainer().fit(data).trained == 2


def test_labels_that_prepare_makes_are_those_that_are_looked_at():
    def prepare(batch):
        return kv.Batch({**batch, "label": (batch["label"] > 3).float()})

    assert trainer(prepare=prepare).fit(with_values([5.0, 1.0])).trained == 4


def test_a_fit_whose_steps_are_all_skipped_is_an_error_that_names_the_column():
    data = [kv.Batch({**batch, "price": batch["price"] * NAN}) for batch in batches(4)]
    with pytest.raises(FloatingPointError, match=r"All 4 steps .*'price' has NaN in 16 of 16 .*fill_m"):
        trainer().fit(data)


def test_a_fit_gives_up_after_ten_skipped_steps_without_one_that_was_taken():
    data = [kv.Batch({**batch, "price": batch["price"] / 0}) for batch in batches(12)]
    fit = trainer()
    with pytest.raises(FloatingPointError, match=r"The first 10 steps were all .*'price' has infinity"):
        fit.fit(data, epochs=100)
    assert fit.step == 10


def test_a_loss_that_is_never_finite_says_that_no_column_is_why():
    def loss(output, batch):
        return output.mean() * NAN

    with pytest.raises(FloatingPointError, match=r"No column of the first batch has any\. Check the loss"):
        trainer(loss=loss).fit(batches(3))


def test_skipped_steps_are_told_when_the_first_comes_and_loudly_at_the_end(caplog):
    stream = io.StringIO()
    data = with_values([NAN, NAN, NAN], "price", batch=2, count=12)
    with caplog.at_level(logging.WARNING):
        result = trainer(progress=kv.train.PlainProgress(stream)).fit(data)
    assert (result.trained, result.skipped) == (12, 1)
    first, last = caplog.messages
    assert first.startswith("Step 3 was skipped: a gradient is not finite. Column 'price' has NaN in 3 of")
    assert last == "1 of 12 steps were skipped, because a gradient was not finite."
    assert stream.getvalue().splitlines()[-1] == f"WARNING: {last}"


def test_a_fit_that_has_taken_steps_continues_however_many_are_skipped():
    bad = [kv.Batch({**batch, "price": batch["price"] * NAN}) for batch in batches(12)]
    assert trainer().fit([batches(1)[0], *bad]).skipped == 12


def test_ragged_columns_are_looked_into():
    from karvan.train.losses import nonfinite_text

    values = kv.Ragged(torch.tensor([1.0, NAN, INF]), torch.tensor([0, 1, 3]))
    assert "Column 'w' has NaN and infinity in 2 of 3 values." in nonfinite_text([{"w": values, "x": 3}])
    assert nonfinite_text(batches(2)) == ""


def context(**options):
    return kv.TrainContext(
        model(), dense_optimizer=torch.optim.Adam, sparse_optimizer=kv.optim.Adagrad(lr=0.1), **options
    )


def loop(ctx, data):
    for batch in ctx.loader(data):
        output, labels = ctx.forward(batch)
        ctx.backward(functional.binary_cross_entropy_with_logits(output, labels))


def test_a_train_context_that_learns_nothing_says_so():
    data = [kv.Batch({**batch, "price": batch["price"] * NAN}) for batch in batches(12)]
    with pytest.raises(FloatingPointError, match="The first 10 steps"), context() as ctx:
        loop(ctx, data)
    with pytest.raises(FloatingPointError, match=r"All 4 steps .*'price'"), context() as ctx:
        loop(ctx, data[:4])
    with pytest.raises(FloatingPointError, match=r"Step 1 .*'price'"), context(nonfinite="raise") as ctx:
        loop(ctx, data)


def test_nonfinite_means_the_same_for_a_trainer_and_a_train_context():
    good, bad = batches(2), [kv.Batch({**batch, "price": batch["price"] * NAN}) for batch in batches(1)]
    fit = trainer(net := model(), nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"Step 2 was skipped: .* not finite.*'price'"):
        fit.fit([good[0], *bad, good[1]])
    assert all(parameter.isfinite().all() for parameter in net.parameters())  # it was skipped, too
    with context(nonfinite="apply") as ctx:
        loop(ctx, [good[0], *bad])
    assert any(parameter.isnan().any() for parameter in ctx.model.parameters())


class TwoTables(torch.nn.Module):
    """Its output is the sum of a dense weight and two vectors, the factors of which are in the batch."""

    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"a": kv.Table(1), "b": kv.Table(1)})
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        out = self.embeddings(batch)
        return batch["of_a"] * out["a"][:, 0] + out["b"][:, 0] + batch["of_weight"] * self.weight

    def values(self):
        vectors = [self.embeddings.table(name).vectors([1]).item() for name in "ab"]
        return [*vectors, self.weight.item()]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_bad_gradient_of_rows_skips_its_table_alone_and_a_dense_one_the_step(scaled):
    net = TwoTables()
    one = torch.tensor([1])
    make = kv.TrainContext(
        net,
        sparse_optimizer=kv.optim.SGD(lr=0.5),
        dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        nonfinite="skip_tables",
        precision=torch.amp.GradScaler("cpu", init_scale=2.0) if scaled else "fp32",
        label=None,
    )
    with make as ctx:
        for of_a, of_weight, changes in [
            (1.0, 1.0, [True, True, True]),
            (NAN, 1.0, [False, not scaled, not scaled]),
            (1.0, NAN, [False, False, False]),
        ]:
            batch = {"a": one, "b": one, "of_a": torch.tensor([of_a]), "of_weight": torch.tensor([of_weight])}
            output, _ = ctx.forward(kv.Batch(batch))
            before = net.values()
            ctx.backward(output.sum())
            assert [now != then for now, then in zip(net.values(), before, strict=True)] == changes
        assert ctx.skipped == (2 if scaled else 1)
    skipped = [net.embeddings.table(name).stats()["skipped_updates"] for name in "ab"]
    assert skipped == ([0, 0] if scaled else [1, 0])


def test_a_loader_brings_its_error_to_the_step():
    made = with_values([5.0])
    columns = {name: torch.cat([batch[name] for batch in made]).numpy() for name in made[0]}
    with pytest.raises(ValueError, match="Column 'label' has 1 of 16 labels outside of 0 to 1, such as 5"):
        trainer().fit(kv.data.read(columns, 16))


@pytest.mark.parametrize("metric", ["loss", "auc"])
def test_a_nan_metric_that_early_stopping_needs_is_an_error_that_names_the_column(metric):
    stopping = kv.callbacks.EarlyStopping(metric, patience=3, mode="min")
    fit = trainer(metrics={"auc": kv.metrics.AUC()}, callbacks=[stopping])
    says = (
        rf"step 2 gives NaN for '{metric}'.*EarlyStopping needs it to decide\. Column 'price' has NaN in 1 of"
    )
    with pytest.raises(ValueError, match=says):
        fit.fit(batches(4), eval_data=with_values([NAN], "price"), eval_every=2)


def test_a_nan_metric_that_keep_best_needs_is_an_error(tmp_path):
    kept = kv.Checkpoints(tmp_path, keep_best=("auc", "max"))
    ones = [kv.Batch({**batch, "label": torch.ones(16)}) for batch in batches(2)]
    with pytest.raises(
        ValueError, match=r"NaN for 'auc', but keep_best needs it to decide.*all labels are equal"
    ):
        trainer(metrics={"auc": kv.metrics.AUC()}, checkpoints=kept).fit(batches(4), eval_data=ones)


def test_a_nan_metric_that_nobody_needs_is_no_error():
    ones = [kv.Batch({**batch, "label": torch.ones(16)}) for batch in batches(2)]
    result = trainer(metrics={"auc": kv.metrics.AUC()}).fit(batches(4), eval_data=ones)
    assert result.evaluation["auc"] != result.evaluation["auc"]


def test_an_evaluation_and_a_prediction_of_nan_log_one_warning_that_names_the_column(caplog):
    fit = trainer()
    fit.fit(batches(2))
    data = with_values([NAN], "price", 1)
    data[2] = with_values([NAN], "price", 2)[2]
    column = "Column 'price' has NaN in 1 of 16 samples."
    fit.evaluate(data)
    (first,) = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"The loss of 2 of 4 batches has NaN or infinite values. {column}")
    caplog.clear()
    assert len(list(fit.predict(data))) == 4
    (second,) = [record.getMessage() for record in caplog.records]
    assert second.startswith(f"The output of 2 of 4 batches has NaN or infinite values. {column}")
    caplog.clear()
    fit.evaluate(batches(2))
    list(fit.predict(batches(2)))
    assert not caplog.records


def test_an_evaluation_without_a_sample_is_an_error():
    fit = trainer(metrics={"auc": kv.metrics.AUC()})
    with pytest.raises(ValueError, match=r"at least one sample, got none.*generator"):
        fit.evaluate([])
    with pytest.raises(ValueError, match="at least one sample, got none"):
        fit.fit(batches(2), eval_data=(batch for batch in batches(2)), epochs=2)


def test_a_result_counts_the_skipped_steps_of_its_own_fit():
    fit = trainer()
    assert fit.fit(with_values([NAN], "price")).skipped == 1
    second = fit.fit(batches(3))
    assert (second.skipped, second.step) == (0, 7)
    assert "skipped" not in str(second)
