"""RecIS's datasets of MaxCompute, against a tunnel server: partitions, shares, positions, training."""

from importlib.util import find_spec
from itertools import pairwise

import odps_tunnel
import pytest
import torch
from torch import nn

import karvan as kv
from karvan.compat.recis.framework.trainer import Trainer, TrainingArguments
from karvan.compat.recis.io.odps_dataset import OdpsDataset, get_table_size, table_url
from karvan.compat.recis.nn import EmbeddingEngine, EmbeddingOption
from karvan.compat.recis.nn.modules.hashtable import filter_out_sparse_param
from karvan.compat.recis.optim import SparseAdamW
from karvan.compat.unsupported import UnsupportedError
from karvan.data.errors import DataError

# Importing it takes seconds, which processes that run other tests need not spend.
pytestmark = pytest.mark.skipif(find_spec("odps") is None, reason="needs pyodps")


@pytest.fixture(scope="module")
def server():
    with odps_tunnel.serving() as service:
        yield service


@pytest.fixture(autouse=True)
def environment(server, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.tables.clear()


@pytest.fixture
def clicks(server):
    types, rows = odps_tunnel.clicks(300)
    server.add("shop", "clicks", types, rows)
    return rows


def dataset(*tables, batch_size=100, **options):
    made = OdpsDataset(batch_size, transform_fn=[lambda x: x[0]], **options)
    made.add_paths(tables)
    made.fixedlen_feature("price", [-1.0])
    made.varlen_feature("id")
    made.varlen_feature("items")
    made.varlen_feature("words", trans_int8=True)
    made.varlen_feature("name", hash_type="farm", hash_bucket=1000)
    made.varlen_feature("weights")
    return made


def batches(data):
    return [batch for is_end, batch in data if not is_end]


def ids(data):
    return [key for batch in batches(data) for key in batch["id"].values().tolist()]


def test_a_table_is_read_as_files_are(clicks):
    given = list(dataset("shop.clicks"))
    assert [is_end for is_end, _ in given] == [False] * 3 + [True]
    rows = clicks.to_pylist()
    price = torch.cat([batch["price"] for _, batch in given[:-1]])
    assert price.shape == (300, 1)
    assert price[:, 0].tolist() == [-1.0 if row["price"] is None else row["price"] for row in rows]
    first = given[0][1]
    items = first["items"]
    bounds = items.offsets()[0].tolist()
    lists = [items.values()[a:b].tolist() for a, b in pairwise(bounds)]
    assert lists == [row["items"] or [] for row in rows[:100]]
    assert first["words"].dtype is torch.int8
    assert bytes(first["words"].values()[:4].tolist()) == b"a0a1"
    assert len(first["words"].offsets()) == 2  # lists of strings
    named = [row["name"] for row in rows[:100] if row["name"] is not None]
    assert first["name"].values().tolist() == [int(kv.ids.farm([text])[0]) % 2**64 % 1000 for text in named]
    assert first["weights"].weight().tolist()[:2] == [0.5, 2.0]


def test_partitions_and_sizes(server):
    types, rows = odps_tunnel.clicks(150)
    table = server.add("shop", "days", types, partition_types={"ds": "string", "hh": "bigint"})
    for day in range(3):
        table.put(rows.slice(day * 50, 50), f"ds=2024010{day},hh=07")
    data = dataset("shop.days/ds=20240100/hh=07", "odps://shop/tables/days/ds=20240102/hh=07")
    assert data.get_table_size() == [50, 50]
    assert get_table_size("shop.days/ds=20240101/hh=07") == 50
    assert ids(data) == [*range(50), *range(100, 150)]


def test_workers_have_shares_and_a_position_survives(clicks):
    shares = [ids(dataset("shop.clicks", worker_idx=i, worker_num=3)) for i in range(3)]
    assert sorted(key for share in shares for key in share) == list(range(300))
    assert {len(share) for share in shares} == {100}
    data = dataset("shop.clicks")
    next(iter(data))
    rest = dataset("shop.clicks")
    rest.load_io_state(data.dump_io_state())
    assert ids(rest) == list(range(100, 300))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.engine = EmbeddingEngine({"id": EmbeddingOption(4, shared_name="id")})
        self.net = nn.Linear(4, 1)

    def forward(self, samples):
        made = self.engine(samples)
        return nn.functional.mse_loss(self.net(made["id"]), made["price"])


def test_a_trainer_trains_on_a_table(clicks, tmp_path):
    model = Model()
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(tmp_path / "run")),
        dataset("shop.clicks"),
        dense_optimizers=(torch.optim.Adam(model.parameters()), None),
        sparse_optimizer=SparseAdamW(filter_out_sparse_param(model)),
    )
    trainer.train()
    assert trainer.karvan_trainer.step == 3
    assert sorted(filter_out_sparse_param(model)["id"].ids().tolist()) == list(range(300))


def test_tables_that_are_not_there_or_not_understood(clicks):
    with pytest.raises(DataError, match="odps://shop/tables/carts: MaxCompute answered NoSuchTable"):
        ids(dataset("shop.carts"))
    with pytest.raises(ValueError, match=r"expects 'project.table' or 'odps://.*', got 'clicks'"):
        dataset("clicks")
    with pytest.raises(DataError, match="There is no option 'start'"):
        ids(dataset("odps://shop/tables/clicks?start=0&end=10"))
    with pytest.raises(UnsupportedError, match=r"OdpsDataset\.filter is not supported"):
        dataset("shop.clicks").filter(bool)
    with pytest.raises(UnsupportedError, match="read_batch_size=7"):
        dataset("shop.clicks", read_batch_size=7)
    with pytest.raises(ValueError, match="OdpsDataset expects paths and features"):
        list(OdpsDataset(8))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("p.t", "odps://p/tables/t"),
        ("p.t/ds=1", "odps://p/tables/t?partition=ds=1"),
        ("odps://p/tables/t/ds=1/hh=2", "odps://p/tables/t?partition=ds=1,hh=2"),
        ("odps://p/tables/t?partition=ds=1", "odps://p/tables/t?partition=ds=1"),
        ("odps://p/schemas/s/tables/t/ds=1", "odps://p/schemas/s/tables/t?partition=ds=1"),
    ],
)
def test_names_of_tables(given, url):
    assert table_url(given) == url
