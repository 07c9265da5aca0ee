"""Sessions are bounded; those that were dropped lock nobody out, and nothing is done twice for the room."""

import json

import pyarrow.flight as flight
import pytest
from delay import Network
from wire_helpers import Counting, wait_for

from karvan.wire import Client, Limits, Server, WireError
from karvan.wire.message import SCHEMA

LIMIT = 60  # seconds


def drop_sessions(address, count, calls=0):
    """Callers that say hello, make so many calls, and are gone without a word."""

    def stream(client, first):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"karvan"))
        writer.begin(SCHEMA)
        writer.write_metadata(json.dumps({**first, "arrays": []}).encode())
        return writer, reader

    for number in range(count):
        client = flight.FlightClient(f"grpc://{address}")
        name = f"dropped {number} {calls}"
        hello, answers = stream(
            client, {"method": "hello", "session": name, "connection": name, "deadline": 5}
        )
        answers.read_chunk()
        if calls:
            writer, reader = stream(client, {"method": "calls", "connection": name})
            for call in range(calls):
                head = {"method": "ping", "number": call + 1, "received": call, "arrays": []}
                writer.write_metadata(json.dumps(head).encode())
                answers.read_chunk()
            reader.cancel()
        answers.cancel()
        client.close()
        del hello


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1])
def test_thousands_of_dropped_sessions_lock_nobody_out(calls):
    with Server(Counting()) as server:
        drop_sessions(server.address, 4200, calls)
        with Client("counting", server.address, deadline=LIMIT) as peer:
            assert peer.call("ping").head["service"] == "counting"


def test_sessions_without_a_call_are_forgotten_with_their_connection():
    with Server(Counting()) as server:
        drop_sessions(server.address, 30)
        wait_for(lambda: not server.sessions._known, LIMIT)


def test_sessions_beyond_their_deadline_make_room():
    with Server(Counting(), limits=Limits(sessions=10)) as server:
        drop_sessions(server.address, 10, calls=1)
        wait_for(lambda: not server.connections, LIMIT)
        assert len(server.sessions._known) == 10
        with Client("counting", server.address, deadline=LIMIT) as peer:
            reply = peer.begin("ping")
            wait_for(lambda: not reply.done and peer._thread.is_alive())
            for session in list(server.sessions._known.values()):
                session.used -= 60  # as if a minute had passed, which is more than their deadline
            assert reply.wait().head["service"] == "counting"


def test_a_caller_that_may_come_back_keeps_its_session_whatever_the_pressure():
    service = Counting()
    with (
        Server(service, limits=Limits(sessions=10)) as server,
        Network(server.address) as network,
        Client("counting", network.address, deadline=LIMIT) as peer,
    ):
        peer.call("echo", {"n": 0})
        network.stall()
        reply = peer.begin("echo", {"n": 1})
        wait_for(lambda: peer._numbered == 2)
        network.flow()
        wait_for(lambda: service.done[peer._session] == [0, 1])
        network.stall()  # whether or not the answer has passed, the next one will not
        last = peer.begin("echo", {"n": 2})
        network.cut()
        wait_for(lambda: not server.connections, LIMIT)
        drop_sessions(server.address, 9, calls=1)
        with (
            Client("late", server.address, deadline=2.0) as late,
            pytest.raises(WireError, match="late is busy: expected up to 10 sessions"),
        ):
            late.call("ping")
        assert peer._session in server.sessions._known
        network.flow()
        reply.wait()
        assert last.wait().head["n"] == 2
        assert service.done[peer._session] == [0, 1, 2]


def test_a_call_with_a_longer_deadline_keeps_its_session_for_longer():
    with (
        Server(Counting(), limits=Limits(sessions=10)) as server,
        Client("counting", server.address, deadline=20) as peer,
    ):
        peer.call("ping")
        assert server.sessions._known[peer._session].deadline == 20
        peer.call("ping", deadline=500)
        assert server.sessions._known[peer._session].deadline == 500
        peer.call("ping", deadline=10**6)
        assert server.sessions._known[peer._session].deadline == 3600


def test_a_session_whose_first_call_is_being_done_is_not_forgotten():
    service = Counting()
    with (
        Server(service) as server,
        Network(server.address) as network,
        Client("counting", network.address, deadline=LIMIT) as peer,
    ):
        reply = peer.begin("gate")
        wait_for(service.entered.is_set)
        network.stall()
        network.cut()
        wait_for(lambda: not server.connections, LIMIT)
        assert peer._session in server.sessions._known
        network.flow()
        service.gate.set()
        reply.wait()
