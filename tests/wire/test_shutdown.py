"""How peers, servers and their programs end: without waiting, without noise."""

import subprocess
import sys
import threading

import pytest
from delay import Network
from free_ports import free_port
from wire_helpers import Counting, Process, wait_for

from karvan.wire import Client, ListenError, Message, RefusedError, Server, Service, WireError
from karvan.wire.schema import Head, Struct


@pytest.fixture
def service():
    one = Counting()
    yield one
    one.gate.set()


def test_closing_a_peer_fails_calls_that_have_no_answer(service):
    with Server(service) as server:
        peer = Client("counting", server.address)
        replies = [peer.begin("gate") for _ in range(3)]
        service.entered.wait()
        peer.close()
        peer.close()
        for reply in replies:
            with pytest.raises(WireError, match="connection to counting was closed before it had answered"):
                reply.wait()
        with pytest.raises(WireError, match="connection to counting was closed"):
            peer.begin("ping")
        service.gate.set()


def test_a_closed_peer_leaves_no_session(service):
    with Server(service) as server:
        for _ in range(20):
            with Client("counting", server.address) as peer:
                peer.call("ping")
        assert server.sessions._known == {}
        wait_for(lambda: not server.connections)


def test_a_server_closes_with_calls_in_flight_and_callers_wait_for_the_next_one(service):
    port = free_port()
    server = Server(service, port=port)
    peer = Client("counting", server.address, forgetful=True)
    replies = [peer.begin("gate"), *(peer.begin("echo", {"n": number}) for number in range(3))]
    assert service.entered.wait(60)
    server.close(0.1)
    server.close()
    assert not any(reply.done for reply in replies)
    service.gate.set()
    with Server(service, port=port):
        assert [reply.wait().head.get("n") for reply in replies] == [None, 0, 1, 2]
    peer.close()


def test_a_server_closes_at_once_when_callers_are_idle(service):
    server = Server(service)
    peers = [Client("counting", server.address) for _ in range(3)]
    for peer in peers:
        peer.call("ping")
    server.close(30)
    assert server.connections == {}
    for peer in peers:
        peer.close()


def test_a_port_that_is_taken_is_an_error_that_names_it(service):
    with Server(service) as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ListenError, match=f"counting expected to listen at 127.0.0.1:{port}"):
            Server(service, port=port)


def test_what_is_done_after_a_call_may_fail_or_close_the_peer(service, caplog):
    with Server(service) as server:
        peer = Client("counting", server.address)
        peer.begin("ping", then=lambda reply: 1 // 0).wait()
        assert peer.call("echo", {"n": 7}).head["n"] == 7
        assert peer.connections == 1
        assert "ZeroDivisionError" in caplog.text
        peer.begin("ping", then=lambda reply: peer.close()).wait()
        peer.close()


def test_what_is_done_after_a_call_is_told_of_failures():
    told = threading.Event()
    peer = Client("nobody", "127.0.0.1:1", deadline=0.1)
    reply = peer.begin("ping", then=lambda reply: told.set() if reply.error else None)
    assert told.wait(60)
    assert reply.done
    peer.close()


class Who(Head):
    who: str


class Choosy(Service):
    name = "choosy"
    hello = Struct(Who)

    def welcome(self, caller):
        if caller.hello.who == "refused":
            raise RefusedError("not you")
        if caller.hello.who == "broken":
            raise ZeroDivisionError("oh")
        return {"told": caller.hello.who}

    def answer(self, call, caller):
        return Message({"who": caller.hello.who})


def test_a_service_chooses_its_callers_and_tells_them_something():
    with Server(Choosy()) as server:
        with Client("choosy", server.address, hello={"who": "a"}) as peer:
            assert peer.call("x").head["who"] == "a"
            assert peer.welcome["told"] == "a"
        for who, said in (("refused", "not you"), ("broken", "oh")):
            with Client("choosy", server.address, hello={"who": who}) as peer:
                with pytest.raises(RefusedError, match=f"choosy refused: {said}"):
                    peer.call("x")
                with pytest.raises(RefusedError):
                    peer.begin("x")


PROGRAMS = {
    "peers that were not closed": """
        peers = [Client("counting", address) for _ in range(4)]
        for peer in peers:
            peer.call("echo", {}, [np.zeros(100_000)])
        """,
    "calls in flight": """
        peer = Client("counting", address)
        replies = [peer.begin("sleep", {"seconds": 0.5}) for _ in range(20)]
        peer.begin("ping", then=lambda reply: None)
        """,
    "a close with calls in flight": """
        peer = Client("counting", address)
        replies = [peer.begin("echo", {}, [np.zeros(1_000_000)]) for _ in range(20)]
        replies[0].wait()
        peer.close()
        """,
    "a server with callers": """
        server = Server(Counting())
        peer = Client("own", server.address)
        peer.call("ping")
        other = Client("counting", address)
        other.call("ping")
        """,
    "a server when threads cannot be started any more, as in Python 3.12": """
        import atexit
        server = Server(Counting())
        peer = Client("own", server.address)
        peer.call("ping")
        def refuse(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        atexit.register(setattr, threading.Thread, "start", refuse)
        """,
    "a server with a call in flight": """
        server = Server(Counting())
        peer = Client("own", server.address)
        peer.begin("sleep", {"seconds": 0.3})
        wait_for(lambda: peer.connections)
        """,
    "a closed server with calls that end later, one after the other": """
        server = Server(Counting())
        peers = [Client("own", server.address) for _ in range(20)]
        for number, peer in enumerate(peers):
            peer.begin("sleep", {"seconds": 0.5 + 0.05 * number})
        wait_for(lambda: sum(one.taken for one in list(server.connections.values())) == 20)
        server.close(0.1)
        """,
    "a server with a stranger": """
        server = Server(Counting())
        stranger = subprocess.Popen(
            [sys.executable, support_path("wire/stranger.py"), server.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stranger.stdout.readline()
        server.close(0.1)
        """,
    "a peer that was never reached": """
        peer = Client("nobody", "127.0.0.1:1")
        peer.begin("ping")
        """,
    "a child that was forked": """
        import os, sys
        peer = Client("counting", address)
        reply = peer.begin("ping")
        reply.wait()
        child = os.fork()
        if child == 0:
            try:
                peer.call("ping")
            except RuntimeError as error:
                assert "got one from a fork" in str(error)
                peer.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        peer.call("ping")
        """,
}


@pytest.fixture(scope="module")
def process():
    with Process() as one:
        yield one


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_without_noise_with(process, name):
    head = "import subprocess, sys, threading, numpy as np\nfrom karvan.wire import *\n"
    head += "from wire_helpers import *\nfrom support_paths import support_path\naddress = sys.argv[1]\n"
    body = "\n".join(line[8:] for line in PROGRAMS[name].splitlines())
    quiet = "ignore:This process:DeprecationWarning"  # of os.fork, since Python 3.12
    ran = subprocess.run(
        [sys.executable, "-W", quiet, "-c", head + body + "\nprint('end')", process.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "end\n", "")


def test_a_service_whose_callers_come_and_go_makes_no_noise():
    with Process() as process, Network(process.address) as network:
        for _ in range(10):
            peer = Client("counting", network.address)
            replies = [peer.begin("echo", {"n": number}) for number in range(30)]
            replies[5].wait()
            network.cut()
            peer.close()
        with Client("counting", process.address) as peer:
            peer.call("ping")
        noise = [line for line in process.kill().splitlines() if not line.startswith("INFO:karvan.wire:")]
        assert noise == []
