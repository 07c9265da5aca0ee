"""Callers that take much and use little: bounded, ended, and no obstacle for others."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pyarrow.flight as flight
import pytest
from support_paths import support_path
from test_raw_sockets import stream
from wire_helpers import Counting, Process, wait_for

from karvan.wire import Client, Limits, RefusedError, Security, Server, WireError

TOKEN = "a-token-of-sufficient-length"
LIMIT = 60  # seconds
IDLE = support_path("wire/idle_streams.py")


@pytest.fixture
def guarded(tmp_path):
    """A service with a token in a process of its own."""
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)
    with Process(environment={"KARVAN_TOKEN_FILE": str(tmp_path / "token")}) as one:
        yield one


@contextlib.contextmanager
def idle_streams(address, count, mode, token=TOKEN):
    process = subprocess.Popen(
        [sys.executable, IDLE, address, str(count), mode],
        env={**os.environ, "KARVAN_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def held(process):
    assert process.stdout.readline() == "held\n"


HELD = [
    pytest.param("begin", 150),
    *(pytest.param(mode, 3000, marks=pytest.mark.slow) for mode in ("silent", "begin", "hello")),
]


@pytest.mark.parametrize(("mode", "count"), HELD)
def test_streams_that_say_nothing_end_and_slow_nobody(guarded, mode, count):
    security = Security(token=TOKEN)
    with (
        Client("counting", guarded.address, security) as early,
        idle_streams(guarded.address, count, mode) as p,
    ):
        early.call("ping", deadline=LIMIT)
        held(p)
        with Client("counting", guarded.address, security, deadline=LIMIT) as late:
            late.call("ping")
            early.call("ping", deadline=LIMIT)
            wait_for(lambda: guarded.threads() < 100, LIMIT)
            assert late.call("ping").head["service"] == "counting"
        assert early.call("ping").head["service"] == "counting"
        assert early.connections == 1


@pytest.mark.slow
def test_many_idle_callers_give_way_to_one_with_something_to_do(guarded):
    with idle_streams(guarded.address, 1500, "idle") as process:  # more than one host may have
        held(process)
        with Client("counting", guarded.address, Security(token=TOKEN), deadline=LIMIT) as peer:
            for _ in range(10):
                assert peer.call("ping").head["service"] == "counting"
        wait_for(lambda: guarded.threads() < 2200, LIMIT)  # two for each of 1,024 connections


def test_streams_that_send_their_headers_alone_end_as_well():
    with Server(Counting(), limits=Limits(hello_within=0.5)) as server:
        port = int(server.address.rpartition(":")[2])
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        for one in opened:
            one.sendall(stream(b""))
            one.settimeout(LIMIT)
        for one in opened:
            with contextlib.suppress(ConnectionError):  # a TimeoutError is that it was not ended
                while one.recv(10_000):
                    pass
            one.close()
        with Client("counting", server.address) as peer:
            assert peer.call("ping").head["service"] == "counting"


def test_an_idle_caller_of_ours_stays_connected():
    limits = Limits(hello_within=1.5, hello_within_pressed=1.5, first_call_within=1.5, least_idle=1.5)
    with Server(Counting(), limits=limits) as server, Client("counting", server.address) as peer:
        peer.call("ping")
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as stranger:
            stranger.settimeout(LIMIT)
            assert stranger.recv(100_000)  # the server's greeting
            with contextlib.suppress(ConnectionError):
                while stranger.recv(100_000):  # until it is ended: others of its age are looked at, too
                    pass
        peer.call("ping")
        assert peer.connections == 1


def test_the_caller_that_was_idle_for_longest_gives_way_and_loses_nothing():
    service = Counting()
    with Server(service, limits=Limits(connections_per_host=3, least_idle=0.0)) as server:
        peers = [Client(f"peer {number}", server.address, deadline=LIMIT) for number in range(6)]
        for turn in range(3):
            for peer in peers:
                assert peer.call("echo", {"n": turn}).head["n"] == turn
            assert len(server.guard._open) <= 3
        for peer in peers:
            assert service.done[peer._session] == [0, 1, 2]
            assert peer.connections == 3
            peer.close()


@pytest.mark.parametrize("limits", [Limits(connections_per_host=2), Limits(connections=2)])
def test_a_caller_that_finds_the_service_busy_tries_again_until_its_deadline(limits):
    service = Counting()
    with Server(service, limits=limits) as server:
        users = [Client(f"user {number}", server.address) for number in range(2)]
        replies = [user.begin("gate") for user in users]
        wait_for(lambda: len(server.guard._open) == 2)
        with (
            Client("late", server.address, deadline=2.0) as late,
            pytest.raises(
                WireError, match=r"late expected .* got: late is busy: expected up to 2 connections"
            ),
        ):
            late.call("ping")
        with Client("patient", server.address, deadline=LIMIT) as patient:
            reply = patient.begin("echo", {"n": 1})
            assert not reply.done
            service.gate.set()
            for each in replies:
                each.wait()
            for user in users:
                user.close()
            assert reply.wait().head["n"] == 1


def test_a_connection_has_few_streams(caplog):
    with Server(Counting(), limits=Limits(streams_per_connection=3)) as server:
        client = flight.FlightClient(f"grpc://{server.address}")
        opened = [client.do_exchange(flight.FlightDescriptor.for_command(b"x")) for _ in range(3)]
        wait_for(lambda: server.guard._streams.total() == 3)
        opened.append(client.do_exchange(flight.FlightDescriptor.for_command(b"x")))
        wait_for(lambda: "expected up to 3 streams of a connection" in caplog.text)
        with Client("counting", server.address) as peer:
            assert peer.call("ping").head["service"] == "counting"
        for _, reader in opened:
            reader.cancel()
        client.close()


def test_a_process_without_descriptors_ends_strangers_first():
    with Process(descriptors=96) as process:
        strangers = []
        for _ in range(200):
            strangers.append(socket.create_connection(("127.0.0.1", process.port)))
        with Client("counting", process.address, deadline=LIMIT) as peer:
            assert peer.call("ping").head["service"] == "counting"
        for each in strangers:
            each.close()


def test_machines_that_vanish_are_noticed_by_keep_alive():
    with Server(Counting()) as server, Client("counting", server.address) as peer:
        peer.call("ping")
        port = int(server.address.rpartition(":")[2])

        def kept_alive():
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    one = socket.socket(fileno=os.dup(int(name)))
                    with one:
                        if one.getsockname()[1:2] == (port,) and one.getpeername():  # others may be no TCP
                            return one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            return 0

        wait_for(kept_alive, LIMIT)
        assert peer.call("ping").head["service"] == "counting"


def test_wrong_tokens_are_logged_with_the_address_and_not_each_time(caplog):
    wrong = "another-token-that-is-wrong"
    with Server(Counting(), security=Security(token=TOKEN)) as server:
        with caplog.at_level(logging.WARNING, "karvan.wire"):
            for _ in range(20):
                with (
                    Client("counting", server.address, Security(token=wrong)) as peer,
                    pytest.raises(RefusedError),
                ):
                    peer.call("ping")
        assert caplog.text.count("expected the job's token") == 1
        [line] = [each.getMessage() for each in caplog.records if "token" in each.getMessage()]
        assert line.startswith("counting refused 127.0.0.1:")
        caplog.clear()
        server.guard.refusals.flush(all_counts=True)
        assert "counting refused 127.0.0.1 19 more times" in caplog.text
        assert TOKEN not in caplog.text
        assert wrong not in caplog.text


def test_refusals_of_many_hosts_and_reasons_stay_few_lines(caplog):
    with Server(Counting()) as server:
        log = server.guard.refusals
        with caplog.at_level(logging.WARNING, "karvan.wire"):
            for number in range(5000):
                log.add(f"10.0.{number // 250}.{number % 250}", "expected hello")
            for number in range(5000):
                log.add("10.0.0.1", f"expected {number}")
        assert len(caplog.records) < 1100
        log.flush(all_counts=True)
        assert "other hosts 3999 more times" in caplog.text


def test_many_peers_of_one_host_at_once():
    """As many trainers on one machine have; threads of a server are used again."""
    with Process() as process:
        peers = [Client(f"peer {number}", process.address, deadline=LIMIT) for number in range(128)]
        started = time.monotonic()
        replies = [peer.begin("echo", {"n": number}) for number, peer in enumerate(peers)]
        assert [reply.wait().head["n"] for reply in replies] == list(range(128))
        assert time.monotonic() - started < LIMIT
        closing = [threading.Thread(target=peer.close) for peer in peers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
