"""The registry's calls on its `RendezvousStore`; see `karvan.protocol.rendezvous`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from karvan.discovery.rendezvous_store import RendezvousStore
from karvan.protocol.rendezvous import pack_values, unpack_values
from karvan.wire import Message, Request
from karvan.wire.service import Method


def rendezvous_methods(store: RendezvousStore) -> dict[str, Method]:
    """A method for each of RENDEZVOUS_CALLS."""

    def set_values(request: Request) -> Message:
        head = request.head
        store.set(head["generation"], head["keys"], unpack_values(head, request.arrays))
        return Message({})

    def get(request: Request) -> Message:
        found = store.get(request.head["generation"], request.head["keys"])
        sizes, arrays = pack_values(found or [])
        return Message({"present": found is not None, "sizes": sizes}, arrays)

    def check(request: Request) -> Message:
        return Message({"present": store.has(request.head["generation"], request.head["keys"])})

    def add(request: Request) -> Message:
        head = request.head
        return Message({"total": store.add(head["generation"], head["key"], head["amount"], _request(head))})

    def append(request: Request) -> Message:
        head = request.head
        [value] = unpack_values(head, request.arrays)
        store.append(head["generation"], head["key"], value, _request(head))
        return Message({})

    def compare_set(request: Request) -> Message:
        head = request.head
        expected, desired = unpack_values(head, request.arrays)
        value = store.compare_set(head["generation"], head["key"], expected, desired, _request(head))
        sizes, arrays = pack_values([value])
        return Message({"sizes": sizes}, arrays)

    def delete(request: Request) -> Message:
        head = request.head
        return Message({"deleted": store.delete(head["generation"], head["key"], _request(head))})

    def count(request: Request) -> Message:
        return Message({"keys": store.count(request.head["generation"])})

    return {
        "store_set": set_values,
        "store_get": get,
        "store_check": check,
        "store_add": add,
        "store_append": append,
        "store_compare_set": compare_set,
        "store_delete": delete,
        "store_count": count,
    }


def _request(head: Mapping[str, Any]) -> str:
    return str(head.get("request", ""))
