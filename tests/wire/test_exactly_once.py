"""Every call is done once, in order, and answered, whatever happens to connections."""

import random
import threading

import numpy as np
import pytest
from delay import Network
from wire_helpers import Counting, Process, wait_for

from karvan.wire import Client, PeerLostError, Server, WireError
from karvan.wire.client import LastingClient


@pytest.fixture
def service():
    return Counting()


@pytest.fixture
def server(service):
    with Server(service) as one:
        yield one


@pytest.fixture
def network(server):
    with Network(server.address) as one:
        yield one


class Traffic:
    """Many calls with random arrays, of which up to 100 are under way, and what is expected of each."""

    def __init__(self, peer, seed):
        self._peer = peer
        self._random = np.random.default_rng(seed)
        self._replies = []
        self.count = 0

    def send(self, calls):
        for _ in range(calls):
            size = int(self._random.choice([0, 1, 100, 5_000, 200_000], p=[0.1, 0.3, 0.3, 0.25, 0.05]))
            array = self._random.integers(0, 2**31, size, np.int64)
            method = ("echo", "sum")[self.count % 2]
            reply = self._peer.begin(method, {"n": self.count}, [array])
            self._replies.append((self.count, reply, array))
            self.count += 1
            if len(self._replies) > 100:
                self._check(*self._replies.pop(0))

    def finish(self):
        while self._replies:
            self._check(*self._replies.pop(0))

    def _check(self, number, reply, array):
        answer = reply.wait()
        if number % 2:
            assert answer.head["sum"] == int(array.sum())
        else:
            assert answer.head["n"] == number
            np.testing.assert_array_equal(answer.arrays[0], array)


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_connections_lose_and_repeat_nothing(service, network, seed):
    chance = random.Random(seed)
    network.delay(chance.choice([0.0, 0.001, 0.005]))
    with Client("counting", network.address, patience=5) as peer:
        traffic = Traffic(peer, seed)
        ended = threading.Event()

        def cut():
            while not ended.wait(chance.uniform(0.005, 0.06)):
                network.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        for _ in range(15):
            traffic.send(20)
        ended.set()
        cutting.join()
        traffic.finish()
        assert peer.connections > 2
        assert service.done == {peer._session: list(range(traffic.count))}


def test_stalled_connections_lose_and_repeat_nothing(service, network):
    asked = []
    with Client("counting", lambda: asked.append(1) or network.address, patience=0.3) as peer:
        traffic = Traffic(peer, 0)
        for _ in range(2):
            traffic.send(50)
            network.stall()
            traffic.send(20)
            before, connections = len(asked), peer.connections
            wait_for(lambda before=before: len(asked) > before + 1)
            network.flow()
            traffic.finish()
            assert peer.connections > connections
        assert service.done == {peer._session: list(range(traffic.count))}


def test_a_cut_between_a_call_and_its_answer_does_not_repeat_the_call(service, network):
    with Client("counting", network.address) as peer:
        peer.call("ping")
        for number in range(5):
            done = len(service.done.get(peer._session, []))
            network.stall()
            reply = peer.begin("echo", {"n": number})
            if number % 2:  # the call arrives, the answer does not
                network.flow()
                wait_for(lambda done=done: len(service.done[peer._session]) == done + 1)
            network.cut()
            network.flow()
            assert reply.wait().head["n"] == number
        assert service.done[peer._session] == list(range(5))


def test_a_call_that_takes_longer_than_patience_is_not_sent_again(service, server):
    with Client("counting", server.address, patience=0.3) as peer:
        peer.call("sleep", {"seconds": 0.9})
        assert service.done[peer._session] == ["sleep"]
        assert peer.connections == 1


def test_a_call_that_is_under_way_when_the_connection_breaks_is_waited_for(service, network):
    with Client("counting", network.address, patience=0.3) as peer:
        reply = peer.begin("sleep", {"seconds": 0.9})
        wait_for(lambda: peer.connections)
        network.cut()
        reply.wait()
        assert service.done[peer._session] == ["sleep"]
        assert peer.connections >= 2  # later ones were told that the call is being done


def test_a_write_that_nobody_reads_does_not_hold_a_peer_up(network):
    large = np.zeros(2**25, np.uint8)
    with Client("counting", network.address, deadline=0.8, patience=60) as peer:
        peer.call("ping")
        network.stall()
        replies = [peer.begin("echo", {}, [large]) for _ in range(12)]  # more than fits into all buffers
        with pytest.raises(
            WireError, match=r"expected to answer 'echo' within 0.8 s, got: no answer in time"
        ):
            replies[-1].wait()


def test_a_short_deadline_behind_a_long_one_holds(service, server):
    with Client("counting", server.address) as peer:
        first = peer.begin("gate", deadline=60)
        with pytest.raises(WireError, match=r"'ping' within 0.3 s"):
            peer.call("ping", deadline=0.3)
        with pytest.raises(WireError):
            first.wait()
        service.gate.set()


