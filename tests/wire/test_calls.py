"""Calls as they are declared: what passes the border of a service, what comes back, and what is refused."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pytest

from karvan.wire import Client, Endpoint, Message, RefusedError, Server, Service, endpoints
from karvan.wire.message import pack
from karvan.wire.schema import (
    ANY,
    ArrayKind,
    Boolean,
    Call,
    DescribedArrays,
    Fields,
    Float,
    ForEach,
    Head,
    Integer,
    Length,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    OptionalArrays,
    Plain,
    Struct,
    Text,
    TupleOf,
    Variant,
    expect_array,
    kind_of,
    table_of,
)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Integer(1, 9), [1, 9], [0, 10, 1.0, True, "1", None, [], 10**400, -(10**400)]),
        (Float(), [0.5, 3, -1e300], [math.nan, math.inf, -math.inf, True, "1", None, 10**400]),
        (Float(finite=False), [math.nan, math.inf, 1], ["nan", None, {}]),
        (Float(0, 1), [0, 1, 0.5], [-0.1, 1.1, math.nan]),
        (Boolean(), [True, False], [0, 1, None, "true"]),
        (Text(3), ["a", "abc"], ["", "abcd", 1, None, ["a"], "\ud800"]),
        (Text(3, 0), [""], ["abcd"]),
        (OneOf("a", "b"), ["a"], ["c", 1, None, ["a"], {}]),
        (Nullable(Integer()), [None, 1], ["a", -1]),
        (ListOf(Integer(), 2), [[], [1, 2]], [[1, 2, 3], [True], {}, "12", None]),
        (ListOf(Integer(), 2, 1), [[1]], [[]]),
        (MapOf(Integer(), 1), [{}, {"a": 1}], [{"a": 1, "b": 2}, {"a": "1"}, {"": 1}, [], None]),
        (
            Fields({"a": Integer()}, {"b": Text()}),
            [{"a": 1}, {"a": 1, "b": "x"}],
            [{}, {"b": "x"}, {"a": 1, "c": 1}, 3],
        ),
        (
            Variant("a", Fields({"a": Integer()}), Fields({"b": Text()})),
            [{"a": 1}, {"b": "x"}],
            [{}, {"a": 1, "b": "x"}, 3],
        ),
        (Plain(), [None, 1, "x", [1, {"a": 2}]], []),
        (Plain(lambda value: value != 3, "something but 3"), [2], [3]),
    ],
)
def test_kinds_take_what_they_say_and_nothing_else(kind, good, bad):
    for value in good:
        checked = kind.check(value, "it")
        assert checked == value or value != value
    for value in bad:
        with pytest.raises(RefusedError, match=r"^expected .*(it|the head).*got "):
            kind.check(value, "it")


def test_a_tuple_has_its_length_and_becomes_one():
    assert TupleOf(Integer(), Text()).check([1, "a"], "it") == (1, "a")
    for wrong in ([1], [1, "a", 2], ["a", 1], "1a", None):
        with pytest.raises(RefusedError, match="expected it"):
            TupleOf(Integer(), Text()).check(wrong, "it")


def test_a_refusal_says_where_and_shows_little():
    nested = Fields({"tables": MapOf(ListOf(Integer(0, 5)))})
    with pytest.raises(
        RefusedError, match=r"expected tables\['a'\]\[1\] to be a whole number from 0 to 5, got 6\."
    ):
        nested.check({"tables": {"a": [1, 6]}}, "the head")
    with pytest.raises(RefusedError, match="got text of length 10000000"):
        Text().check("x" * 10**7, "name")
    with pytest.raises(RefusedError, match=r"got a number of .* bits"):
        Integer().check(10**5000, "n")


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (int, Integer()),
        (float, Float()),
        (str, Text()),
        (bool, Boolean()),
        (Any, Plain()),
        (Annotated[int, Integer(1, 3)], Integer(1, 3)),
        (Annotated[int, Integer(1, 3)] | None, Nullable(Integer(1, 3))),
        (list[str], ListOf(Text())),
        (Annotated[Sequence[int], Length(5, 2)], ListOf(Integer(), 5, 2)),
        (tuple[int, bool], TupleOf(Integer(), Boolean())),
        (dict[str, int], MapOf(Integer())),
        (Annotated[Mapping[str, int], Length(3)], MapOf(Integer(), 3)),
    ],
)
def test_a_kind_follows_from_a_type(hint, kind):
    assert (type(kind_of(hint)), str(kind_of(hint))) == (type(kind), str(kind))


def test_a_field_that_may_be_missing_is_not_null_unless_it_says_so():
    class Missing(Head):
        plain: int | None = None
        nullable: Annotated[int | None, Nullable(int)] = None

    kind = Struct(Missing)
    assert kind.check({}, "the head").plain is None
    assert kind.check({"nullable": None}, "the head").nullable is None
    with pytest.raises(RefusedError, match=r"expected plain to be a whole number .* got null"):
        kind.check({"plain": None}, "the head")


class Part(Head):
    name: str
    size: int | None = None


class Whole(Head):
    parts: list[Part]
    mode: Annotated[str, OneOf("a", "b")] = "a"


class Extended(Whole):
    last: Part
    mode: Annotated[str, OneOf("c")]


def test_a_head_has_its_fields_and_is_sent_as_it_was_made():
    fields = {"parts": [{"name": "x"}, {"size": 3, "name": "y"}]}
    whole = Struct(Whole).check(fields, "the head")
    assert [(part.name, part.size) for part in whole.parts] == [("x", None), ("y", 3)]
    assert whole.mode == "a"
    assert repr(whole) == "Whole(parts=[Part(name='x'), Part(size=3, name='y')])"
    for sent in (whole, Whole(parts=[Part(name="x"), Part(size=3, name="y")])):
        assert pack(Message(sent)).head == json.dumps({**fields, "arrays": []}, separators=(",", ":"))
    with pytest.raises(TypeError, match="bytes is not JSON serializable"):
        pack(Message(Part(name=b"x")))


def test_a_head_refuses_other_fields_and_inherits_those_of_its_base():
    good = {"parts": [], "last": {"name": "x"}, "mode": "c"}
    assert Struct(Extended).check(good, "the head").last.name == "x"
    for other, said in [
        ({"mode": "a"}, "mode to be one of 'c'"),
        ({"last": {}}, "expected last with 'name'"),
        ({"more": 1}, "got 'more' as well"),
        ({"parts": [{"name": "x", "size": "1"}]}, r"expected parts\[0\]\['size'\]"),
    ]:
        with pytest.raises(RefusedError, match=said):
            Struct(Extended).check({**good, **other}, "the head")
    with pytest.raises(RefusedError, match="expected the head with 'mode', one of 'c'; got none"):
        Struct(Extended).check({"parts": [], "last": {"name": "x"}}, "the head")


KEYS = ArrayKind("keys", "int64", "n")
VECTORS = ArrayKind("vectors", ("float32", "uint16"), "n", lambda head: head.dim)


class Put(Head):
    dim: Annotated[int, Integer(1, 64)]


class Rows(Head):
    rows: int


class Tables(Head):
    tables: list[str]
    extra: bool


class Get(Head):
    n: int


class Dim(Head):
    dim: Annotated[int, Integer(1)]


CALLS = table_of(
    Call("put", Put, [KEYS, VECTORS], answer=Rows),
    Call(
        "many",
        Tables,
        [
            ForEach(lambda head: len(head.tables), [KEYS, ArrayKind("counts", "uint32", "n")]),
            OptionalArrays(lambda head: head.extra, [ArrayKind("extra", "bool", ANY, 2)]),
        ],
    ),
    Call("described", arrays=[DescribedArrays(2)], rule=lambda head, arrays: _no_floats(arrays)),
    Call(
        "get",
        Get,
        (),
        Dim,
        [
            ArrayKind("vectors", "float32", lambda told: told.n, lambda told: told.dim),
        ],
    ),
)


def _no_floats(arrays):
    if any(array.dtype.kind == "f" for array in arrays):
        raise RefusedError("expected no floats.")


def check(name, head, *arrays):
    call = Message({**head, "method": name, "number": 1, "received": 0, "arrays": []}, arrays)
    return CALLS[name].check(call).as_json()


def test_arrays_must_be_as_declared():
    keys, vectors = np.zeros(3, np.int64), np.zeros((3, 4), np.float32)
    assert check("put", {"dim": 4}, keys, vectors) == {"dim": 4}
    assert check("put", {"dim": 4}, keys, vectors.astype(np.uint16)) == {"dim": 4}
    for arrays, said in [
        ((), r"expected 2 arrays \(keys, vectors\), got 0"),
        ((keys,), "expected 2 arrays"),
        ((keys, vectors, vectors), "expected 2 arrays .* got 3"),
        ((keys.astype(np.uint64), vectors), r"expected keys to be int64 \[3\], got uint64 \[3\]"),
        ((keys.reshape(3, 1), vectors), r"expected keys to be int64 \[n\], got int64 \[3, 1\]"),
        ((np.array(3), vectors), r"got int64 \[\]"),
        ((keys, vectors[:2]), r"expected vectors to be float32 or uint16 \[3, 4\], got float32 \[2, 4\]"),
        ((keys, vectors[:, :3]), r"got float32 \[3, 3\]"),
        ((keys, vectors.astype(bool)), r"got bool \[3, 4\]"),
        ((keys, vectors.astype(np.float64)), "got float64"),
        ((vectors, keys), "expected keys"),
    ]:
        with pytest.raises(RefusedError, match=f"^put: .*{said}"):
            check("put", {"dim": 4}, *arrays)


def test_arrays_come_as_often_as_the_head_says():
    pair = np.zeros(3, np.int64), np.zeros(3, np.uint32)
    longer = np.zeros(5, np.int64), np.zeros(5, np.uint32)
    check("many", {"tables": ["a", "b"], "extra": False}, *pair, *longer)
    check("many", {"tables": [], "extra": True}, np.zeros((7, 2), bool))
    check("many", {"tables": [], "extra": False})
    for head, arrays in [
        ({"tables": ["a", "b"], "extra": False}, pair),
        ({"tables": ["a"], "extra": True}, pair),
        ({"tables": ["a"], "extra": False}, (*pair, *longer)),
        ({"tables": ["a", "b"], "extra": False}, (pair[0], longer[1], longer[0], pair[1])),
        ({"tables": ["a"] * 10**6, "extra": False}, pair),
    ]:
        with pytest.raises(RefusedError, match=r"^many: expected"):
            check("many", head, *arrays)


def test_described_arrays_are_for_the_rule_of_the_call():
    check("described", {}, np.zeros(3, np.int64), np.zeros(2, bool))
    with pytest.raises(RefusedError, match="described: expected no floats"):
        check("described", {}, np.zeros(3))
    with pytest.raises(RefusedError, match="up to 2 arrays, got 3"):
        check("described", {}, *[np.zeros(1, bool)] * 3)


def test_what_depends_on_state_is_expected_with_the_same_words():
    array = np.zeros((2, 3), np.float32)
    assert expect_array(array, "vectors", "float32", 2, 3) is array
    with pytest.raises(RefusedError, match=r"expected vectors to be float32 \[2, 4\], got float32 \[2, 3\]"):
        expect_array(array, "vectors", "float32", 2, 4)
    with pytest.raises(RefusedError, match="uint16"):
        expect_array(array, "vectors", "uint16", 2, 3)


class Shelf(Service):
    """Two calls, one of which lies when asked to."""

    name = "shelf"

    def __init__(self, lie=None):
        self.done = []
        self._lie = lie
        calls = {name: CALLS[name] for name in ("put", "get")}
        self.endpoints = endpoints(
            calls, Endpoint(calls["put"], self._put), Endpoint(calls["get"], self._get)
        )

    def _put(self, request):
        self.done.append((request.head.as_json(), len(request.arrays), request.caller.session))
        return Message({"rows": len(request.arrays[0])})

    def _get(self, request):
        return self._lie or Message({"dim": 2}, [np.zeros((request.head.n, 2), np.float32)])


def test_a_service_refuses_a_call_and_answers_the_next():
    shelf = Shelf()
    keys, vectors = np.zeros(3, np.int64), np.zeros((3, 4), np.float32)
    with Server(shelf) as server, Client("shelf", server.address) as peer:
        for head, arrays in [
            ({}, [keys, vectors]),
            ({"dim": 4, "more": 1}, [keys, vectors]),
            ({"dim": 4}, []),
        ]:
            with pytest.raises(RefusedError, match="shelf: put: expected"):
                peer.call("put", head, arrays)
        with pytest.raises(RefusedError, match="does not know the call 'take'; expected one of get, put"):
            peer.call("take")
        assert shelf.done == []
        assert peer.call("put", {"dim": 4}, [keys, vectors]).head["rows"] == 3
        assert [each[:2] for each in shelf.done] == [({"dim": 4}, 2)]


def test_a_hello_is_held_against_its_declaration():
    with Server(Shelf()) as server:
        said = "expected the hello with nothing alone, got 'who' as well"
        peer = Client("shelf", server.address, hello={"who": "x"})
        with peer, pytest.raises(RefusedError, match=said):
            peer.call("get", {"n": 1})
        with Client("shelf", server.address) as peer:
            assert peer.call("get", {"n": 1}).head["dim"] == 2


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (Message({"dim": 0}, [np.zeros((3, 0), np.float32)]), "expected dim to be a whole number"),
        (Message({}, [np.zeros((3, 2), np.float32)]), "expected the answer with 'dim'"),
        (Message({"dim": 2, "x": 1}, [np.zeros((3, 2), np.float32)]), "got 'x' as well"),
        (Message({"dim": 2}, [np.zeros((2, 2), np.float32)]), r"expected vectors to be float32 \[3, 2\]"),
        (Message({"dim": 2}, [np.zeros((3, 2), np.float64)]), "got float64"),
        (Message({"dim": 2}, []), "expected 1 arrays"),
    ],
)
def test_a_caller_refuses_an_answer_that_is_otherwise_and_takes_the_next(lie, said):
    shelf = Shelf(lie)
    with Server(shelf) as server, Client("shelf", server.address) as peer:
        with pytest.raises(RefusedError, match=f"shelf: the answer to get: .*{said}"):
            peer.call(CALLS["get"], {"n": 3})
        shelf._lie = None
        assert peer.call(CALLS["get"], {"n": 3}).arrays[0].shape == (3, 2)


def test_each_declared_call_has_one_method():
    with pytest.raises(ValueError, match="get"):
        endpoints(CALLS, *(Endpoint(call, None) for name, call in CALLS.items() if name != "get"))
    with pytest.raises(ValueError, match="once"):
        table_of(Call("a"), Call("a"))
