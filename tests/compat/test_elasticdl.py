"""ElasticDL's model contract in one process: the seed's CNN, forms of its parts, readers, flags, the zoo."""

import copy
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from digits_recordio import write_digits
from elasticdl_zoo import LOCAL, csv_of, elasticdl, own_modules, zoo_of
from hypothesis import given
from hypothesis import strategies as st
from support_paths import support_path

import karvan as kv
from karvan.compat.elasticdl.commands import environment_of, parse
from karvan.compat.elasticdl.contract import ContractError, LearningRateScheduler, ModelContract
from karvan.compat.elasticdl.readers import FeedStep, numbers_of, open_data, parse_params
from karvan.compat.imports import SYSTEMS, import_aliases


@pytest.fixture(autouse=True)
def _own_modules():
    with own_modules("mnist_cnn", "zoo_model"):
        yield


def contract_of(folder, text):
    zoo = zoo_of(folder, "\n" + text)
    with import_aliases(SYSTEMS["elasticdl"]):
        return ModelContract(str(zoo[1]), zoo[3])


def test_the_seeds_cnn_trains_evaluates_and_predicts(tmp_path, capfd):
    digits = write_digits(tmp_path / "digits", 0, 128, files=2)
    model = (
        "--model_zoo",
        support_path("compat/mnist_cnn.py").parent,
        "--model_def",
        "mnist_cnn.CustomModel",
    )
    out, predicted = tmp_path / "model", tmp_path / "predicted"
    data = ("--training_data", digits, "--minibatch_size", 16, "--num_epochs", 3)
    assert elasticdl("train", *model, *LOCAL, *data, "--output", out) == 0
    assert "384 samples" in capfd.readouterr().out
    assert (
        elasticdl("evaluate", *model, *LOCAL, "--validation_data", digits, "--checkpoint_dir_for_init", out)
        == 0
    )
    lines = dict(line.split(": ") for line in capfd.readouterr().out.splitlines())
    assert float(lines["accuracy"]) > 0.8
    words = ("--prediction_data", digits, "--checkpoint_dir_for_init", out, "--output", predicted)
    assert elasticdl("predict", *model, *LOCAL, *words) == 0
    assert pq.read_table(predicted).num_rows == 128


@pytest.mark.slow
def test_the_seeds_cnn_learns_the_digits(tmp_path, capfd):
    train, valid = write_digits(tmp_path / "train", 0, 1500), write_digits(tmp_path / "valid", 1500, 1797)
    model = (
        "--model_zoo",
        support_path("compat/mnist_cnn.py").parent,
        "--model_def",
        "mnist_cnn.CustomModel",
    )
    data = ("--training_data", train, "--validation_data", valid, "--num_epochs", 6)
    assert elasticdl("train", *model, *LOCAL, *data) == 0
    accuracy = capfd.readouterr().out.rpartition("evaluation")[2].split("accuracy ")[1]
    assert float(accuracy.split()[0]) > 0.9


@pytest.mark.parametrize(
    "optimizer",
    [
        "def optimizer(model, lr=0.1):\n    return torch.optim.SGD(model.parameters(), lr)",
        "def optimizer(params):\n    return torch.optim.SGD(params, 0.1)",
        "import functools\ndef optimizer(lr=0.1):\n    return functools.partial(torch.optim.SGD, lr=lr)",
        "made = torch.nn.Linear(1, 1)\ndef custom_model():\n    return made\n"
        "def optimizer(lr=0.1):\n    return torch.optim.SGD(made.parameters(), lr)",
    ],
)
def test_optimizers_of_a_rate_of_the_model_and_of_parameters(tmp_path, optimizer):
    contract = contract_of(tmp_path, optimizer)
    model = contract.make_model()
    made = contract.make_optimizer(model)
    assert made.defaults["lr"] == 0.1
    assert made.param_groups[0]["params"] == list(model.parameters())


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("def optimizer(rate):\n    pass", r"expects optimizer\(model, lr=…\).*got optimizer\(rate\)"),
        ("def optimizer():\n    return 3", "must give a torch optimizer, .* got int"),
        (
            "def optimizer():\n    return torch.optim.SGD(custom_model().parameters(), 0.1)",
            "of another model's parameters: take the model as its first argument",
        ),
    ],
)
def test_optimizers_of_another_form_are_refused(tmp_path, optimizer, text):
    contract = contract_of(tmp_path, optimizer)
    with pytest.raises(ContractError, match=text):
        contract.make_optimizer(contract.make_model())


