"""Callers that take much and use little: bounded, ended, and no obstacle for others."""

import contextlib
import logging
import os
import sys
import threading
import time
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram
from free_ports import free_port
from support_paths import support_path
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
    process = ForkedProgram(
        [sys.executable, IDLE, address, str(count), mode],
        env={**os.environ, "KARVAN_TOKEN": token},
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def held(process):
    assert process.stdout.readline() == "held\n"


@pytest.mark.slow
def test_many_idle_callers_give_way_to_one_with_something_to_do(guarded):
    with idle_streams(guarded.address, 2200, "idle") as process:  # more than a service may have
        held(process)
        with Client("counting", guarded.address, Security(token=TOKEN), deadline=LIMIT) as peer:
            for _ in range(10):
                assert peer.call("ping").head["service"] == "counting"
        wait_for(lambda: guarded.threads() < 4300, LIMIT)  # two for each of 2,048 connections


def test_the_caller_that_was_idle_for_longest_gives_way_and_loses_nothing():
    service = Counting()
    with Server(service, limits=Limits(connections=3, least_idle=0.0)) as server:
        peers = [Client(f"peer {number}", server.address, deadline=LIMIT) for number in range(6)]
        for turn in range(3):
            for peer in peers:
                assert peer.call("echo", {"n": turn}).head["n"] == turn
            assert len(server.admission._open) <= 3
        for peer in peers:
            assert service.done[peer._session] == [0, 1, 2]
            assert peer.connections == 3
            peer.close()


def test_a_caller_that_finds_the_service_busy_tries_again_until_its_deadline():
    service = Counting()
    with Server(service, limits=Limits(connections=2)) as server:
        users = [Client(f"user {number}", server.address) for number in range(2)]
        replies = [user.begin("gate") for user in users]
        wait_for(lambda: len(server.admission._open) == 2)
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


@pytest.mark.parametrize("mode", ["silent", "begin"])
def test_streams_that_say_nothing_are_few_and_give_way_when_they_end(mode):
    security = Security(token=TOKEN)
    with (
        Server(Counting(), security=security, limits=Limits(streams=12)) as server,
        Client("counting", server.address, security) as early,
    ):
        early.call("ping")
        with idle_streams(server.address, 30, mode) as process:
            held(process)
            wait_for(lambda: server.admission._streams == 12)
            with (
                Client("counting", server.address, security, deadline=0.5) as late,
                pytest.raises(WireError, match="expected up to 12 streams, got one more"),
            ):
                late.call("ping")
            assert early.call("ping").head["service"] == "counting"
        with Client("counting", server.address, security, deadline=LIMIT) as late:
            assert late.call("ping").head["service"] == "counting"
        assert early.connections == 1


def test_a_caller_that_says_hello_alone_is_ended_and_an_idle_one_of_ours_is_not():
    limits = Limits(hello_within=0.5, first_call_within=0.5)
    with Server(Counting(), limits=limits) as server, Client("counting", server.address) as peer:
        peer.call("ping")
        with idle_streams(server.address, 3, "hello") as process:
            held(process)
            wait_for(lambda: len(server.connections) == 1, LIMIT)
        with idle_streams(server.address, 3, "idle") as process:
            held(process)
            wait_for(lambda: len(server.connections) == 1, LIMIT)
        peer.call("ping")
        assert peer.connections == 1


def test_a_slow_caller_that_was_ended_as_idle_connects_again():
    pauses = [2.0]  # seconds until the first call on a connection; more than the second service grants

    def restore(_life):
        time.sleep(pauses.pop())
        return [("echo", {"n": 1})]

    port = free_port()
    with Server(Counting(), port=port) as server:
        peer = Client("counting", server.address, on_restart=restore, patience=2.0)
        assert peer.call("echo", {"n": 0}).head["n"] == 0
    with Server(Counting(), port=port, limits=Limits(first_call_within=0.5)) as server, peer:
        assert peer.call("echo", {"n": 2}).head["n"] == 2
        assert peer.connections == 3  # to the first service, the one that was ended, and the next


def test_wrong_tokens_are_logged_in_few_lines(caplog):
    wrong = "another-token-that-is-wrong"
    with Server(Counting(), security=Security(token=TOKEN)) as server:
        with caplog.at_level(logging.WARNING, "karvan.wire"):
            for _ in range(30):
                with (
                    Client("counting", server.address, Security(token=wrong)) as peer,
                    pytest.raises(RefusedError),
                ):
                    peer.call("ping")
            assert caplog.text.count("counting refused a caller: expected the job's token") == 20
            server.admission._minute -= 60
            server.admission.refused("10.0.0.1", "expected hello")
        assert "counting refused 10 more callers" in caplog.text
        assert "counting refused 10.0.0.1: expected hello" in caplog.text
        assert TOKEN not in caplog.text
        assert wrong not in caplog.text
