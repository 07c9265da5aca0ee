"""Tables of MaxCompute: types, columns, partitions, ranges of records, ranks, leases."""

import pickle
import threading
from importlib.util import find_spec

import odps_tunnel
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import karvan as kv
from karvan.data import Split, read
from karvan.data.errors import DataError
from karvan.data.maxcompute import MaxComputeSource, parse_tables
from karvan.data.retry import RetryingSource
from karvan.data.task_records import records_done
from karvan.data.work_client import WorkClient
from karvan.wire import Server
from karvan.work.service import WorkService

pytestmark = pytest.mark.skipif(find_spec("odps") is None, reason="needs pyodps")  # whose import is slow

URL = "odps://shop/tables/clicks"


@pytest.fixture(scope="module")
def server():
    with odps_tunnel.serving() as service:
        yield service


@pytest.fixture(autouse=True)
def environment(server, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.tables.clear()
    server.requests.clear()
    server.faults.clear()


def add_clicks(server, records=2000):
    types, rows = odps_tunnel.clicks(records)
    server.add("shop", "clicks", types, rows)
    return rows


def add_days(server, days=3, records=50):
    types, rows = odps_tunnel.clicks(days * records)
    table = server.add("shop", "days", types, partition_types={"ds": "string", "hh": "bigint"})
    for day in range(days):
        table.put(rows.slice(day * records, records), f"ds=2024010{day},hh=07")
    urls = [f"odps://shop/tables/days?partition=ds=2024010{day},hh=07" for day in range(days)]
    return urls, rows, table


def ids(batches):
    return [number for batch in batches for number in batch["id"].tolist()]


def source(url=URL, columns=None, **options):
    return MaxComputeSource(parse_tables(url), columns, **options)


def test_every_type_is_read_as_the_same_table_in_memory(server):
    rows = add_clicks(server)
    found, expected = list(read(URL, 300, labels=["id"])), list(read(rows, 300))
    assert [batch.samples for batch in found] == [batch.samples for batch in expected]
    for batch, same in zip(found, expected, strict=True):
        assert list(batch) == list(same) == rows.column_names
        for name in same:
            given, wanted = batch[name], same[name]
            assert type(given) is type(wanted)
            if hasattr(wanted, "to_lists"):
                assert given.to_lists() == wanted.to_lists(), name
                continue
            assert given.dtype == wanted.dtype
            assert given.equal(wanted) or (given.isnan() == wanted.isnan()).all(), name
    assert all(batch["weights"].weights is not None for batch in found)


def test_only_the_columns_that_are_asked_for_are_sent(server):
    rows = add_clicks(server, 100)
    columns = [kv.data.Fixed("small", default=-1), "id", kv.data.Varlen("name", hash="farm")]
    (batch,) = read(URL, 100, columns=columns)
    assert list(batch) == ["small", "id", "name"]
    assert batch["small"].tolist() == [-1 if each is None else each for each in rows["small"].to_pylist()]
    assert batch["name"].to_lists()[2] == [kv.ids.farm("name 2")]
    assert {columns for _, _, columns in server.ranges()} == {"id,small,name"}


def test_a_type_that_cannot_be_read_is_an_error_unless_it_is_not_asked_for(server):
    server.add(
        "shop", "odd", {"id": "bigint", "more": "json"}, pa.table({"id": [1, 2], "more": ["{}", "{}"]})
    )
    with pytest.raises(
        DataError, match=r"^odps://shop/tables/odd, column 'more': Columns of type JSON cannot"
    ):
        read("odps://shop/tables/odd", 2)
    assert ids(read("odps://shop/tables/odd", 2, columns=["id"])) == [1, 2]
    with pytest.raises(DataError, match=r"column 'ix': There is no such column; there are: id"):
        read("odps://shop/tables/odd", 2, columns=["ix"])


def test_partitions_are_parts_and_their_values_are_columns(server):
    urls, rows, table = add_days(server)
    batches = list(read(urls, 50, columns=["id", "hh", "ds"]))
    assert ids(batches) == rows["id"].to_pylist()
    assert [batch["hh"].tolist() for batch in batches] == [[7] * 50] * 3
    assert [bytes(batch["ds"].values[:8].tolist()).decode() for batch in batches] == [
        "20240100",
        "20240101",
        "20240102",
    ]
    assert next(iter(read(urls, 50))).keys() >= {"ds", "hh"}
    (batch,) = read(urls[0], 50, options={"partitions": False})
    assert list(batch) == rows.column_names
    with pytest.raises(DataError, match="at least one column that is not in the partition"):
        read(urls, 50, columns=["ds"])
    with pytest.raises(
        DataError, match=r"^odps://shop/tables/days: MaxCompute answered MissingPartitionSpec"
    ):
        read("odps://shop/tables/days", 50)
    with pytest.raises(DataError, match=r"ds=x,hh=1: MaxCompute answered NoSuchPartition"):
        read("odps://shop/tables/days?partition=ds=x,hh=1", 50)
    table.types["id"] = "string"
    add_clicks(server)
    with pytest.raises(DataError, match=r"column 'id': Expected int64, as .*clicks has, but .* has string"):
        read([URL, urls[0]], 50, options={"partitions": False})


def test_a_table_of_a_schema_and_sessions_that_are_not_ready_at_once(server, monkeypatch):
    types, rows = odps_tunnel.clicks(10)
    server.add("shop", "schemas/raw/tables/clicks", types, rows)
    monkeypatch.setattr(server, "initiating", 2)
    assert ids(read("odps://shop/schemas/raw/tables/clicks", 10)) == list(range(10))
    assert server.initiating == 0


def test_a_table_without_records_has_no_batches(server):
    add_clicks(server, 0)
    assert list(read(URL, 10)) == []


def test_ranks_share_the_records_and_positions_continue(server):
    add_clicks(server, 1000)
    how = {"columns": ["id"], "shuffle": 200, "seed": 3, "split_records": 50}
    ranks = [read(URL, 64, rank=rank, world_size=3, **how) for rank in range(3)]
    seen = []
    for loader in ranks:
        batches = iter(loader)
        seen += ids([next(batches), next(batches)])
    position = kv.data.merge([loader.state_dict() for loader in ranks])
    alone = read(URL, 64, **how)
    alone.load_state_dict(position)
    assert sorted(seen + ids(alone)) == list(range(1000))
    assert max(count for _, count, _ in server.ranges()) <= 200  # neighbours are read together


def test_records_are_leased_and_each_is_trained_once(server, monkeypatch, tmp_path):
    monkeypatch.setenv("KARVAN_ROLE", "loader")
    monkeypatch.setenv("KARVAN_SHARDING", "dynamic")
    urls, _, _ = add_days(server)
    data = read(urls, 8, columns=["id"], shuffle=1, split_records=20)
    work, seen = WorkService(tmp_path / "ledger.db"), [[], []]
    with Server(work) as master:

        def train(number):
            client = WorkClient(master.address, f"holder {number}")
            client.open(data.spec())
            loader = data.lease(client, 0)
            for batch in loader:
                seen[number] += batch["id"].tolist()
                assert client.acknowledge(records_done(loader.hand_over())) == []
            loader.stop()
            client.close()

        threads = [threading.Thread(target=train, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    work.close()
    assert sorted(seen[0] + seen[1]) == list(range(150))


def test_the_workers_of_an_elastic_dataset_open_the_table_themselves(server, tmp_path):
    add_clicks(server, 100)
    work = WorkService(tmp_path / "ledger.db")
    with Server(work) as master:
        dataset = kv.data.elastic(URL, 16, master=master.address, columns=["id"], epochs=2, shuffle=True)
        seen = []
        for batch in dataset.loader():
            seen += batch["id"].tolist()
            assert dataset.acknowledge(batch)
    work.close()
    assert sorted(seen) == sorted([*range(100)] * 2)


def test_other_records_are_other_data(server):
    urls, rows, table = add_days(server)
    first = read(urls[0], 50).identity()
    assert read(urls[0], 50, columns=["id"]).identity() == first
    assert read(urls[1], 50).identity() != first
    changed = rows.slice(0, 50).to_pylist()
    changed[20]["price"] = -1.0
    table.put(pa.Table.from_pylist(changed, rows.schema), "ds=20240100,hh=07")
    assert read(urls[0], 50).identity() != first


def test_a_copy_for_another_process_has_no_account(server):
    add_clicks(server, 100)
    table = source(columns=["id"])
    assert [part.records for part in table.parts()] == [100]
    sent = pickle.dumps(table)
    assert odps_tunnel.KEY.encode() not in sent
    assert odps_tunnel.ID.encode() not in sent
    copy = pickle.loads(sent).read(Split(URL, 90, 10))
    assert [number for batch in copy for number in batch["id"].to_pylist()] == list(range(90, 100))


def test_an_answer_with_more_records_than_requested_is_an_error(server):
    rows = add_clicks(server, 100)
    server.fail(short=20)
    with pytest.raises(DataError, match="Expected 10 records from record 5 on, but the answer has more"):
        list(source(columns=["id"]).read(Split(URL, 5, 10)))
    server.fail(short=20)
    retried = RetryingSource(source(columns=["id"]), 30)
    assert pa.Table.from_batches(retried.read(Split(URL, 5, 10))).equals(rows.select(["id"]).slice(5, 10))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_range_is_that_of_the_table_whatever_goes_wrong(server, data):
    server.faults.clear()
    records = data.draw(st.integers(0, 1600))
    rows = add_clicks(server, records)
    first = data.draw(st.integers(0, records))
    count = data.draw(st.integers(0, records - first))
    names = data.draw(st.lists(st.sampled_from(rows.column_names), min_size=1, unique=True))
    for _ in range(data.draw(st.integers(0, 2))):
        fault = data.draw(
            st.one_of(
                st.builds(lambda cut: {"cut": cut}, st.integers(0, 40_000)),
                st.builds(lambda short: {"short": short}, st.integers(0, max(0, count - 1))),
                st.sampled_from([{"status": 503}, {"status": 429, "code": "FlowExceeded"}, {"flip": 30}]),
            )
        )
        server.fail(**fault)
    opened = RetryingSource(source(columns=names), 30)
    found = pa.Table.from_batches(opened.read(Split(URL, first, count)), opened.schema)
    assert found.equals(rows.select(names).slice(first, count))


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (
            "odps://shop/clicks",
            r"^odps://shop/clicks: Expected odps://project/tables/name, with \?partition=",
        ),
        ("odps://shop/tables/a b", "Expected odps://project"),
        ("odps://shop/tables/a/ds=1/hh=2", r"write odps://shop/tables/a\?partition=ds=1,hh=2\.$"),
        ("odps://shop/tables/a?partition=ds", "each partition column once, got partition=ds"),
        ("odps://shop/tables/a?partition=ds=1,ds=2", "each partition column once"),
        ("odps://shop/tables/a?partition=ds=1&partition=ds=2", "expected a list of URLs"),
        ("odps://shop/tables/a?endpoint=x", r"no option 'endpoint' .* there is: partition"),
        ([URL, URL], "named twice"),
        ([URL, "clicks.parquet"], "cannot be read together"),
    ],
)
def test_a_wrong_url_says_what_is_expected(url, error):
    with pytest.raises(DataError, match=error):
        read(url, 10)


def test_values_of_partitions_are_decoded_once():
    (table,) = parse_tables("odps://shop/tables/days?partition=ds=50%25+a,hh=%2541")
    assert table.partition == (("ds", "50%+a"), ("hh", "%41"))
    (plain,) = parse_tables("odps://shop/tables/days?partition=ds='20240101'/hh=07")
    assert plain.partition_spec == "ds=20240101,hh=07"


def test_options_of_files_are_refused(server):
    add_clicks(server, 10)
    with pytest.raises(ValueError, match="format is for files"):
        read(URL, 10, format="csv")
    with pytest.raises(ValueError, match="no option 'schema' for MaxCompute; there is: partitions"):
        read(URL, 10, options={"schema": {}})
