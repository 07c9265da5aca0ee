"""Messages: what goes in comes out; what is none is refused, and harms nobody."""

import contextlib
import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from wire_helpers import Counting, wait_for

from karvan.wire import Client, RefusedError, Server
from karvan.wire.message import DTYPES, SCHEMA

BYTES = pa.record_batch([pa.array([1, 2, 3, 4], pa.uint8())], schema=SCHEMA)

heads = st.dictionaries(
    st.sampled_from(["a", "b", "ü"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    ),
)
arrays = st.lists(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def server():
    with Server(Counting(), most_bytes=10**6) as one:
        yield one


@pytest.fixture(scope="module")
def peer(server):
    with Client("counting", server.address) as one:
        yield one


@given(heads, arrays)
def test_heads_and_arrays_of_all_kinds_come_back_as_they_were(peer, head, given_arrays):
    answer = peer.call("echo", {"n": head}, given_arrays)
    assert answer.head["n"] == head
    assert len(answer.arrays) == len(given_arrays)
    for got, expected in zip(answer.arrays, given_arrays, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()


def test_arrays_may_lie_in_memory_as_they_like(peer):
    whole = np.arange(60, dtype=np.float32).reshape(6, 10)
    strided = [whole[::2, ::3], whole.T, np.asfortranarray(whole), whole[:0]]
    for got, expected in zip(peer.call("echo", {}, strided).arrays, strided, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("head", "given_arrays", "error"),
    [
        ({"n": object()}, [], TypeError),
        ({}, [np.array(["text"])], TypeError),
        ({}, [np.zeros(2, ">f4")], TypeError),
        ({}, [np.zeros(2, complex)], TypeError),
        ({}, [np.zeros(1)] * 1025, ValueError),
    ],
)
def test_a_call_that_cannot_be_sent_is_an_error_at_once_and_the_peer_goes_on(peer, head, given_arrays, error):
    with pytest.raises(error):
        peer.begin("echo", head, given_arrays)
    assert peer.call("ping").head["service"] == "counting"


@pytest.mark.parametrize(
    ("method", "head", "error", "said"),
    [
        ("fail", {"kind": "key"}, KeyError, "so"),
        ("fail", {"kind": "value"}, ValueError, "so"),
        ("fail", {"kind": "other"}, RuntimeError, "so"),
        ("unfit", {"what": "head"}, TypeError, "not JSON serializable"),
        ("unfit", {"what": "array"}, TypeError, "expects arrays of"),
        ("big", {"size": 2 * 10**6}, ValueError, "1000000 bytes"),
        ("nonsense", {}, RefusedError, "does not know the call 'nonsense'"),
    ],
)
def test_what_goes_wrong_at_the_service_is_told_and_the_peer_goes_on(peer, method, head, error, said):
    connections = peer.connections
    with pytest.raises(error, match=said) as told:
        peer.call(method, head)
    assert "counting: " in str(told.value)
    assert peer.call("ping").head["service"] == "counting"
    assert peer.connections == max(connections, 1)


@pytest.mark.parametrize(("kind", "has_stack"), [("own", False), ("other", True)])
def test_errors_that_say_all_in_their_text_are_logged_without_a_traceback(peer, caplog, kind, has_stack):
    with pytest.raises(RuntimeError):
        peer.call("fail", {"kind": kind})
    [record] = [each for each in caplog.records if each.name == "karvan.wire"]
    assert record.getMessage().startswith("counting failed at 'fail': ")
    assert bool(record.exc_info) == has_stack


class Raw:
    """A caller's two streams without any of its manners."""

    def __init__(self, address):
        self.client = flight.FlightClient(f"grpc://{address}")
        self.streams = []

    def open(self, first=None):
        writer, reader = self.client.do_exchange(flight.FlightDescriptor.for_command(b"karvan"))
        self.streams.append((writer, reader))
        if first is not None:
            writer.begin(SCHEMA)
            writer.write_metadata(json.dumps(first).encode())
        return writer, reader

    def meet(self):
        """The streams of somebody who has said hello: where calls go, where answers come from."""
        _, answers = self.open({"method": "hello", "session": "s", "connection": "c", "arrays": []})
        welcome = json.loads(answers.read_chunk().app_metadata.to_pybytes())
        assert "incarnation" in welcome
        calls, _ = self.open({"method": "calls", "connection": "c", "arrays": []})
        return calls, answers

    def close(self):
        for _, reader in self.streams:
            reader.cancel()
        for writer, _ in self.streams:
            with contextlib.suppress(pa.ArrowException):
                writer.close()
        self.client.close()


CALL = {"method": "echo", "number": 1, "received": 0}


def call(arrays, **more):
    return json.dumps({**CALL, "arrays": arrays, **more}).encode()


HEADS = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "no object": b"[1]",
    "deep": b"[" * 100_000,
    "no arrays": json.dumps(CALL).encode(),
    "arrays of another type": call("many"),
    "array of another type": call([["float32", "3"]]),
    "unknown dtype": call([["object", [1]]]),
    "dtype of another type": call([[7, [1]]]),
    "negative size": call([["uint8", [-4]]]),
    "fraction": call([["uint8", [0.5]]]),
    "truth": call([["uint8", [True]]]),
    "10 GB": call([["uint8", [10**10]]]),
    "10 GB in all": call([["uint8", [900_000]]] * 1000),
    "endless": call([["uint8", [0, 10**30]]]),
    "overflow": call([["uint8", [2**40, 2**40, 0]]]),
    "too many dimensions": call([["uint8", [1] * 100]]),
    "too many arrays": call([["uint8", [0]]] * 2000),
    "no number": call([], number=None),
    "number of another type": call([], number="1"),
    "a number from the future": call([], number=7),
    "a huge number": call([], number=10**100),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_malformed_head_is_refused_told_and_logged_while_others_are_served(server, peer, caplog, name):
    _refused(server, peer, caplog, lambda calls: calls.write_metadata(HEADS[name]))


def _batch(values, schema):
    return pa.record_batch([pa.array(values, schema[0].type)], schema=schema)


CHUNKS = {
    "data without head": lambda calls: calls.write_batch(BYTES),
    "too few bytes": lambda calls: calls.write_with_metadata(BYTES, call([["uint8", [5]]])),
    "too many bytes": lambda calls: calls.write_with_metadata(BYTES, call([["uint8", [3]]])),
    "data that was not announced": lambda calls: calls.write_with_metadata(BYTES, call([])),
    "an announced array that is missing": lambda calls: [calls.write_metadata(call([["uint8", [4]]]))],
    "the next message instead of the second array": lambda calls: [
        calls.write_with_metadata(BYTES, call([["uint8", [4]], ["uint8", [4]]])),
        calls.write_with_metadata(BYTES, call([["uint8", [4]]])),
    ],
}


@pytest.mark.parametrize("name", CHUNKS)
def test_wrong_chunks_are_refused_told_and_logged_while_others_are_served(server, peer, caplog, name):
    _refused(server, peer, caplog, CHUNKS[name])


def _refused(server, peer, caplog, write):
    caplog.set_level(logging.INFO, "karvan.wire")
    _forget_refusals(server)
    raw = Raw(server.address)
    calls, answers = raw.meet()
    write(calls)
    told = json.loads(answers.read_chunk().app_metadata.to_pybytes())
    assert told["fatal"]
    assert "expected" in told["text"]
    with pytest.raises(StopIteration):
        answers.read_chunk()
    raw.close()
    assert peer.call("echo", {"n": 1}).head["n"] == 1
    wait_for(lambda: told["text"] in caplog.text)


def _forget_refusals(server):
    """The next refusal is logged at once, although others were before."""
    server.admission._refusals = 0


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([pa.field("bytes", pa.uint8())]),
        pa.schema([pa.field("bytes", pa.int64(), nullable=False)]),
        pa.schema([pa.field("other", pa.uint8(), nullable=False)]),
        pa.schema([pa.field("bytes", pa.string(), nullable=False)]),
    ],
)
def test_another_schema_is_refused(server, peer, schema):
    raw = Raw(server.address)
    _, answers = raw.open({"method": "hello", "session": "s", "connection": "c", "arrays": []})
    answers.read_chunk()
    calls, _ = raw.open()
    calls.begin(schema)
    calls.write_metadata(json.dumps({"method": "calls", "connection": "c", "arrays": []}).encode())
    values = ["abcd"] if schema[0].type == pa.string() else [1, 2, 3, 4]
    calls.write_with_metadata(_batch(values, schema), call([["uint8", [4]]]))
    told = json.loads(answers.read_chunk().app_metadata.to_pybytes())
    assert "expected one column of bytes" in told["text"]
    raw.close()
    peer.call("ping")


@pytest.mark.parametrize(
    "first",
    [
        {"method": "echo"},
        {"method": "hello"},
        {"method": "hello", "session": 3, "connection": "c"},
        {"method": "hello", "session": "", "connection": "c"},
        {"method": "hello", "session": "s" * 1000, "connection": "c"},
        {"method": "hello", "session": "s"},
    ],
)
def test_who_does_not_say_hello_is_refused(server, peer, first):
    raw = Raw(server.address)
    _, answers = raw.open({**first, "arrays": []})
    told = json.loads(answers.read_chunk().app_metadata.to_pybytes())
    assert told["fatal"]
    assert "expected hello" in told["text"]
    raw.close()
    peer.call("ping")


def test_calls_without_hello_and_a_second_stream_of_calls_are_refused(server, peer, caplog):
    raw = Raw(server.address)
    refused = "expected calls of a caller that has said hello"
    for name in ("nobody", "c"):
        _forget_refusals(server)
        before = caplog.text.count(refused)
        raw.open({"method": "calls", "connection": name, "arrays": []})
        wait_for(lambda before=before: caplog.text.count(refused) == before + 1)
        if name == "nobody":
            raw.meet()
    raw.close()
    peer.call("ping")


def test_other_methods_of_flight_are_not_served(server, peer):
    client = flight.FlightClient(f"grpc://{server.address}")
    for ask in (
        lambda: list(client.list_flights()),
        lambda: client.do_get(flight.Ticket(b"x")).read_all(),
        lambda: list(client.do_action(b"x")),
    ):
        with pytest.raises(pa.ArrowException):
            ask()
    client.close()
    peer.call("ping")
