"""A run has one kind for each input column, so that a string has the same id on every day."""

import pandas
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

import karvan as kv
from karvan.data.errors import DataError

DIGITS = ["10115", "20095", "00501"]
CODES = ["V3N4P", "10115", "20095"]


class Net(torch.nn.Module):
    """A model that hashes a column of either kind."""

    def __init__(self):
        super().__init__()
        self.features = kv.FeatureEngine([kv.Feature("zip").hash("farm")])
        self.embeddings = kv.EmbeddingEngine({"zip": kv.Table(4)})
        self.last = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.last(self.embeddings(self.features(batch))["zip"]).squeeze(1)


def trainer(folder=None, net=None):
    return kv.Trainer(
        net or Net(),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=torch.optim.Adam,
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        metrics={"auc": kv.metrics.AUC()},
        checkpoints=folder,
        progress="none",
    )


def day(folder, number, zips, **columns):
    """A file of one day, as a nightly pipeline writes it."""
    path = folder / f"day={number}" / "part-0.csv"
    path.parent.mkdir()
    table = {"label": [n % 2 for n in range(len(zips))], "zip": zips, **columns}
    lines = [",".join(map(str, row)) for row in zip(*table.values(), strict=True)]
    path.write_text("\n".join([",".join(table), *lines]) + "\n")
    return path


def read(path, **options):
    return kv.data.read(str(path), 2, **options)


def test_a_column_that_becomes_text_on_another_day_is_an_error_that_names_both_kinds_and_files(tmp_path):
    trainer(tmp_path / "run").fit(read(day(tmp_path, 1, DIGITS)))
    second = day(tmp_path, 2, CODES)
    before = sorted((tmp_path / "run").glob("step-*"))
    with pytest.raises(DataError, match=r"column 'zip'") as caught:
        trainer(tmp_path / "run").fit(read(second))
    text = str(caught.value)
    assert "day=1/part-0.csv" in text
    assert "day=2/part-0.csv" in text
    assert "numbers" in text
    assert "text" in text
    assert 'options={"nulls": ["", "n/a"]}' in text
    assert sorted((tmp_path / "run").glob("step-*")) == before


def test_a_declared_type_gives_a_column_the_kind_that_the_run_has(tmp_path):
    trainer(tmp_path / "run").fit(read(day(tmp_path, 1, CODES)))
    second = day(tmp_path, 2, DIGITS)
    with pytest.raises(DataError, match=r"zip.*options=\{\"schema\": \{\"zip\": \"string\"\}\}"):
        trainer(tmp_path / "run").fit(read(second))
    result = trainer(tmp_path / "run").fit(read(second, options={"schema": {"zip": "string"}}))
    assert result.step == 4


def test_ten_days_whose_types_drift_train_on_unless_a_string_would_have_another_id(tmp_path):
    texts = {"schema": {"zip": "string"}}
    days = [
        {"zips": CODES, "price": ["1", "2", "3"]},
        {"zips": DIGITS, "price": ["1.5", "", "3"]},
        {"zips": ["7"] * 3, "price": ["", "", ""]},
        {"zips": ["", "V3N4P", "1e5"], "price": ["nan", "2", "1"]},
        {"zips": ["123e4567", "0x1f", "1_000"], "price": ["1", "1", "1"], "city": ["x", "y", "z"]},
        {"zips": ["", "", ""], "price": ["1", "1", "1"]},
        {"zips": ["True", "False", "inf"], "price": ["1", "1", "1"], "city": ["x", "y", "z"]},
        {"zips": ["2024-01-01", "2024-01-02", "-5"], "price": ["1", "1", "1"]},
        {"zips": ["1.0", "2.0", "3.5"], "price": ["1", "1", "1"], "city": ["", "", ""]},
    ]
    for number, columns in enumerate(days, 1):
        path = day(tmp_path, number, **columns)
        assert trainer(tmp_path / "run").fit(read(path, options=texts)).trained == 2
    ids = {text for columns in days for text in columns["zips"] if text}
    net = Net()
    trainer(tmp_path / "run", net).load()
    assert net.embeddings.table("zip").rows == len(ids)
    last = day(tmp_path, 10, CODES, price=["1"] * 3, city=["1", "2", "3"])
    with pytest.raises(DataError, match=r"day=10.*column 'city'.*text.*day=5"):
        trainer(tmp_path / "run").fit(read(last, options=texts))