def test_losses_with_the_older_order_of_arguments_are_turned(tmp_path):
    contract = contract_of(tmp_path, "def loss(output, labels):\n    return (output, labels)\n")
    assert contract.loss("labels", "predictions") == ("predictions", "labels")


def test_csv_data_callbacks_metrics_and_names_of_functions(tmp_path, capfd):
    text = """
    from elasticdl.python.elasticdl.callbacks import LearningRateScheduler, MaxStepsStopping

    def prepare(records, mode, metadata):
        assert metadata.column_names == ["y", "x"]
        records = records.map(lambda cells: (torch.tensor([float(cells[1])]), float(cells[0])))
        return records

    class Report:
        def on_train_batch_end(self, batch, logs):
            print("batch", batch, sorted(logs))
        def on_train_end(self, logs):
            print("end of", type(self.model).__name__)

    def callbacks():
        return [MaxStepsStopping(3), LearningRateScheduler(lambda step: 0.1 * (step + 1)), Report()]

    def eval_metrics_fn():
        return {
            "each": lambda labels, predictions: (predictions.reshape(-1) - labels).abs(),
            "mean": lambda labels, predictions: (predictions.reshape(-1) - labels).abs().mean(),
        }
    """
    data = csv_of(tmp_path, sep="|")
    words = ("--training_data", data, "--validation_data", data, "--minibatch_size", 8, "--feed", "prepare")
    params = ("--data_reader_params", "sep=|; columns=['y', 'x']")
    logs = ("--log_loss_steps", 1)
    assert elasticdl("train", *zoo_of(tmp_path, text), *LOCAL, *words, *params, *logs) == 0
    out, error = capfd.readouterr()
    assert "batch 0 ['loss']\n" in out
    assert "batch 2" in out
    assert "batch 3" not in out
    assert "end of Linear" in out
    metrics = out.rpartition("evaluation")[2].split()
    assert metrics[metrics.index("each") + 1] == metrics[metrics.index("mean") + 1]
    rates = [float(line.split("lr/dense ")[1]) for line in error.splitlines() if "lr/dense" in line]
    assert rates[-1] == pytest.approx(0.4)  # of the fourth step, which is not made


def test_a_reader_of_its_own_is_read_in_tasks(tmp_path, capfd):
    text = """
    import json
    from elasticdl.python.data.reader.data_reader import AbstractDataReader

    class Squares(AbstractDataReader):
        def __init__(self, data_origin, records_per_task, scale):
            self.origin, self.scale = data_origin, scale

        def create_shards(self):
            return [(self.origin, 0, 10), (self.origin, 10, 6)]

        def read_records(self, task):
            assert task.shard.name == task.shard_name == self.origin
            print("task", task.type, task.start, task.end)
            for number in range(task.start, task.end):
                yield {"x": number / 16, "y": self.scale * number / 16}

    def custom_data_reader(**arguments):
        return Squares(**arguments)

    def feed(records, mode, metadata):
        features = np.array([record["x"] for record in records])[:, None]
        if mode == Mode.PREDICTION:
            return {"x": features}
        return {"x": features}, np.array([record["y"] for record in records])

    import numpy as np

    class custom_model(torch.nn.Linear):
        def __init__(self, bias):
            super().__init__(1, 1, bias=bias)
        def forward(self, features):
            return super().forward(features["x"])

    class PredictionOutputsProcessor:
        def process(self, predictions, worker_id):
            print("predicted", worker_id, predictions.shape[0])
    """
    zoo = zoo_of(tmp_path, text)
    out = tmp_path / "model"
    words = ("--minibatch_size", 4, "--num_minibatches_per_task", 2, "--data_reader_params", "scale=2.0")
    words += ("--model_params", "bias=False")
    data = ("--training_data", "squares", "--num_epochs", 12)
    assert elasticdl("train", *zoo, *LOCAL, *words, *data, "--output", out) == 0
    printed = capfd.readouterr().out
    tasks = [tuple(map(int, line.split()[2:])) for line in printed.splitlines() if "task TRAINING" in line]
    assert {first < 10 for first, last in tasks if (first < 10) == (last <= 10)} == {True, False}
    assert sum(last - first for first, last in tasks) == 12 * 16
    end = ("--prediction_data", "squares", "--checkpoint_dir_for_init", out)
    assert elasticdl("predict", *zoo, *LOCAL, *words, *end) == 0
    printed = capfd.readouterr().out
    assert "task PREDICTION" in printed
    counted = [line.split() for line in printed.splitlines() if line.startswith("predicted")]
    assert sum(int(count) for _, _, count in counted) == 16
    assert {worker for _, worker, _ in counted} == {"0"}
    (weight,) = kv.checkpoint.find(out).state()["model"].values()
    assert float(weight) == pytest.approx(2.0, abs=0.3)


