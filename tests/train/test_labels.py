"""Labels that are missing are errors that name file and record, before shuffling loses the place."""

import math

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

import karvan as kv
from karvan.data.errors import DataError
from karvan.ragged import OptionalRagged


def write(folder, labels, name="part.parquet", **columns):
    path = folder / name
    pq.write_table(pa.table({"click": labels, "user": list(range(len(labels))), **columns}), path)
    return path


def trainer(loss=None, **options):
    model = kv.models.DeepFM([], ["user"], dim=4, hidden=[4])
    return kv.Trainer(
        model,
        loss or kv.losses.BinaryCrossEntropy(label="click"),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        sparse_optimizer=kv.optim.SGD(lr=0.1),
        progress="none",
        **options,
    )


def logits(output, batch):
    return (output**2).mean()


@pytest.mark.parametrize("shuffle", [0, 100])
@pytest.mark.parametrize("labels", [pa.array([0, 1, None] * 2), pa.array([0.0, 1.0, math.nan] * 2)])
def test_a_missing_label_stops_a_fit_and_names_file_record_and_column(tmp_path, labels, shuffle):
    good = write(tmp_path, pa.array([0, 1] * 50, labels.type), "a.parquet")
    bad = write(tmp_path, labels, "b.parquet")
    data = kv.data.read([good, bad], 4, shuffle=shuffle)
    with pytest.raises(DataError, match=rf"{bad}, record 2, column 'click': The label is missing.*default=0"):
        trainer().fit(data)


def test_a_missing_label_stops_an_evaluation(tmp_path):
    data = kv.data.read(write(tmp_path, pa.array([0, 1, None])), 2)
    with pytest.raises(DataError, match="record 2, column 'click'"):
        trainer().evaluate(data)


@pytest.mark.parametrize("label", ["click", ["click"]])
def test_a_missing_label_stops_the_loaders_of_contexts(tmp_path, label):
    bad = write(tmp_path, pa.array([0, 1, None]))
    says = rf"{bad}, record 2, column 'click': The label is missing"
    model = kv.models.DeepFM([], ["user"], dim=4, hidden=[4])
    options = {"dense_optimizer": torch.optim.Adam, "sparse_optimizer": kv.optim.SGD(lr=0.1)}
    with kv.TrainContext(model, label=label, **options) as ctx:
        with pytest.raises(DataError, match=says):
            list(ctx.loader(kv.data.read(bad, 3)))
        with ctx.eval() as evaluation, pytest.raises(DataError, match=says):
            list(evaluation.loader(kv.data.read(bad, 3)))
    with kv.InferContext(model) as ctx:
        assert len(list(ctx.loader(kv.data.read(bad, 3)))) == 1  # which needs no label


def test_the_labels_and_weights_of_several_losses_and_of_metrics_are_checked(tmp_path):
    path = write(tmp_path, pa.array([0, 1]), buy=pa.array([0.0, 1.0]), w=pa.array([1.0, None]))
    loss = kv.losses.Sum(
        {
            "click": kv.losses.BinaryCrossEntropy(label="click"),
            "buy": kv.losses.BinaryCrossEntropy(label="buy", weight="w"),
        }
    )
    with pytest.raises(DataError, match=r"record 1, column 'w': The weight is missing.*default=1\.0"):
        trainer(loss).fit(kv.data.read(path, 2))
    path = write(tmp_path, pa.array([0, 1]), buy=pa.array([0.0, None]))
    with pytest.raises(DataError, match="record 1, column 'buy'"):
        trainer(metrics={"auc": kv.metrics.AUC(label="buy")}).fit(kv.data.read(path, 2))


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_labels_are_required_during_the_call_only(tmp_path, call):
    data = kv.data.read(write(tmp_path, pa.array([0, 1, None, 1])), 4)
    own = trainer()
    for _ in range(2):
        with pytest.raises(DataError, match="record 2, column 'click'"):
            getattr(own, call)(data)
        assert [len(each.output) for each in own.predict(data)] == [4]
        (batch,) = data
        assert batch["click"].to_lists() == [[0], [1], [], [1]]


def test_an_evaluation_on_the_data_of_a_fit_leaves_its_labels_required(tmp_path):
    data = kv.data.read(write(tmp_path, pa.array([0, None])), 2)
    with data.require_values(["click"]):
        with data.require_values(["click"]):
            pass
        with pytest.raises(DataError, match="record 1, column 'click'"):
            list(data)
    assert len(list(data)) == 1