@pytest.mark.parametrize("checkpoints", [True, False])
def test_data_to_evaluate_and_to_predict_has_the_kinds_of_the_training(tmp_path, checkpoints):
    one = trainer(tmp_path / "run" if checkpoints else None)
    digits, codes = read(day(tmp_path, 1, DIGITS)), read(day(tmp_path, 2, CODES))
    with pytest.raises(DataError, match="zip"):
        one.fit(digits, eval_data=codes)
    assert one.fit(codes, eval_data=codes).step == 2  # nothing was trained on the others
    with pytest.raises(DataError, match="zip"):
        one.evaluate(digits)
    with pytest.raises(DataError, match="zip"):
        one.predict(digits)
    with pytest.raises(DataError, match="zip"):
        one.fit(digits)
    if checkpoints:
        other = trainer(tmp_path / "run")
        other.load()
        with pytest.raises(DataError, match="zip"):
            other.evaluate(digits)
        with (
            kv.InferContext(Net(), checkpoint=tmp_path / "run") as ctx,
            pytest.raises(DataError, match="zip"),
        ):
            list(ctx.loader(digits))


def test_widths_floats_booleans_and_columns_without_a_value_are_no_change(tmp_path):
    def fit(zips, kind):
        table = pa.table({"label": [0, 1], "zip": [3, 4], "x": pa.array(zips, kind)})
        pq.write_table(table, tmp_path / "x.parquet")
        return trainer(tmp_path / "run").fit(read(tmp_path / "x.parquet"), data_name=str(kind)).trained

    kinds = [pa.int32(), pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.null()]
    values = [[1, 0], [1, 0], [2**64 - 1, 0], [0.5, None], [True, None], [None, None]]
    assert [fit(each, kind) for each, kind in zip(values, kinds, strict=True)] == [1] * len(kinds)
    with pytest.raises(DataError, match=r"numbers.*dates|dates.*numbers"):
        fit([0, 1], pa.date32())
    with pytest.raises(DataError, match="text"):
        fit(["a", "b"], pa.dictionary(pa.int8(), pa.string()))


def test_files_frames_and_tables_of_the_same_log_are_compared(tmp_path):
    frame = pandas.DataFrame({"label": [0, 1, 0], "zip": CODES})
    trainer(tmp_path / "run").fit(kv.data.read(frame, 2))
    trainer(tmp_path / "run").fit(kv.data.read(pa.table(frame), 2), data_name="again")
    frame.to_parquet(tmp_path / "x.parquet")
    trainer(tmp_path / "run").fit(read(tmp_path / "x.parquet"), data_name="parquet")
    with pytest.raises(DataError, match="zip"):
        trainer(tmp_path / "run").fit(read(day(tmp_path, 1, DIGITS)))


def test_a_custom_loop_compares_the_kinds_of_its_data(tmp_path):
    digits, codes = read(day(tmp_path, 1, DIGITS)), read(day(tmp_path, 2, CODES))
    options = {"sparse_optimizer": kv.optim.Adagrad(lr=0.1), "dense_optimizer": torch.optim.Adam}
    with kv.TrainContext(Net(), **options) as ctx:
        for batch in ctx.loader(digits):
            output, _ = ctx.forward(batch)
            ctx.backward(output.square().mean())
        ctx.save(tmp_path / "run")
        with pytest.raises(DataError, match="zip"):
            next(iter(ctx.loader(codes)))
    options["sparse_optimizer"] = kv.optim.Adagrad(lr=0.1)
    with kv.TrainContext(Net(), **options) as ctx:
        ctx.load(tmp_path / "run")
        with pytest.raises(DataError, match="zip"):
            next(iter(ctx.loader(codes)))
