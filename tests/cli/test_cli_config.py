"""What configs can say, beyond what the other tests train with."""

import math
from pathlib import Path

import pytest

import karvan as kv
from karvan.cli.config import (
    Config,
    Model,
    Named,
    Table,
    convert,
    make_features,
    make_job,
    make_loss,
    make_metrics,
    make_model,
    read_config,
)
from karvan.cli.output import CommandError
from karvan.dense.communication import DenseCommunication
from karvan.metrics.base import set_labels
from karvan.settings import SettingsError, parse

MODELS = {
    "DCN": {},
    "DIN": {"sequences": {"history": "item"}},
    "DLRM": {},
    "DeepFM": {},
    "MMoE": {"tasks": ["a"]},
    "WideDeep": {"wide": ["user"], "wide_table": {"evict": {"name": "LRU", "capacity": 9}}},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_asked_for(name):
    table = {"init": {"name": "Normal", "std": 0.1}, "admit": {"name": "MinCount", "n": 2, "slots": 64}}
    more = {"numbers": ["price"], "ids": ["user", "item"], "dim": 4, "table": table, **MODELS[name]}
    model = make_model(Model(name=name, **more))
    assert type(model) is getattr(kv.models, name)
    assert model.embeddings.table("user").spec.admit[0] == "min_count"


def test_all_models_are_tried():
    found = [name for name in kv.models.__all__ if isinstance(getattr(kv.models, name), type)]
    assert sorted(found) == sorted(MODELS)


def test_a_table_of_one_id_is_as_for_all_but_for_what_it_says():
    model = make_model(
        Model(
            name="DLRM",
            numbers=["price"],
            ids=["user", "item"],
            dim=4,
            table={"dtype": "bfloat16", "evict": {"name": "LRU", "capacity": 9}},
            tables={"item": {"evict": "Never"}},
        )
    )
    specs = {name: model.embeddings.table(name).spec for name in ("user", "item")}
    assert [(spec.dtype, spec.evict[0]) for spec in specs.values()] == [
        ("bfloat16", "lru"),
        ("bfloat16", "never"),
    ]


def test_tables_can_count_as_other_systems_do():
    table = {
        "combiner": "mean_by_count",
        "use_weights": False,
        "init": {"name": "Gamma", "shape": 0.5, "scale": 0.1},
        "admit": {"name": "Probability", "p": 0.5, "each": True},
        "evict": {"name": "Age", "steps": 0},
    }
    model = make_model(Model(name="DLRM", numbers=["price"], ids=["user"], dim=4, table=table))
    made = model.embeddings.features["user"]
    assert (made.combiner, made.use_weights, made.init) == ("mean_by_count", False, kv.init.Gamma(0.5, 0.1))
    assert made.admit == kv.admission.Probability(0.5, each=True)
    assert made.evict == kv.eviction.Age(0)


def test_chains_are_those_that_a_program_would_make():
    engine = make_features(
        {
            "price": [{"clip": {"low": 0, "high": 9}}, "log1p"],
            "age": [{"bucketize": [18, 35]}],
            "ab": [{"cross": ["a", "b"]}],
            "liked": [{"select": "history"}, {"mod": 20}],
            "as_read": [{"select": {"columns": ["price"], "raw": True}}, {"round": 1}],
            "word": [{"vocabulary": {"words": ["x", "y"], "oov": 2}}],
            "tags": [{"select": {"columns": ["tags"], "missing": "empty"}}, {"to_dense": [3, 2]}],
            "cell": [{"split": {"separator": " ", "skip_empty": True}}, "to_numbers"],
            "id": ["to_text", {"hash": {"kind": "farm", "bucket": 10}}],
            "last": [{"truncate": {"length": 2, "side": "top"}}, {"truncate": {"length": 9, "check": True}}],
        }
    )
    assert engine.features == [
        kv.Feature("price").clip(0, 9).log1p(),
        kv.Feature("age").bucketize([18, 35]),
        kv.Feature("ab").cross("a", "b"),
        kv.Feature("liked").select("history").mod(20),
        kv.Feature("as_read").select("price", raw=True).round(1),
        kv.Feature("word").vocabulary(["x", "y"], oov=2),
        kv.Feature("tags").select("tags", missing="empty").to_dense((3, 2)),
        kv.Feature("cell").split(" ", skip_empty=True).to_numbers(math.nan),
        kv.Feature("id").to_text().hash("farm", bucket=10),
        kv.Feature("last").truncate(2, "top").truncate(9, check=True),
    ]


def test_options_of_tables_are_those_of_kv_table():
    table = Table(read_only=True, missing="empty")
    model = make_model(Model(name="DLRM", numbers=["x"], ids=["a", "b"], dim=4, tables={"b": table}))
    features = next(each for each in model.modules() if isinstance(each, kv.EmbeddingEngine)).features
    assert [(each.read_only, each.missing) for each in features.values()] == [
        (False, "error"),
        (True, "empty"),
    ]


def test_yaml_reads_as_people_expect():
    text = "{a: 1e-3, b: 200_000, c: 1.5, d: no, e: on, f: true, g: .5, h: 1e6, i: null, j: -2E+3, k: 1.2.3}"
    assert parse(text) == {
        "a": 1e-3, "b": 200_000, "c": 1.5, "d": "no", "e": "on", "f": True, "g": 0.5, "h": 1e6, "i": None,
        "j": -2000.0, "k": "1.2.3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("1_000", int, 1000),
        ("1e3", int, 1000),
        ("1e-3", float, 1e-3),
        ("true", bool, True),
        ("3", str, "3"),
        ("[1, 2]", list[int], [1, 2]),
        ("[1, 2]", tuple, (1, 2)),
        ("null", int | None, None),
        ("5", int | None, 5),
        ("a/b", Path, Path("a/b")),
    ],
)
def test_text_becomes_what_a_parameter_wants(text, kind, value):
    assert convert("x", text, kind) == value


