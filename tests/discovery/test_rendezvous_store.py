"""The store at which trainers meet: as torch's own, but bounded, and only with the token."""

import itertools
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from free_ports import free_port
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from karvan.discovery.registry import Registry, RendezvousStore, StoreBounds
from karvan.distributed.wire_store import WireStore
from karvan.protocol.master import (
    RENDEZVOUS_CALLS,
    STORE_ADD,
    STORE_APPEND,
    STORE_COMPARE_SET,
    STORE_COUNT,
    STORE_DELETE,
    STORE_GET,
    STORE_SET,
    pack_values,
    unpack_values,
)
from karvan.wire import Client, Message, RefusedError, Security, Service, endpoints
from karvan.wire.server import Caller

KEYS = st.sampled_from(["a", "b", "number", "with/slash", "ключ"])
VALUES = st.binary(max_size=5)


@pytest.fixture
def registry():
    one = Registry(security=Security(token="secret"))
    yield one
    one.close()


@pytest.fixture
def store(registry):
    one = WireStore(registry.address, 0, Security(token="secret"), timeout=20.0)
    yield one
    one.close()


def test_it_is_as_torchs_own_store(store):
    """A WireStore, alone and behind torch's PrefixStore, beside a HashStore, which lives in one process."""
    numbers = itertools.count()  # an id() may be one of an earlier machine, whose keys are still there

    class Beside(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.real = dist.PrefixStore(str(next(numbers)), store)  # torch calls ours from C++
            self.expected = dist.HashStore()
            self.keys = set()

        @rule(key=KEYS, value=VALUES)
        def set(self, key, value):
            self.real.set(key, value)
            self.expected.set(key, value)
            self.keys.add(key)

        @rule(keys=st.lists(KEYS, unique=True, min_size=1), value=VALUES)
        def set_several(self, keys, value):
            values = [value + bytes([n]) for n in range(len(keys))]
            self.real.multi_set(keys, values)
            self.expected.multi_set(keys, values)
            self.keys |= set(keys)

        @rule(key=KEYS, value=VALUES)
        def append(self, key, value):
            self.real.append(key, value)
            self.expected.append(key, value)
            self.keys.add(key)

        @rule(amount=st.integers(-(2**40), 2**40))
        def add(self, amount):
            assert self.real.add("sum", amount) == self.expected.add("sum", amount)

        @rule(key=KEYS, expected=VALUES, desired=VALUES)
        def compare_set(self, key, expected, desired):
            found = self.expected.compare_set(key, expected, desired)
            assert self.real.compare_set(key, expected, desired) == found
            if self.expected.check([key]):
                self.keys.add(key)

        @rule(key=KEYS)
        def delete(self, key):
            assert self.real.delete_key(key) == self.expected.delete_key(key)
            self.keys.discard(key)

        @rule(keys=st.lists(KEYS, unique=True))
        def check(self, keys):
            assert self.real.check(keys) == self.expected.check(keys)

        @precondition(lambda self: self.keys)
        @rule(data=st.data())
        def get(self, data):
            keys = data.draw(st.lists(st.sampled_from(sorted(self.keys)), min_size=1, unique=True))
            self.real.wait(keys)
            assert [self.real.get(key) for key in keys] == [self.expected.get(key) for key in keys]
            assert self.real.multi_get(keys) == self.expected.multi_get(keys)

    run_state_machine_as_test(Beside)


def test_who_waits_gets_a_key_that_comes_later_and_not_for_ever(store, registry):
    other = WireStore(registry.address, 0, Security(token="secret"))
    late = threading.Timer(0.2, lambda: other.set("later", b"here"))
    late.start()
    assert store.get("later") == b"here"
    late.join()
    other.close()
    with pytest.raises(dist.DistStoreError, match=r"Expected never, nor within 0\.05 seconds"):
        store.wait(["never", "nor"], timedelta(seconds=0.05))
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match=r"Expected p/never within 0\.05 seconds"):
        dist.PrefixStore("p", store).get("never")


