"""Fitted features: `karvan train` fits them, and the other commands take them from the checkpoint."""

import pyarrow.compute
import pyarrow.parquet
import pytest
import torch

import karvan as kv
from karvan.cli.target import Target

CONFIG = """
data: {{train: {folder}/train.parquet, eval: {folder}/eval.parquet, batch_size: 64, shuffle: 500}}
features:
  price: [log1p, normalise]
  hour: [{{vocabulary: {{max_words: 20}}}}]
model: {{name: DLRM, numbers: [price], ids: [user, item, hour], dim: 4, bottom: [8], top: [8]}}
train: {{epochs: 1}}
checkpoints: {{folder: {folder}/run}}
"""

JOB = """
import torch
import karvan as kv


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = kv.FeatureEngine([kv.Feature("price").log1p().normalise()])
        self.net = kv.models.DLRM(["price"], ["user", "item"], dim=4, bottom=(8,), top=[8])

    def forward(self, batch):
        return self.net(self.features(batch))


def job(folder: str = "{folder}/run", eval_data="{folder}/eval.parquet", listed: bool = False):
    torch.manual_seed(0)
    trainer = kv.Trainer(
        Model(),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=torch.optim.Adam,
        sparse_optimizer=kv.optim.Adagrad(lr=0.1),
        checkpoints=folder,
        progress="none",
    )
    data = kv.data.read("{folder}/train.parquet", 64, shuffle=500)
    return kv.TrainingJob(trainer, list(data) if listed else data, eval_data=kv.data.read(eval_data, 64))
"""


@pytest.fixture
def place(place):
    (place / "config.yaml").write_text(CONFIG.format(folder=place))
    (place / "job.py").write_text(JOB.format(folder=place))
    return place


def fitted_by_hand(place):
    return kv.FeatureEngine(
        [kv.Feature("price").log1p().normalise(), kv.Feature("hour").vocabulary(max_words=20)]
    ).fit(kv.data.read(str(place / "train.parquet"), 100))


def own_predictions(path, place):
    """Of the Trainer, with features that were fitted by hand."""
    job = Target(path, {}, {}).job(training=False)
    state = job.trainer.saver.latest().load(job.trainer.model)
    job.trainer.model.load_state_dict(state["model"])
    engine = fitted_by_hand(place) if path.suffix == ".yaml" else None
    data = kv.data.read(str(place / "eval.parquet"), 64, transform=engine)
    return torch.cat([output for output, _ in job.trainer.predict(data)])


@pytest.mark.parametrize("name", ["config.yaml", "job.py"])
def test_train_fits_and_evaluate_and_predict_use_what_it_found(run, place, name):
    path, out = place / name, place / "predictions.parquet"
    trained = run("train", path, "--json", "-")
    assert trained.code == 0
    assert "Fitted price" in trained.err
    evaluated = run("evaluate", path, "--json", "-")
    assert evaluated.json["metrics"] == pytest.approx(trained.json["evaluation"])
    assert run("predict", path, "--out", out).code == 0
    made = torch.tensor(pyarrow.parquet.read_table(out)["prediction"].to_numpy())
    assert torch.equal(made, own_predictions(path, place))


@pytest.mark.parametrize("name", ["config.yaml", "job.py"])
def test_a_run_that_continues_keeps_its_statistics_though_the_data_has_changed(run, place, name):
    assert run("train", place / name, "--quiet", "--max-steps", 3).code == 0

    def saved():
        state = kv.checkpoint.find(place / "run").state()
        states = {**state["transforms"], "model": state["model"].get("features._extra_state")}
        found = states.get("features", {}).get("_extra_state") or states["model"]
        return found["price"].tolist()

    first = saved()
    table = pyarrow.parquet.read_table(place / "train.parquet")
    (place / "train.parquet").unlink()
    doubled = pyarrow.compute.multiply(table["price"], 5)
    pyarrow.parquet.write_table(
        table.set_column(table.column_names.index("price"), "price", doubled), place / "train.parquet"
    )
    ran = run("train", place / name, "--max-steps", 6)
    assert ran.code == 0
    assert "Fitted" not in ran.err
    assert saved() == first


def test_a_checkpoint_without_the_statistics_is_a_clear_error(run, place):
    plain = CONFIG.format(folder=place).replace("[log1p, normalise]", "[log1p]").replace("  hour", "  other")
    plain = plain.replace("vocabulary: {max_words: 20}", "select: hour")
    (place / "plain.yaml").write_text(plain)
    assert run("train", place / "plain.yaml", "--quiet", "--max-steps", 2).code == 0
    ran = run("evaluate", place / "config.yaml")
    assert ran.code == 3
    assert "expected the statistics of transform 'features'" in ran.err


def test_data_that_cannot_be_passed_over_asks_for_a_fit_in_the_job(run, place):
    ran = run("train", place / "job.py", "--set", "listed=true")
    assert ran.code == 2
    assert "call engine.fit(batches) in job()" in ran.err


def test_a_warm_start_takes_the_statistics_and_fits_nothing(run, place):
    path, old, new = place / "config.yaml", place / "run", place / "new"
    assert run("train", path, "--quiet").code == 0
    table = pyarrow.parquet.read_table(place / "train.parquet")
    dearer = pyarrow.compute.multiply(table["price"], 10.0)
    other = table.set_column(table.schema.get_field_index("price"), "price", dearer)
    pyarrow.parquet.write_table(other, place / "train.parquet")
    more = ["--folder", new, "--set", f"train.warm_start={{path: {old}}}"]
    ran = run("train", path, *more)
    assert ran.code == 0, ran.err
    assert "statistics features" in ran.err
    assert "Fitted" not in ran.err

    def statistics(folder):
        return kv.checkpoint.find(folder).state()["transforms"]

    assert repr(statistics(new)) == repr(statistics(old))
    # Without the net, the features are those of the new data.
    fresh = ["--folder", place / "fresh", "--set", f"train.warm_start={{path: {old}, dense: []}}"]
    ran = run("train", path, *fresh)
    assert ran.code == 0, ran.err
    assert "Fitted price" in ran.err
    assert repr(statistics(place / "fresh")) != repr(statistics(old))

    # Features that differ keep their own statistics, and the report says so.
    differs = ["--folder", place / "differs", "--set", "features.price=[normalise]", *more[2:]]
    text = path.read_text()
    path.write_text(text.replace("  hour: [{vocabulary: {max_words: 20}}]\n", ""))
    ran = run("train", path, *differs)
    assert ran.code == 0, ran.err
    assert "left in the checkpoint" in ran.err
    assert "Fitted price" in ran.err


def test_a_slip_that_a_fit_would_find_is_told_before_the_pass_that_fits_features(place, run):
    ran = run("train", place / "config.yaml", "--set", "train.early_stopping={metric: auk}")
    assert ran.code == 1
    assert "EarlyStopping needs 'auk', but evaluations give: loss, auc" in ran.err
    assert "Fitt" not in ran.err
