"""Fitted features in loader processes: checkpoints have their statistics, and loaders use them every day."""

import contextlib
import shutil
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from feature_loader import BATCH, features, fitted, run
from role_loaders import Loaders
from support_paths import support_path

import karvan as kv
from karvan.cluster.role_process import RoleSettings
from karvan.job.environment import JobEnvironment
from karvan.train.results import pack

PROGRAM = str(support_path("cluster/feature_loader.py"))
ROWS = 60


@pytest.fixture
def days(tmp_path):
    """Two days; the second has the first one's frequent words seldom, and other prices."""
    random = np.random.default_rng(1)
    often = np.arange(1, 7) / 21
    paths = []
    for day, chances in ((1, often), (2, often[::-1])):
        city = random.choice(6, size=ROWS, p=chances)
        columns = {
            "city": [f"c{each}" for each in city],
            "price": random.random(ROWS).astype(np.float32) * (1 if day == 1 else 50),
            "label": (city % 2).astype(np.float32),
        }
        paths.append(str(tmp_path / f"day={day}.parquet"))
        pyarrow.parquet.write_table(pa.table(columns), paths[-1])
    return paths


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embeddings = kv.EmbeddingEngine({"city": kv.Table(2)})
        self.last = torch.nn.Linear(3, 1)

    def forward(self, batch):
        embedded = self.embeddings(batch)["city"]
        return self.last(torch.cat([embedded, batch["price"].float().unsqueeze(1)], 1)).squeeze(1)

    def numbers(self):
        table = self.embeddings.table("city")
        keys = table.keys().sort().values
        return [*self.last.parameters(), keys, table.vectors(keys)]


def fit(data, folder, **options):
    net = Net()
    trainer = kv.Trainer(
        net,
        kv.losses.BinaryCrossEntropy(label="label"),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sparse_optimizer=kv.optim.SGD(lr=0.1),
        checkpoints=folder,
        progress="none",
    )
    trainer.fit(data, **options)
    return net


def fit_stream(loaders, folder, **options):
    stream = loaders.stream(timeout=60)
    try:
        return fit(stream, folder, **options)
    finally:
        stream.close()


def read(path, engine):
    return kv.data.read(path, BATCH, transform=engine)


def start_process(mode, files, **environment):
    return Loaders(1, command=[PROGRAM, mode, files], **environment)


class ThreadLoaders(Loaders):
    """Loaders on threads of this process, which begin at once; they serve over sockets all the same."""

    def __init__(self, count, mode, files):
        self._contexts, self._threads = [], []
        self._arguments = mode, files
        super().__init__(count)

    def start(self, index):
        settings = RoleSettings(
            "loader", JobEnvironment(index=index, count=self.count, registry=self.registry.address)
        )
        self._contexts.append(kv.LoaderContext(settings=settings))
        self._threads.append(threading.Thread(target=self._run, args=(self._contexts[-1],), daemon=True))
        self._threads[-1].start()

    def _run(self, context):
        with contextlib.suppress(ValueError):  # trainers get it
            run(context, *self._arguments)

    def leave(self):
        for context in self._contexts:
            context._leave()

    def __exit__(self, *error):
        self.leave()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        super().__exit__(*error)


def saved(folder):
    engine = features()
    kv.checkpoint.find(folder).load_transforms(engine)
    return statistics(engine)


def statistics(engine):
    return pack(engine.state_dict())


def test_loaders_of_the_next_day_use_the_statistics_that_the_model_was_trained_with(days, tmp_path):
    first = statistics(fitted(days[0]))
    assert first != statistics(fitted(days[1]))
    folder, printed = tmp_path / "run", []
    for day in days:
        memory = fit(read(day, fitted(day)), tmp_path / "memory", data_name=day)
        with start_process("serve", day, KARVAN_CHECKPOINTS=str(folder)) as loaders:
            streamed = fit_stream(loaders, folder, data_name=day)
            printed.append(loaders.end(0)[1])
        assert all(map(torch.equal, streamed.numbers(), memory.numbers()))
        assert saved(folder) == first
    warning = "'features' had other statistics than the checkpoint"
    assert [warning in each for each in printed] == [False, True]


@pytest.mark.parametrize("mode", ["after", "epochs"])
def test_every_kind_of_loader_program_takes_the_statistics_of_the_checkpoint(
    mode, days, tmp_path, monkeypatch
):
    fit(read(days[0], fitted(days[0])), tmp_path / "memory", data_name="1")
    shutil.copytree(tmp_path / "memory", tmp_path / "run")
    memory = fit(read(days[1], fitted(days[1])), tmp_path / "memory", data_name="2")
    monkeypatch.setenv("KARVAN_CHECKPOINTS", str(tmp_path / "run"))
    with ThreadLoaders(1, mode, days[1]) as loaders:
        streamed = fit_stream(loaders, tmp_path / "run", data_name="2")
    assert all(map(torch.equal, streamed.numbers(), memory.numbers()))
    assert saved(tmp_path / "run") == statistics(fitted(days[0]))