def test_an_output_beside_checkpoints_is_the_trained_model(tmp_path, capfd):
    zoo, data = zoo_of(tmp_path, ""), csv_of(tmp_path)
    words = ("--training_data", data, "--minibatch_size", 8, "--checkpoint_dir", tmp_path / "run")
    words += ("--checkpoint_steps", 3, "--keep_checkpoint_max", 2, "--output", tmp_path / "model")
    assert elasticdl("train", *zoo, *LOCAL, *words) == 0
    assert [each.step for each in kv.Checkpoints(tmp_path / "run").list()] == [6, 8]
    made = kv.checkpoint.find(tmp_path / "model")
    kept = kv.checkpoint.find(tmp_path / "run")
    for name, tensor in kept.state()["model"].items():
        assert torch.equal(made.state()["model"][name], tensor)
    init = ("--checkpoint_dir_for_init", tmp_path / "model", "--training_data", data, "--num_epochs", 20)
    init += ("--minibatch_size", 8)
    assert elasticdl("train", *zoo, *LOCAL, *init, "--output", tmp_path / "further") == 0
    capfd.readouterr()
    load = ("--checkpoint_dir_for_init", tmp_path / "further", "--validation_data", data)
    assert elasticdl("evaluate", *zoo, *LOCAL, *load) == 0
    assert float(capfd.readouterr().out.split("loss: ")[1]) < 0.1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num_worker", "2"], "unrecognized arguments: --num_worker 2"),
        (["--minibatch_size", "0"], "expected a whole number from 1 on, got '0'"),
        (["--use_async", "maybe"], "expected true or false, got 'maybe'"),
        (["--use_async", "--distribution_strategy", "Local"], "--use_async is for"),
        (["--use_async", "--grads_to_wait", "2"], "--grads_to_wait is for synchronous SGD"),
        (["--lr_staleness_modulation=true"], "is for asynchronous SGD"),
        (["--get_model_steps", "2"], "is for asynchronous SGD"),
        (["--evaluation_steps", "2"], "needs --validation_data"),
        (["--checkpoint_steps", "2"], "needs --checkpoint_dir"),
        (["--evaluation_throttle_secs", "60"], "evaluations are counted in steps"),
        (["--yaml", "x.yaml"], "--yaml is not supported"),
        (["--custom_training_loop", "true"], "karvan run --as elasticdl train --job_command"),
        (["--model_def", "CustomModel"], "expects a module and its model"),
        (["--model_def", "nothing.CustomModel"], "there is no file"),
        (["--model_def", "zoo_model.Net"], "has no 'Net'. It has: "),
        (["--data_reader_params", "sep"], "expects name=value; name=value, got 'sep'"),
        (["--data_reader_params", "partition=1"], "expects columns, reader_type, sep, got partition"),
    ],
)
def test_wrong_flags_say_what_is_expected(tmp_path, capfd, words, text):
    base = [*zoo_of(tmp_path, ""), "--training_data", csv_of(tmp_path)]
    local = [] if "use_async" in "".join(words) or "lr_stal" in words[0] or "get_model" in words[0] else LOCAL
    assert elasticdl("train", *base, *local, *words) == 2
    assert text in capfd.readouterr().err


