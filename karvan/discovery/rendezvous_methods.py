"""The registry's calls on its `RendezvousStore`; see `karvan.protocol.rendezvous`."""

from __future__ import annotations

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
        return Message({"total": store.add(head["generation"], head["key"], head["amount"])})

    def append(request: Request) -> Message:
        head = request.head
        store.append(head["generation"], head["key"], *unpack_values(head, request.arrays))
        return Message({})

    def compare_set(request: Request) -> Message:
        head = request.head
        expected, desired = unpack_values(head, request.arrays)
        sizes, arrays = pack_values([store.compare_set(head["generation"], head["key"], expected, desired)])
        return Message({"sizes": sizes}, arrays)

    def delete(request: Request) -> Message:
        return Message({"deleted": store.delete(request.head["generation"], request.head["key"])})

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