def test_loaders_with_other_statistics_than_the_checkpoint_are_an_error_before_training(days, tmp_path):
    folder = tmp_path / "run"
    fit(read(days[0], fitted(days[0])), folder)
    step = kv.checkpoint.find(folder).step
    problem = r"'features' has other statistics than the model.s checkpoint.*Name the trainers' folder"
    with ThreadLoaders(1, "serve", days[1]) as loaders:  # the job names no folder of checkpoints
        with pytest.raises(ValueError, match=problem):
            fit_stream(loaders, folder)
        stream = loaders.stream(timeout=60)
        with pytest.raises(ValueError, match=problem), kv.InferContext(Net(), folder) as context:
            next(iter(context.loader(stream)))
        stream.close()
    assert kv.checkpoint.find(folder).step == step


def test_a_column_of_another_kind_in_the_data_of_loaders_is_an_error_before_training(days, tmp_path):
    table = pyarrow.parquet.read_table(days[0])
    for name, column in {"digits": range(ROWS), "codes": ["V3N4P"] * ROWS}.items():
        with_zip = table.append_column("zip", pa.array(column))
        pyarrow.parquet.write_table(with_zip, tmp_path / f"{name}.parquet")
    with ThreadLoaders(1, "serve", str(tmp_path / "digits.parquet")) as loaders:
        fit_stream(loaders, tmp_path / "run")
    problem = r"codes.parquet.*column 'zip': Expected numbers, as in .*digits.parquet"
    refused = pytest.raises(kv.data.DataError, match=problem)
    with ThreadLoaders(1, "serve", str(tmp_path / "codes.parquet")) as loaders, refused:
        fit_stream(loaders, tmp_path / "run")


def test_loaders_that_fit_to_their_shares_are_an_error_that_names_them(days, tmp_path):
    problem = r"loader 0 and loader 1 .* 'features'.*kv\.data\.read"
    with ThreadLoaders(2, "share", days[0]) as loaders, pytest.raises(ValueError, match=problem):
        fit_stream(loaders, tmp_path / "run")
    assert list(tmp_path.glob("run/step-*")) == []


def test_several_loaders_and_an_engine_of_the_trainer_have_the_same_statistics(days, tmp_path):
    with ThreadLoaders(2, "serve", days[0]) as loaders:
        engine = features()
        fit_stream(loaders, tmp_path / "run", eval_data=read(days[1], engine))
        assert statistics(engine) == saved(tmp_path / "run") == statistics(fitted(days[0]))
        with pytest.raises(
            ValueError, match="'features' of this process and of the loaders have different statistics"
        ):
            fit_stream(loaders, tmp_path / "other", eval_data=read(days[1], fitted(days[1])))


def test_a_loader_that_is_replaced_by_one_with_other_statistics_is_an_error(days, monkeypatch):
    with ThreadLoaders(1, "serve", days[0]) as loaders:
        stream = loaders.stream(timeout=60, prefetch=1)
        stream.transform_states()
        batches = iter(stream)
        next(batches)
        loaders.leave()
        monkeypatch.setenv("FIT_TO", days[1])
        loaders.start(0)
        with pytest.raises(ValueError, match="loader 0 transforms batches with other statistics than when"):
            list(batches)
        stream.close()


@pytest.mark.parametrize(
    ("mode", "problem"), [("unfitted", "has no statistics yet"), ("late", "before data.serve, data.epochs")]
)
def test_trainers_get_the_error_of_a_loader_whose_statistics_are_unknown(mode, problem, days, tmp_path):
    with ThreadLoaders(1, mode, days[0]) as loaders, pytest.raises(RuntimeError, match=problem):
        fit_stream(loaders, tmp_path / "run")


def test_a_checkpoint_without_the_statistics_of_todays_features_is_a_warning(days, tmp_path, caplog):
    plain = [dict(batch) for batch in read(days[0], fitted(days[0]))]
    warning = "has no statistics of transform 'features'"
    for folder in ("memory", "stream"):
        fit(plain, tmp_path / folder, data_name="1")
    assert warning not in caplog.text
    with ThreadLoaders(1, "serve", days[1]) as loaders:
        fit_stream(loaders, tmp_path / "stream", data_name="2")
    assert warning in caplog.text
    for name, expected in (("2", True), ("3", False)):
        caplog.clear()
        fit(read(days[1], fitted(days[1])), tmp_path / "memory", data_name=name)
        assert (warning in caplog.text) == expected
