"""Tables of MaxCompute as data of ElasticDL's commands, against a tunnel server."""

from importlib.util import find_spec

import odps_tunnel
import pyarrow as pa
import pytest
import torch
from elasticdl_zoo import LOCAL, elasticdl, own_modules, zoo_of

from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl.readers import FeedStep, open_data

# Importing it takes seconds, which processes that run other tests need not spend.
pytestmark = pytest.mark.skipif(find_spec("odps") is None, reason="needs pyodps")

URL = "odps://shop/tables/lines"
THEIRS = {
    "MAXCOMPUTE_AK": "ODPS_ACCESS_ID",
    "MAXCOMPUTE_SK": "ODPS_ACCESS_KEY",
    "MAXCOMPUTE_ENDPOINT": "ODPS_ENDPOINT",
}


@pytest.fixture
def server(monkeypatch):
    with odps_tunnel.serving() as service, own_modules("zoo_model"):
        for name, value in service.environment().items():
            monkeypatch.setenv(name, value)
        numbers = [number / 40 for number in range(40)]
        rows = pa.table({"x": numbers, "y": [2 * number for number in numbers]})
        types = {"x": "double", "y": "double"}
        service.add("shop", "lines", types, rows)
        days = service.add("shop", "days", types, partition_types={"ds": "string"})
        days.put(rows.slice(0, 10), "ds=20240101")
        days.put(rows.slice(10, 20), "ds=20240102")
        yield service


def records_of(origin, params=None, shuffle=False):
    opened = open_data(origin, "training", params or {}, None, 8)
    seen = []

    def feed(records, mode, metadata):
        seen.extend(records)
        return torch.zeros(len(records)), torch.zeros(len(records))

    for _ in opened.read(4, 8, shuffle, FeedStep(feed, "training", opened.metadata, opened.records_of)):
        pass
    return seen, opened.metadata.column_names


def lines(first, last):
    return [[str(number / 40), str(2 * (number / 40))] for number in range(first, last)]


def test_a_table_is_read_by_ranges_of_records_as_texts(server):
    assert records_of(URL) == (lines(0, 40), ["x", "y"])
    server.requests.clear()
    shuffled, _ = records_of(URL, shuffle=True)
    assert sorted(each[:2] for each in server.ranges()) == [(first, 8) for first in range(0, 40, 8)]
    assert sorted(shuffled) == sorted(lines(0, 40))
    assert shuffled != lines(0, 40)


def test_every_type_of_value_is_the_text_of_it(server):
    types, rows = odps_tunnel.clicks(30)
    server.add("shop", "clicks", types, rows)
    seen, names = records_of("odps://shop/tables/clicks")
    assert names == list(types)
    assert seen == [[str(value) for value in row.values()] for row in rows.to_pylist()]
    assert seen[0][:3] == ["0", "0", "0.0"]
    assert "None" in seen[1]  # a value that is missing, as in ElasticDL


def test_partitions_and_columns_are_in_the_url_or_in_the_params(server):
    expected = (lines(10, 30), ["x", "y"])
    assert records_of("odps://shop/tables/days?partition=ds=20240102") == expected
    assert records_of("odps://shop/tables/days", {"partition": "ds=20240102"}) == expected
    days = server.tables["shop", "days"]
    days.put(days.records["ds=20240102"], "ds=50%+a")
    assert records_of("odps://shop/tables/days", {"partition": "ds=50%+a"}) == expected
    seen, names = records_of(URL, {"columns": ["y"]})
    assert (seen, names) == ([[y] for _, y in lines(0, 40)], ["y"])
    assert {columns for _, _, columns in server.ranges()[-1:]} == {"y"}


@pytest.mark.parametrize("named", [{}, {"reader_type": "ODPS"}])
def test_the_variables_of_elasticdl_name_the_account(server, tmp_path, monkeypatch, capfd, named):
    values = {theirs: server.environment()[ours] for theirs, ours in THEIRS.items()}
    for ours in THEIRS.values():
        monkeypatch.delenv(ours)
    zoo = zoo_of(tmp_path, "")
    params = "; ".join(f"{name}={value}" for name, value in (named | {"partition": "ds=20240101"}).items())
    words = ("--training_data", "days", "--data_reader_params", params, "--minibatch_size", 5)
    values["MAXCOMPUTE_PROJECT"] = "shop"
    variables = ",".join(f"{name}={value}" for name, value in values.items())
    assert elasticdl("train", *zoo, *LOCAL, *words, "--envs", variables) == 0
    assert "10 samples" in capfd.readouterr().out


def test_a_model_trains_evaluates_and_predicts_on_a_table(server, tmp_path, capfd):
    zoo, out = zoo_of(tmp_path, ""), tmp_path / "model"
    sizes = ("--minibatch_size", 4, "--num_minibatches_per_task", 2)
    data = ("--training_data", URL, "--num_epochs", 20, "--output", out)
    assert elasticdl("train", *zoo, *LOCAL, *sizes, *data) == 0
    load = ("--checkpoint_dir_for_init", out)
    capfd.readouterr()
    assert elasticdl("evaluate", *zoo, *LOCAL, *sizes, "--validation_data", URL, *load) == 0
    assert float(capfd.readouterr().out.split("loss: ")[1]) < 0.05
    words = ("--prediction_data", URL, *load, "--output", tmp_path / "predicted")
    assert elasticdl("predict", *zoo, *LOCAL, *sizes, *words) == 0


@pytest.mark.slow
def test_workers_of_a_job_lease_the_records_of_a_table(server, tmp_path, capfd):
    zoo, out = zoo_of(tmp_path, ""), tmp_path / "model"
    sizes = ("--minibatch_size", 4, "--num_minibatches_per_task", 2, "--num_epochs", 2)
    assert elasticdl("train", *zoo, *sizes, "--training_data", URL, "--output", out) == 0
    assert "80 samples" in capfd.readouterr().out
    assert sorted(each[:2] for each in server.ranges() if each[1] == 8) == sorted(
        [(first, 8) for first in range(0, 40, 8)] * 2
    )


@pytest.mark.parametrize(
    ("origin", "params", "text"),
    [
        (URL, {"table": "x"}, "no table for a table: name the table as the data"),
        (URL, {"label_col": "y"}, "no label_col for a table: define feed"),
        (URL, {"access_key": "1"}, "set MAXCOMPUTE_PROJECT, MAXCOMPUTE_AK"),
        (URL, {"sep": ","}, "expects columns, partition, reader_type, got sep"),
        (URL, {"columns": "y"}, r"a list of names, as \['a', 'b'\], got 'y'"),
        (f"{URL}?partition=ds=1", {"partition": "ds=2"}, "expected none in --data_reader_params"),
        ("lines", {"reader_type": "ODPS"}, "needs a project: expected MAXCOMPUTE_PROJECT"),
    ],
)
def test_wrong_tables_say_what_is_expected(origin, params, text):
    with pytest.raises(ContractError, match=text):
        open_data(origin, "training", params, None, 8)


def test_a_url_that_is_none_names_itself(server, tmp_path, capfd):
    zoo = zoo_of(tmp_path, "")
    assert elasticdl("train", *zoo, *LOCAL, "--training_data", "odps://shop/lines") != 0
    assert "odps://shop/lines: Expected odps://project/tables/name" in capfd.readouterr().err
