"""The bad network itself: what arrives is what was sent, and it is as bad as it was told to be."""

import contextlib
import random
import socket
import threading

import pytest
from delay import Network


@pytest.fixture
def echo():
    """A port that gives back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            try:
                while piece := connection.recv(2**16):
                    connection.sendall(piece)
            except OSError:
                pass

    def accept():
        try:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        except OSError:
            pass

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(network):
    host, _, port = network.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def receive(connection, size):
    got = bytearray()
    while len(got) < size and (piece := connection.recv(2**16)):
        got += piece
    return bytes(got)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_bytes_arrive_in_order(echo, seconds):
    sent = random.Random(0).randbytes(3_000_000)
    with Network(echo, seconds) as network, connect(network) as one:
        threading.Thread(target=one.sendall, args=(sent,)).start()
        assert receive(one, len(sent)) == sent


def test_a_stalled_network_holds_bytes_back_until_it_flows(echo):
    with Network(echo) as network, connect(network) as one:
        network.stall()
        with connect(network) as other:
            for each in (one, other):
                each.sendall(b"x")
                each.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    each.recv(1)
                each.settimeout(20)
            network.flow()
            assert (one.recv(1), other.recv(1)) == (b"x", b"x")


def test_a_cut_closes_all_connections_and_new_ones_are_made(echo):
    with Network(echo) as network, connect(network) as one, connect(network) as other:
        for each in (one, other):
            each.sendall(b"x")
            assert each.recv(1) == b"x"
        assert network.cut() == 2
        for each in (one, other):
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        with connect(network) as another:
            another.sendall(b"x")
            assert another.recv(1) == b"x"


def test_a_network_that_refuses_keeps_the_connections_it_has(echo):
    with Network(echo) as network, connect(network) as one:
        one.sendall(b"x")
        assert one.recv(1) == b"x"
        network.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(network)
        one.sendall(b"y")
        assert one.recv(1) == b"y"
        network.accept()
        connect(network).close()


def test_the_end_of_one_direction_is_passed_on(echo):
    with Network(echo, 0.01) as network, connect(network) as one:
        one.sendall(b"abc")
        one.shutdown(socket.SHUT_WR)
        assert receive(one, 100) == b"abc"