@pytest.mark.parametrize("kind", [int, float, int | None])
def test_text_that_is_a_bool_is_no_number(kind):
    with pytest.raises(CommandError, match=r"x must be .*, got 'true'"):
        convert("x", "true", kind)


@pytest.mark.parametrize(
    "key",
    [
        "data.shuffle",
        "data.batch_size",
        "data.seed",
        "data.workers",
        "train.epochs",
        "train.prefetch",
        "train.seed",
    ],
)
def test_a_bool_is_refused_where_a_number_is_expected(place, key):
    for text in ("true", "false"):
        with pytest.raises(SettingsError, match=rf"config\.yaml: {key}: expected a number, got {text}\.$"):
            read_config(place / "config.yaml", {key: text})


def test_all_of_a_config_reaches_the_trainer(place):
    settings = {
        "train.gradient_accumulation_steps": "2",
        "train.clip_norm": "1",
        "train.eval_every": "5",
        "train.early_stopping": "{metric: auc, patience: 100}",
        "optimizers.schedule": "{name: ExponentialLR, gamma: 0.5}",
        "optimizers.schedule_per": "epoch",
        "checkpoints.keep_best": "{metric: auc}",
        "checkpoints.every": "7",
        "loggers.csv": str(place / "log.csv"),
        "loggers.tensorboard": str(place / "board"),
        "data.columns": "[label, user, item, category, price, history]",
    }
    job = make_job(read_config(place / "config.yaml", settings), progress="none")
    result = job.fit()
    assert (result.step, job.eval_every, job.trainer.gradient_accumulation_steps) == (24, 5, 2)
    assert job.trainer.update.optimizers["dense"].param_groups[0]["lr"] == pytest.approx(0.01 / 4)
    assert "auc" in kv.checkpoint.find(place / "run").metrics
    assert (place / "log.csv").read_text().startswith("kind,step,epoch")
    assert list((place / "board").iterdir())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, DenseCommunication()),
        ({"train.dense_reduce": "bf16"}, DenseCommunication("bf16")),
        ({"train.dense_reduce": "powersgd"}, DenseCommunication(kv.train.PowerSGD())),
        (
            {"train.dense_reduce": "{name: powersgd, rank: 2, start_step: 0}"},
            DenseCommunication(kv.train.PowerSGD(2, 0)),
        ),
        (
            {"train.average_every": "3", "train.find_unused_parameters": "true"},
            DenseCommunication(average_every=3, find_unused_parameters=True),
        ),
    ],
)
def test_a_config_says_how_dense_parameters_are_kept_equal(place, settings, expected):
    job = make_job(read_config(place / "config.yaml", settings), progress="none")
    assert job.trainer.setup.communication == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"train.dense_reduce": "int8"},
            "train.dense_reduce.name: input should be 'mean', 'bf16'",
        ),
        ({"train.dense_reduce": "{name: powersgd, rank: 0}"}, "train.dense_reduce.rank: input should be gr"),
        (
            {"train.dense_reduce": "{name: bf16, rank: 2}"},
            "dense_reduce: rank is for powersgd, got bf16",
        ),
        ({"train.average_every": "0"}, "train.average_every: input should be greater"),
        ({"train.find_unused_parameters": "2"}, "train.find_unused_parameters: "),
    ],
)
def test_a_config_is_told_which_of_these_are_wrong(place, settings, says):
    with pytest.raises(SettingsError, match=says):
        read_config(place / "config.yaml", settings)


