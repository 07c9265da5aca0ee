"""MaxCompute that is away, slow, damaged, changed, or closed to the account."""

import logging
import sys
import threading
import time
from importlib.util import find_spec

import odps_tunnel
import pytest

from karvan.data import Split, read
from karvan.data.errors import DataError
from karvan.data.maxcompute import MaxComputeSource, parse_tables

pytestmark = pytest.mark.skipif(find_spec("odps") is None, reason="needs pyodps")  # whose import is slow

URL = "odps://shop/tables/clicks"


@pytest.fixture
def server(monkeypatch):
    with odps_tunnel.serving() as service:
        types, rows = odps_tunnel.clicks(2000)
        service.add("shop", "clicks", types, rows)
        for name, value in service.environment().items():
            monkeypatch.setenv(name, value)
        yield service


def ids(batches):
    return [number for batch in batches for number in batch["id"].tolist()]


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"status": 429, "code": "FlowExceeded"}, {"cut": 9000}, {"status": 308}]
)
def test_an_outage_is_waited_for_and_no_record_is_lost_or_repeated(server, fault, caplog):
    server.fail(2, **fault)
    with caplog.at_level(logging.WARNING):
        assert ids(read(URL, 100, columns=["id", "name"], split_records=2000)) == list(range(2000))
    assert "Retrying for up to 60 seconds" in caplog.text
    assert "Data can be read again" in caplog.text


def test_reading_continues_after_the_records_that_arrived(server):
    server.fail(cut=200_000)
    assert ids(read(URL, 100, split_records=2000)) == list(range(2000))
    (first, second) = server.ranges()
    assert first[:2] == (0, 2000)
    assert 0 < second[0] < 2000
    assert second[0] + second[1] == 2000


def test_a_server_that_comes_back_is_read_on(server, caplog):
    loader = read(URL, 100, columns=["id"])
    server.stop()
    with pytest.raises(
        DataError, match=r"^odps://shop/tables/clicks: MaxCompute cannot be reached"
    ) as caught:
        read(URL, 100, retry_seconds=0)
    assert caught.value.temporary
    back = threading.Timer(0.3, server.start)
    back.start()
    with caplog.at_level(logging.WARNING):
        assert ids(loader) == list(range(2000))
    back.join()
    assert "MaxCompute cannot be reached" in caplog.text
    assert "Data can be read again" in caplog.text


def test_pyodps_does_not_wait_by_itself(server):
    server.fail(1, match="downloads", status=503)
    began = time.monotonic()
    with pytest.raises(DataError, match="MaxCompute answered InternalServerError") as caught:
        read(URL, 100, retry_seconds=0)
    assert caught.value.temporary
    assert time.monotonic() - began < 0.9  # its first pause is a second


def test_opening_waits_for_an_outage(server):
    server.fail(1, match="service", status=502)
    server.fail(1, match="downloads", status=429)
    assert ids(read(URL, 1000, columns=["id"])) == list(range(2000))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"flip": 500}, "The answer of MaxCompute is damaged: Checksum invalid"),
        ({"short": 1999}, "Expected 2000 records from record 0 on, but the answer has 1999"),
    ],
)
def test_a_damaged_answer_is_asked_for_again_and_then_an_error(server, fault, error):
    server.fail(2, **fault)
    assert ids(read(URL, 100, columns=["id"], split_records=2000)) == list(range(2000))
    if "short" in fault:  # the records that arrived are not asked for again, so all of them have to miss
        fault["short"], error = 0, error.replace("1999", "0")
    server.fail(3, **fault)
    with pytest.raises(DataError, match=error) as caught:
        ids(read(URL, 100, columns=["id"], split_records=2000))
    assert not caught.value.temporary


def test_a_session_that_ended_is_opened_again(server):
    source = MaxComputeSource(parse_tables(URL), ["id"])
    assert source.parts()[0].records == 2000
    server.sessions["session-0"] = (None, None)
    found = [number for batch in source.read(Split(URL, 5, 10)) for number in batch["id"].to_pylist()]
    assert found == list(range(5, 15))
    assert len(server.sessions) == 2
    server.fail(2, status=404, code="NoSuchDownload")
    with pytest.raises(DataError, match="NoSuchDownload"):
        list(source.read(Split(URL, 5, 10)))


def test_a_table_that_changes_is_an_error(server):
    source = MaxComputeSource(parse_tables(URL), ["id"])
    assert source.parts()[0].records == 2000
    table = server.tables["shop", "clicks"]
    table.put(table.records[None].slice(0, 1000))
    with pytest.raises(DataError, match="The table was changed while it was read: start again") as caught:
        list(source.read(Split(URL, 0, 10)))
    assert not caught.value.temporary
    server.sessions["session-0"] = (None, None)
    with pytest.raises(DataError, match="it had 2000 records, and has 1000 now"):
        list(source.read(Split(URL, 0, 10)))


def test_an_account_is_never_shown(server, monkeypatch, caplog):
    monkeypatch.setenv("ODPS_ACCESS_KEY", "a-wrong-secret")
    with caplog.at_level(logging.INFO), pytest.raises(DataError, match="answered InvalidSignature") as caught:
        read(URL, 100)
    assert not caught.value.temporary
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "for account ***" in str(caught.value)
    for secret in (odps_tunnel.ID, "a-wrong-secret"):
        assert secret not in str(caught.value)
        assert secret not in caplog.text
    with pytest.raises(DataError, match="A URL of MaxCompute has no account") as caught:
        read("odps://me:my-secret@shop/tables/clicks", 100)
    assert "my-secret" not in str(caught.value)


def test_accounts_come_from_the_variables_that_pyodps_users_set(server, monkeypatch):
    monkeypatch.delenv("ODPS_ACCESS_ID")
    with pytest.raises(DataError, match="set ODPS_ACCESS_ID and ODPS_ACCESS_KEY in the environment"):
        read(URL, 100)
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", odps_tunnel.ID)
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", odps_tunnel.KEY)
    monkeypatch.setenv("ODPS_TUNNEL_ENDPOINT", f"http://127.0.0.1:{server.port}")
    server.requests.clear()
    assert len(ids(read(URL, 1000, columns=["id"]))) == 2000
    assert not [path for _, path, _ in server.requests if path.startswith("/api")]
    monkeypatch.delenv("ODPS_ENDPOINT")
    with pytest.raises(DataError, match="set ODPS_ENDPOINT in the environment"):
        read(URL, 100)


def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "odps", None)
    with pytest.raises(ImportError, match=r"^Reading MaxCompute needs pyodps: pip install karvan\[odps\]$"):
        read(URL, 100)