@pytest.mark.parametrize("find", ["127.0.0.1:1", lambda: "localhost:1"])
def test_a_peer_that_cannot_be_reached_is_named_within_the_deadline(find):
    with Client("server 3", find, deadline=0.3) as peer:
        with pytest.raises(WireError, match=r"server 3 expected to answer 'x' within 0.3 s, got: .*refused"):
            peer.call("x")
        with pytest.raises(WireError, match="server 3"):
            peer.call("x")


def test_a_port_that_accepts_and_says_nothing_is_named_within_the_deadline(network):
    network.stall()
    named = pytest.raises(WireError, match=r"server 3 expected to answer 'x' within 0.5 s")
    with Client("server 3", network.address, deadline=0.5) as peer, named:
        peer.call("x")


@pytest.mark.parametrize("address", ["nonsense", "host:", ":1", "host:port", "host:70000", ""])
def test_an_address_that_is_none_is_an_error_at_once(address):
    with Client("server", address) as peer, pytest.raises(ValueError, match="expects host:port"):
        peer.call("x")


def test_a_function_that_finds_may_fail_for_a_while(server):
    asked = []

    def find():
        asked.append(1)
        if len(asked) < 3:
            raise WireError("not there yet")
        return server.address

    with Client("server", find) as peer:
        assert peer.call("ping").head["service"] == "counting"
    with Client("server", lambda: 1 // 0) as peer, pytest.raises(ZeroDivisionError):
        peer.call("ping")


def test_a_lasting_client_finds_its_service_after_it_has_given_up_or_was_closed(server):
    addresses = iter([None, server.address, server.address])
    lasting = LastingClient("counting", lambda: next(addresses) or 1 // 0)
    with pytest.raises(ZeroDivisionError):  # which ends a client
        lasting.current().call("ping")
    first = lasting.current()
    assert first.call("ping").head["service"] == "counting"
    assert lasting.current() is first
    lasting.close()
    assert first.closing
    assert lasting.current().call("ping").head["service"] == "counting"
    lasting.close()


def test_a_lasting_client_that_the_end_of_the_process_has_closed_stays_closed(server):
    lasting = LastingClient("counting", server.address)
    client = lasting.current()
    client.close()
    assert lasting.current() is client
    with pytest.raises(WireError, match="was closed"):
        lasting.current().call("ping")


def test_a_service_that_is_killed_and_restarted_is_a_lost_peer():
    with Process() as first:
        peer = Client("counting", first.address)
        patient = Client("counting", first.address, forgetful=True)
        unused = Client("counting", first.address)
        for each in (peer, patient):
            each.call("echo", {"n": 0})
        port = first.port
    replies = [patient.begin("echo", {"n": number}) for number in range(1, 20)]
    lost = peer.begin("echo", {"n": 1})
    with Process(port):
        with pytest.raises(PeerLostError, match="counting has restarted"):
            lost.wait()
        with pytest.raises(PeerLostError):
            peer.call("ping")
        assert [reply.wait().head["n"] for reply in replies] == list(range(1, 20))
        assert unused.call("echo", {"n": 5}).head["n"] == 5  # it had told the first one nothing
        for each in (peer, patient, unused):
            each.close()


def test_a_first_call_whose_answer_died_with_the_service_is_a_lost_peer():
    with Process() as first:
        peer = Client("counting", first.address)
        reply = peer.begin("sleep", {"seconds": 60})
        wait_for(lambda: peer._numbered)
        port = first.port
    with Process(port), pytest.raises(PeerLostError):
        reply.wait()
    peer.close()


def test_a_caller_that_was_forgotten_while_it_did_nothing_goes_on(service, server, network):
    with Client("counting", network.address) as peer:
        peer.call("echo", {"n": 0})
        server.sessions.end(peer._session)
        network.cut()
        wait_for(lambda: peer._broken is not None)  # a call that was sent before would be in doubt
        assert peer.call("echo", {"n": 1}).head["n"] == 1
        assert service.done[peer._session] == [0, 1]


def test_sessions_are_forgotten_only_when_nobody_is_connected(server):
    server.sessions._idle = 0.0
    with Client("a", server.address) as first:
        first.call("ping")
        session = server.sessions._known[first._session]
        with Client("b", server.address) as second:
            second.call("ping")
        assert server.sessions._known == {first._session: session}
    wait_for(lambda: not server.sessions._known)


def test_many_callers_at_once(service, server):
    def run(peer, base):
        rng = np.random.default_rng(base)
        for number in range(20):
            array = rng.integers(0, 100, 1000)
            assert peer.call("sum", {"n": (base, number)}, [array]).head["sum"] == array.sum()

    peers = [Client(f"peer {index}", server.address) for index in range(8)]
    threads = [
        threading.Thread(target=run, args=(peer, 10 * index + each))
        for index, peer in enumerate(peers)
        for each in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, peer in enumerate(peers):
        done = service.done[peer._session]
        for each in range(3):
            assert [n for base, n in done if base == 10 * index + each] == list(range(20))
        peer.close()


def test_retries_leave_the_random_generator_of_the_program_alone():
    with Server(Counting()) as gone:
        address = gone.address
    random.seed(5)
    before = random.getstate()
    with Client("counting", address, deadline=0.3) as peer, pytest.raises(WireError):
        peer.call("echo")
    assert random.getstate() == before