def test_a_config_is_told_that_two_of_these_exclude_each_other(place):
    config = read_config(place / "config.yaml", {"train.average_every": "2", "train.dense_reduce": "fp16"})
    with pytest.raises(CommandError, match=r"train: .*expected one of the two"):
        make_job(config)


def test_metrics_have_the_label_and_the_output_of_a_single_loss():
    config = Config.model_validate(
        {
            "data": {"train": "clicks.csv"},
            "model": "DLRM",
            "loss": {"name": "BinaryCrossEntropy", "label": "clicked", "output": "ctr"},
            "metrics": ["AUC", {"name": "GAUC", "group": "film", "label": "liked"}, "Mean"],
        }
    )
    loss = make_loss(config.loss)
    metrics = make_metrics(config.metrics, loss)
    set_labels(metrics, loss)
    assert {name: (type(each), each.output) for name, each in metrics.items()} == {
        "auc": (kv.metrics.AUC, "ctr"),
        "gauc": (kv.metrics.GAUC, "ctr"),
        "mean": (kv.metrics.Mean, "ctr"),
    }
    assert (metrics["auc"].label, metrics["gauc"].label, metrics["gauc"].group) == (
        "clicked",
        "liked",
        "film",
    )


def test_metrics_have_the_label_that_several_losses_share():
    loss = make_loss({name: Named(name="BinaryCrossEntropy", label="clicked") for name in "ab"})
    metrics = make_metrics({"auc": Named(name="AUC")}, loss)
    set_labels(metrics, loss)
    assert metrics["auc"].label == "clicked"


def test_the_page_lists_every_key():
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    for section, field in Config.model_fields.items():
        kind = field.annotation
        names = [n for n in getattr(kind, "model_fields", {}) if n != "name"]
        missing = [n for n in names if f"`{section}.{n}" not in page and f"`.{n}`" not in page]
        assert missing == [], section
        assert f"`{section}" in page


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({"sparse": {"lr": 0.2}}, ("Adam", "Adagrad")),
        ({"dense": {"lr": 0.2}, "sparse": "SGD"}, ("Adam", "SGD")),
        ({"dense": {"name": "SGD", "lr": 0.2}}, ("SGD", "Adagrad")),
    ],
)
def test_arguments_of_an_optimizer_without_a_name_are_those_of_the_default(given, kinds):
    config = Config.model_validate({"data": {"train": "x"}, "model": "DLRM", "optimizers": given})
    assert (config.optimizers.dense.name, config.optimizers.sparse.name) == kinds
    for name, options in given.items():
        if isinstance(options, dict):
            assert getattr(config.optimizers, name).arguments == {"lr": 0.2}


def test_an_argument_of_a_class_is_set_without_naming_the_class(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {train: t}\nmodel: {name: DLRM}\n")
    changes = {"loss.label": "lable", "optimizers.sparse.lr": "0.1", "optimizers.dense.lr": "0.01"}
    config = read_config(tmp_path / "a.yaml", changes)
    assert (config.loss.name, config.loss.arguments) == ("BinaryCrossEntropy", {"label": "lable"})
    assert (config.optimizers.sparse.name, config.optimizers.sparse.arguments) == ("Adagrad", {"lr": 0.1})
    assert (config.optimizers.dense.name, config.optimizers.dense.arguments) == ("Adam", {"lr": 0.01})
    (tmp_path / "a.yaml").write_text(
        "data: {train: t}\nmodel: {name: DLRM}\nloss: {name: MeanSquaredError}\n"
    )
    assert read_config(tmp_path / "a.yaml", {"loss.label": "y"}).loss.name == "MeanSquaredError"