def test_a_declared_default_is_trained_on(tmp_path):
    path = write(tmp_path, pa.array([0, 1, None, 1]))
    columns = [kv.data.Fixed("click", default=0), "user"]
    assert trainer().fit(kv.data.read(path, 2, columns=columns)).step == 2


def test_a_label_that_a_feature_makes_is_not_checked_while_reading(tmp_path):
    path = write(tmp_path, pa.array([0, 1, None, 1]))
    engine = kv.FeatureEngine([kv.Feature("click").fill_missing(0)])
    assert trainer().fit(kv.data.read(path, 2, transform=engine)).step == 2
    other = kv.FeatureEngine([kv.Feature("user").mod(3)])
    with pytest.raises(DataError, match="record 2, column 'click'"):
        trainer().fit(kv.data.read(path, 2, transform=other))


def test_labels_can_be_named_where_data_is_read(tmp_path):
    path = write(tmp_path, pa.array([0, 1, None]))
    with pytest.raises(DataError, match=rf"{path}, record 2, column 'click': The label is missing"):
        list(kv.data.read(path, 2, labels=["click"], shuffle=10))
    with pytest.raises(DataError, match="column 'clicks': Labels must be columns that are read"):
        kv.data.read(path, 2, labels=["clicks"])
    with pytest.raises(TypeError, match="labels must be a list of names"):
        kv.data.read(path, 2, labels="click")


def test_every_batch_before_the_missing_label_comes(tmp_path):
    data = iter(kv.data.read(write(tmp_path, pa.array([0] * 7 + [None] + [0] * 9)), 3, labels=["click"]))
    assert [next(data)["user"].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError, match="record 7"):
        next(data)


def test_a_loss_of_ones_own_gets_the_samples_without_a_label(tmp_path):
    data = kv.data.read(write(tmp_path, pa.array([0, None])), 2)
    seen = []

    def loss(output, batch):
        seen.append(batch["click"])
        return logits(output, batch)

    trainer(loss).fit(data)
    assert isinstance(seen[0], OptionalRagged)
    assert seen[0].to_lists() == [[0], []]


def test_a_loss_and_a_metric_refuse_samples_without_a_label():
    batch = {
        "click": OptionalRagged(torch.tensor([1]), torch.tensor([0, 1, 1])),
        "list": kv.Ragged.from_lists([[1], []]),
    }
    output = torch.zeros(2)
    message = "Column 'click' has no value for 1 of 2 samples.*default=0"
    with pytest.raises(ValueError, match=message):
        kv.losses.BinaryCrossEntropy(label="click")(output, batch)
    with pytest.raises(ValueError, match=message):
        kv.metrics.AUC(label="click").update(output, batch)
    with pytest.raises(TypeError, match="Column 'list' must be a tensor with one value per sample"):
        kv.losses.BinaryCrossEntropy(label="list")(output, batch)


def test_a_loop_of_ones_own_refuses_samples_without_a_label(tmp_path):
    data = kv.data.read(write(tmp_path, pa.array([0, None])), 2)
    model = kv.models.DeepFM([], ["user"], dim=4, hidden=[4])
    with kv.EvalContext(model, label="click") as ctx:
        (batch,) = data
        with pytest.raises(ValueError, match="Column 'click' has no value for 1 of 2 samples"):
            ctx.forward(batch)


def test_a_number_that_is_missing_is_refused_by_the_models_with_what_to_do():
    model = kv.models.DeepFM(ids=["user"], numbers=["age"], dim=4, hidden=[4])
    batch = {"user": torch.tensor([1, 2]), "age": OptionalRagged(torch.tensor([3]), torch.tensor([0, 1, 1]))}
    with pytest.raises(
        ValueError, match=r"Number 'age' has missing values: 1 in the 2 samples.*fill_missing\(0\)"
    ):
        model(batch)


def test_a_missing_id_counts_as_no_id(tmp_path):
    """A sample without a user gets the vector of an empty list, whether or not its batch is complete."""
    path = write(tmp_path, pa.array([0, 1, 1]), item=pa.array([5, None, 7]))
    model = kv.models.DeepFM([], ["user", "item"], dim=4, hidden=[4])
    (whole,) = kv.data.read(path, 3)
    single = list(kv.data.read(path, 1))
    assert [type(batch["item"]) for batch in single] == [OptionalRagged] * 3
    with torch.no_grad():
        assert torch.allclose(model(whole), torch.cat([model(batch) for batch in single]))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 0.0])
