"""What strangers send to a port: refused, harmless, and not kept."""

import contextlib
import os
import random
import socket
import struct

import numpy as np
import pytest
from wire_helpers import Process

from karvan.wire import Client

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST_GROWTH = 64 * 2**20


@pytest.fixture(scope="module")
def process():
    with Process() as one:
        yield one


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(te=b"trailers"):
    def literal(name, value):
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    return b"".join(
        literal(*pair)
        for pair in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/arrow.flight.protocol.FlightService/DoExchange"),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", te),
        )
    )


def stream(body):
    """A gRPC call of DoExchange, as far as `body` goes."""
    return PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, headers()) + frame(0, 0, 1, body)


SENT = {
    "nothing": b"",
    "a byte": b"\0",
    "noise": random.Random(0).randbytes(200_000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a preface alone": PREFACE,
    "a preface and noise": PREFACE + random.Random(1).randbytes(100_000),
    "a frame of 16 MB": PREFACE + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(100_000),
    "a call that stops": stream(b""),
    "a message of 4 GB": stream(b"\0\xff\xff\xff\xff" + bytes(10_000)),
    "a message that is no message": stream(b"\0\0\0\x10\0" + random.Random(2).randbytes(4096)),
    "a compressed message": stream(b"\1\0\0\x10\0" + bytes(4096)),
}


@pytest.mark.parametrize("name", SENT)
def test_strangers_harm_nobody(process, name):
    with Client("counting", process.address) as peer:
        peer.call("ping")
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", process.port)) as one,
        ):
            one.sendall(SENT[name])
            one.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                one.recv(1000)
            peer.call("ping", deadline=60)
        peer.call("ping", deadline=60)
        assert peer.connections == 1


def test_an_invalid_header_leaves_no_line_in_the_log():
    with Process() as noisy, socket.create_connection(("127.0.0.1", noisy.port)) as one:
        one.sendall(PREFACE + frame(4, 0, 0, b""))
        for number in range(200):
            one.sendall(frame(1, 5, 2 * number + 1, headers(b"nonsense")))
        answered = b""
        while answered.count(frame(1, 5, 399, b"")[4:]) < 1:  # the trailers of the last one
            answered += one.recv(65536)
        assert noisy.kill() == ""


def test_many_strangers_leave_no_memory_taken(process):
    with Client("counting", process.address) as peer:
        peer.call("ping")
        before = process.memory()
        kept = []
        for number in range(200):
            one = socket.create_connection(("127.0.0.1", process.port))
            with contextlib.suppress(ConnectionError):
                one.sendall(list(SENT.values())[number % len(SENT)])
            kept.append(one)  # half-open: neither used nor closed
        peer.call("ping", deadline=60)
        assert process.memory() - before < MOST_GROWTH
        for one in kept:
            one.close()
        peer.call("ping", deadline=60)
        assert process.memory() - before < MOST_GROWTH


def test_a_caller_that_comes_and_goes_leaves_no_memory_taken(process):
    def come():
        with Client("counting", process.address) as peer:
            assert peer.call("echo", {}, [np.zeros(250_000)]).arrays[0].nbytes == 2_000_000

    for _ in range(5):
        come()
    before = process.memory()
    for _ in range(50):
        come()
    assert process.memory() - before < MOST_GROWTH
    assert len(os.listdir(f"/proc/{process._process.pid}/task")) < 60