def test_a_number_counts_every_caller_once(store, registry):
    stores = [WireStore(registry.address, 0, Security(token="secret")) for _ in range(4)]
    threads = [threading.Thread(target=lambda s=s: [s.add("n", 1) for _ in range(50)]) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("n", 0) == 200
    assert store.num_keys() == 1
    for each in stores:
        each.close()


def test_the_next_generation_begins_empty_and_refuses_the_one_before(store, registry):
    store.set("a", b"1")
    registry.begin_generation(1)
    for call in (lambda: store.get("a"), lambda: store.set("a", b"2"), lambda: store.add("n", 1)):
        with pytest.raises(
            RefusedError, match=r"expected to be of generation 1, got 0: the job has continued without"
        ):
            call()
    later = WireStore(registry.address, 1, Security(token="secret"))
    assert not later.check(["a"])
    later.close()


def test_a_stranger_without_the_token_gets_nothing(store, registry):
    store.set("karvan/hello/0", b"of rank 0")
    for security in (Security(), Security(token="guessed")):
        stranger = WireStore(registry.address, 0, security, timeout=3.0)
        for call in (
            lambda s=stranger: s.set("karvan/hello/0", b"overwritten"),
            lambda s=stranger: s.get("karvan/hello/0"),
            lambda s=stranger: s.delete_key("karvan/hello/0"),
        ):
            with pytest.raises((RefusedError, dist.DistStoreError), match="token"):
                call()
        stranger.close()
    assert store.get("karvan/hello/0") == b"of rank 0"


def ask(store, call, values=(), **head):
    """The answer of a store to a call of its own generation: its only field, or its values."""
    sizes, arrays = pack_values(values) if values else ([], [])
    fields = {"generation": store.generation, **head, **({"sizes": sizes} if values else {})}
    request = Message({"method": call.name, **fields}, arrays)
    answer = endpoints_of(store).answer(request, Caller("a test", None))
    if answer.arrays:
        return unpack_values(answer.head.sizes, answer.arrays)
    fields = answer.head if isinstance(answer.head, dict) else vars(answer.head)
    return next(iter(fields.values()), None)


def endpoints_of(store):
    """A service that has only the calls of a store."""
    service = Service()
    service.endpoints = endpoints(RENDEZVOUS_CALLS, *store.endpoints)
    return service


BOUNDS = StoreBounds(keys=4, key_length=8, value_size=100, total_size=800)


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "append", "compare_set"]), st.integers(0, 5), st.integers(0, 120)),
        max_size=30,
    )
)
def test_bounds_hold_whatever_comes_and_refusals_change_nothing(steps):
    store, expected = RendezvousStore(BOUNDS), {}
    for kind, key, size in steps:
        name, value = f"key-{key}", b"x" * size
        before = expected.get(name, b"")
        after = before + value if kind == "append" else value
        would = {**expected, name: after}
        fits = (
            len(after) <= 100
            and len(would) <= 4
            and sum(len(k) + len(v) + 128 for k, v in would.items()) <= 800
        )
        try:
            if kind == "set":
                ask(store, STORE_SET, [value], keys=[name])
            elif kind == "append":
                ask(store, STORE_APPEND, [value], key=name)
            else:
                ask(store, STORE_COMPARE_SET, [before, value], key=name)
        except RefusedError:
            assert not fits
        else:
            assert fits
            expected = would
        assert ask(store, STORE_GET, keys=list(expected)) == list(expected.values())
        assert ask(store, STORE_COUNT) == len(expected)


@pytest.mark.parametrize(
    ("head", "values", "message"),
    [
        ({"keys": ["k" * 9]}, [b""], r"keys of up to 8 bytes and values of up to 100, got 9 and 0"),
        ({"keys": ["k"]}, [b"x" * 101], r"keys of up to 8 bytes and values of up to 100, got 1 and 101"),
        ({"keys": list("abcde")}, [b""] * 5, r"up to 4 keys and 800 bytes, got 5 and 645"),
    ],
)
def test_what_exceeds_a_bound_is_refused_with_the_bound(head, values, message):
    with pytest.raises(RefusedError, match=message):
        ask(RendezvousStore(BOUNDS), STORE_SET, values, **head)


def test_a_value_that_is_too_large_is_refused_at_the_registry(store):
    with pytest.raises(RefusedError, match="values of up to 1048576, got 3 and 4000000"):
        store.set("big", bytes(4_000_000))
    assert not store.check(["big"])