@pytest.mark.parametrize("use", ["loss", "metric"])
def test_sample_weights_that_mean_nothing_are_an_error_that_names_the_column(value, use, caplog):
    columns = {"user": torch.arange(8), "label": torch.arange(8) % 2}
    good = kv.Batch({**columns, "w": torch.ones(8)})
    bad = kv.Batch({**columns, "w": torch.full((8,), value)})
    weight = {"weight": "w"}
    loss = kv.losses.BinaryCrossEntropy(**weight if use == "loss" else {})
    one = trainer(loss, metrics={"auc": kv.metrics.AUC(**weight if use == "metric" else {})})
    if value == 0.0:
        one.fit([good, bad])  # batches without a weight are allowed
        if use == "loss":
            with pytest.raises(ValueError, match="Column 'w' of sample weights is 0 for all samples"):
                trainer(loss).fit([bad, bad])
        one.evaluate([bad])
        assert "Column 'w' of sample weights is 0 for all samples" in caplog.text
        return
    before = [parameter.clone() for parameter in one.model.parameters()]
    with pytest.raises(ValueError, match=r"Column 'w' of sample weights must be finite and not negative"):
        one.fit([bad])
    assert all(map(torch.equal, before, one.model.parameters()))
    with pytest.raises(ValueError, match="Column 'w'"):
        one.evaluate([bad])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "loss", [kv.losses.BinaryCrossEntropy, kv.losses.MeanSquaredError, kv.losses.CrossEntropy]
)
def test_a_loss_in_a_loop_of_torch_checks_its_weights(loss, value):
    batch = kv.Batch({"label": torch.tensor([0, 1]), "w": torch.tensor([1.0, value])})
    output = torch.zeros(2, 2) if loss is kv.losses.CrossEntropy else torch.zeros(2)
    with pytest.raises(ValueError, match=r"Column 'w' of sample weights must be finite and not negative"):
        loss(label="label", weight="w")(output, batch)


class Probabilities(torch.nn.Module):
    def __init__(self, end):
        super().__init__()
        self.last, self.end = torch.nn.Linear(1, 1), end

    def forward(self, batch):
        return self.end(self.last(batch["x"].unsqueeze(1))).squeeze(1)


@pytest.mark.parametrize(
    ("end", "warns"),
    [
        (torch.sigmoid, True),
        (lambda logits: logits.sigmoid().clamp(1e-6, 1 - 1e-6), True),
        (lambda logits: logits, False),
    ],
)
def test_probabilities_under_a_loss_of_logits_are_a_warning(end, warns, caplog):
    batch = kv.Batch({"x": torch.linspace(-3, 3, 64), "label": torch.arange(64) % 2})
    model = Probabilities(end)
    model.last.weight.data.fill_(2.0)
    options = {"dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "progress": "none"}
    kv.Trainer(model, kv.losses.BinaryCrossEntropy(), **options).fit([batch] * 120)
    assert caplog.text.count("BinaryCrossEntropy expects logits") == warns


@pytest.mark.parametrize("income", [["<=50K", ">50K"], ["<=50K", None]])
def test_labels_that_are_text_say_how_they_become_numbers(income):
    table = {"income": income, "user": [1, 2]}
    one = trainer(kv.losses.MeanSquaredError(label="income"))
    with pytest.raises((TypeError, DataError), match=r"income'.*vocabulary|record 1, column 'income'"):
        one.fit(kv.data.read(table, 2))
    words = kv.FeatureEngine([kv.Feature("income").vocabulary(["<=50K", ">50K"])])
    assert one.fit(kv.data.read({**table, "income": ["<=50K", ">50K"]}, 2, transform=words)).step == 1


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"clicked": [0, 1, 1]},
            r"labels: BinaryCrossEntropy\(label='clicked'\), or in a config, loss: {name: B",
        ),
        ({"rating": [0.5, 1, 2]}, r"labels: BinaryCrossEntropy\(label='…'\)"),
        ({"clicked": [0, 1, 1], "bought": [0, 0, 0]}, r"Those of 0 and 1 are: clicked, bought\. Name .*'…'"),
    ],
)
def test_a_label_that_was_not_named_is_asked_for_with_the_columns_that_it_may_be(columns, says):
    batch = {"user": torch.tensor([7, 8, 9]), **{name: torch.tensor(of) for name, of in columns.items()}}
    with pytest.raises(
        KeyError, match=r"There is no column 'label' in the batch, which has: user, .*" + says
    ):
        kv.losses.BinaryCrossEntropy()(torch.zeros(3), batch)