def test_flags_without_a_meaning_are_warnings(tmp_path, capfd):
    words = (
        "--training_data",
        csv_of(tmp_path),
        "--envs",
        "WORD=a,b,OTHER=c",
        "--image_name",
        "elasticdl:ci",
    )
    zoo = zoo_of(tmp_path, "\nimport os\nassert os.environ['WORD'] == 'a,b'\n")
    with pytest.warns(UserWarning, match="has no meaning here") as found:
        assert elasticdl("train", *zoo, *LOCAL, *words, "--num_workers", 3) == 0
    assert [str(warning.message).split(":")[0] for warning in found] == [
        "--image_name has no meaning here",
        "--num_workers has no meaning here",
    ]
    load = ("--checkpoint_filename_for_init", "m", "--evaluation_data", "d", "--checkpoint_steps", "3")
    with pytest.warns(UserWarning, match="checkpoint_steps has no meaning here: evaluate makes no steps"):
        flags = parse("evaluate", [*map(str, zoo), *load])
    assert (flags.checkpoint_dir_for_init, flags.validation_data) == ("m", "d")
    with pytest.warns(UserWarning, match="evaluation_start_delay_secs|use_go_ps") as found:
        parse("train", [*map(str, (*zoo, *words[:2])), "--evaluation_start_delay_secs", "9", "--use_go_ps"])
    assert len(found) == 2
    assert environment_of("a=1,2,b=x=y") == {"a": "1,2", "b": "x=y"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("def feed(records, mode, _):\n    return None", "feed must give a pair of features and labels"),
        ("def feed(records, mode, _):\n    return records.shuffle(3)", "leave dataset.shuffle(…) out"),
        ("def feed(records, mode, _):\n    return [1.0], [[1], [1, 2]]", "feed must give labels as a tensor"),
        (
            "def feed(records, mode, _):\n    return [1.0], [1.0, 2.0]",
            "equally many of each, got 1 in 'features'",
        ),
        ("def custom_model():\n    return 3", "gives a torch.nn.Module, got int"),
        ("def callbacks():\n    return [3]", "callbacks() must give objects with some of on_train_begin"),
        ("class A:\n    on_task_end = 1\ndef callbacks():\n    return [A()]", "has on_task_end"),
        ("def eval_metrics_fn():\n    return {'a': 3}", "functions of (labels, predictions)"),
        ("def custom_data_reader(**_):\n    return 3", "create_shards"),
    ],
)
def test_wrong_parts_of_a_contract_say_what_is_expected(tmp_path, capfd, change, text):
    zoo = zoo_of(tmp_path, "\n" + change)
    assert elasticdl("train", *zoo, *LOCAL, "--training_data", csv_of(tmp_path)) != 0
    assert text in capfd.readouterr().err


def test_an_error_of_the_model_shows_its_place(tmp_path, capfd):
    zoo = zoo_of(tmp_path, "\ndef feed(records, mode, metadata):\n    raise KeyError('mine')\n")
    assert elasticdl("train", *zoo, *LOCAL, "--training_data", csv_of(tmp_path)) == 1
    assert "zoo_model.py" in capfd.readouterr().err


def test_predictions_go_to_one_place(tmp_path, capfd):
    zoo, data = zoo_of(tmp_path, ""), csv_of(tmp_path)
    words = ("--prediction_data", data, "--checkpoint_dir_for_init", tmp_path)
    assert elasticdl("predict", *zoo, *LOCAL, *words) == 2
    assert "expected one of the two, got neither" in capfd.readouterr().err