def test_a_sum_that_is_none_is_an_error_of_the_caller(store):
    store.set("text", b"ten")
    with pytest.raises(ValueError, match=r"add expects a number at 'text', got b'ten'"):
        store.add("text", 1)
    store.add("most", 2**63 - 1)
    with pytest.raises(ValueError, match=r"expects a sum of 64 bits at 'most', got 9223372036854775808"):
        store.add("most", 1)


@pytest.mark.parametrize(
    "head",
    [
        {"method": "store_set", "generation": 0, "keys": ["a"], "sizes": [3]},
        {"method": "store_set", "generation": 0, "keys": "a", "sizes": []},
        {"method": "store_set", "keys": ["a"], "sizes": [0]},
        {"method": "store_add", "generation": 0, "key": "a", "amount": 1.5},
        {"method": "store_add", "generation": 0, "key": ["a"], "amount": 1},
        {"method": "store_get", "generation": True, "keys": ["a"]},
        {"method": "store_compare_set", "generation": 0, "key": "a", "sizes": [-1, 1]},
        {"method": "store_compare_set", "generation": 0, "key": "a", "sizes": [0]},
        {"method": "store_get", "generation": 0, "keys": ["\ud800"]},
        {"method": "store_get", "generation": 0, "keys": ["k" * 1025]},
        {"method": "store_drop", "generation": 0},
    ],
)
def test_malformed_calls_are_refused(registry, head):
    with (
        Client("registry", registry.address, Security(token="secret")) as peer,
        pytest.raises(RefusedError, match=r"expected|does not know"),
    ):
        peer.call(head["method"], {name: value for name, value in head.items() if name != "method"})


def test_keys_and_the_answers_to_calls_survive_the_registry(tmp_path):
    path = tmp_path / "keys"
    one = RendezvousStore(path=path)
    one.begin_generation(3)
    ask(one, STORE_SET, [b"1", b""], keys=["a", "b"])
    assert ask(one, STORE_ADD, key="n", amount=5, request="first") == 5
    ask(one, STORE_APPEND, [b"2"], key="a", request="second")
    assert ask(one, STORE_COMPARE_SET, [b"", b"x"], key="c", request="third") == [b"x"]
    assert ask(one, STORE_DELETE, key="b", request="fourth")
    # Not closed: the process was killed.
    two = RendezvousStore(path=path)
    assert two.generation == 3
    assert ask(two, STORE_ADD, key="n", amount=5, request="first") == 5  # the same call once more
    ask(two, STORE_APPEND, [b"2"], key="a", request="second")
    ask(two, STORE_SET, [b"y"], keys=["c"])
    assert ask(two, STORE_COMPARE_SET, [b"", b"x"], key="c", request="third") == [b"x"]
    assert ask(two, STORE_DELETE, key="b", request="fourth")
    assert ask(two, STORE_GET, keys=["a", "c", "n"]) == [b"12", b"y", b"5"]
    assert ask(two, STORE_ADD, key="n", amount=5, request="another") == 10
    assert ask(two, STORE_COUNT) == 3
    two.begin_generation(4)
    assert ask(two, STORE_ADD, key="n", amount=1, request="first") == 1
    assert RendezvousStore(path=path).generation == 4


def test_a_store_continues_at_a_registry_that_was_restarted(tmp_path):
    port = free_port()
    options = {"security": Security(token="secret"), "rendezvous": tmp_path / "keys"}
    first = Registry("127.0.0.1", port, generation=2, **options)
    store = WireStore(first.address, 2, Security(token="secret"), timeout=60.0)
    store.set("a", "1")
    assert store.add("n", 2) == 2
    first.close()
    second = Registry("127.0.0.1", port, generation=2, **options)
    assert store.get("a") == b"1"
    assert store.add("n", 2) == 4
    second.close()
    third = Registry("127.0.0.1", port, generation=3, **options)  # the trainers of generation 2 are gone
    with pytest.raises(RefusedError, match="generation 3, got 2"):
        store.add("n", 2)
    store.close()
    third.close()


def test_a_damaged_file_begins_again(tmp_path, caplog):
    path = tmp_path / "rendezvous.db"
    path.write_bytes(b"not a database, but as long as the header of one " * 100)
    first = RendezvousStore(path=path)
    first.close()
    assert "is damaged" in caplog.text
    second = RendezvousStore(path=path)
    assert second.generation == 0
    second.close()