def test_dataset_fn_gets_the_numbers_of_texts_and_other_records_as_they_are():
    assert numbers_of([b"1 2.5", "3,4", ["5"]]).tolist() == [1, 2.5, 3, 4, 5]
    assert numbers_of([b"\x01\xff"]) is None
    assert numbers_of([{"a": 1}]) is None
    seen = []

    def dataset_fn(records, mode, metadata):
        seen.append(records)
        return torch.zeros(len(records)), None

    for records in ([b"1", b"2"], [b"a", b"2"]):
        FeedStep(dataset_fn, "prediction", None, lambda batch, records=records: records, numbers=True)({})
    assert seen[0].tolist() == [1, 2]
    assert seen[1] == [b"a", b"2"]


def test_features_become_tensors_of_the_models_dtype():
    def feed(records, mode, metadata):
        return {"a": np.zeros((2, 3)), "b": [torch.ones(2), torch.ones(2)], "c": [1, 2]}, [True, False]

    features, labels = FeedStep(feed, "training", None, lambda batch: [1, 2])({})
    assert {name: (each.dtype, tuple(each.shape)) for name, each in features.items()} == {
        "a": (torch.float32, (2, 3)),
        "b": (torch.float32, (2, 2)),
        "c": (torch.int64, (2,)),
    }
    assert labels.tolist() == [True, False]


class Shards:
    """A reader of shards of these lengths, whose records are (name, number)."""

    def __init__(self, lengths):
        self.shards = [(f"s{index % 3}", 100 * index, length) for index, length in enumerate(lengths)]

    def create_shards(self):
        return self.shards

    def read_records(self, task):
        return ((task.shard_name, number) for number in range(task.start, task.end))


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    batch=st.integers(1, 7),
    batches=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_every_record_of_a_reader_comes_once(lengths, batch, batches, shuffle):
    reader = Shards(lengths)
    opened = open_data("x", "training", {}, lambda **_: reader, batch * batches)
    seen = []

    def feed(records, mode, metadata):
        seen.extend(records)
        return torch.zeros(len(records)), torch.zeros(len(records))

    step = FeedStep(feed, "training", opened.metadata, opened.records_of)
    sizes = [each.samples for each in opened.read(batch, batch * batches, shuffle, step)]
    expected = [(name, first + i) for name, first, length in reader.shards for i in range(length)]
    assert sorted(seen) == sorted(expected)
    assert shuffle or seen == expected
    assert all(size == batch for size in sizes[:-1])


def test_records_of_any_kind_are_as_the_reader_gave_them_in_each_epoch():
    records = [b"bytes", b"", b"\x80bytes that begin as a pickle", "text", {"a": [1]}, (2, "b")]

    class Kept:
        """A reader that has its records in memory."""

        def create_shards(self):
            return [("kept", 0, len(records))]

        def read_records(self, task):
            return records[task.start : task.end]

    opened = open_data("x", "training", {}, lambda **_: Kept(), 6)
    seen = []

    def feed(given, mode, metadata):
        seen.append(copy.deepcopy(list(given)))
        given[4]["a"].append(3)  # in place
        return torch.zeros(len(given)), torch.zeros(len(given))

    step = FeedStep(feed, "training", opened.metadata, opened.records_of)
    for _ in range(2):
        assert [batch.samples for batch in opened.read(6, 6, False, step)] == [6]
    assert seen == [records, records]


def test_params_are_python_values_or_text():
    given = "sep=|; columns=['a', 'b']; scale=2.0; name=x y"
    assert parse_params("--flag", given) == {"sep": "|", "columns": ["a", "b"], "scale": 2.0, "name": "x y"}
    assert json.dumps(parse_params("--flag", "")) == "{}"


def test_a_schedule_needs_a_rate():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    with pytest.raises(ContractError, match="above 0, got 0"):
        LearningRateScheduler(lambda step: 0.1)(optimizer)


def test_plain_programs_find_the_names(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text(
        "from elasticdl.python.common.constants import Mode\n"
        "from elasticdl.python.common.log_utils import default_logger\n"
        "from elasticdl.python.worker.prediction_outputs_processor import BasePredictionOutputsProcessor\n"
        "import elasticdl\n"
        "print(Mode.TRAINING, default_logger.name, elasticdl.Mode is Mode)\n"
    )
    assert elasticdl(program) == 0
    assert capfd.readouterr().out == "training elasticdl True\n"
