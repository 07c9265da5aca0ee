"""`WireStore`: torch's `Store` over Karvan's own wire, for the trainers of a launched job.

The other side is `karvan.discovery.registry`, in the job's registry: token and TLS are those of all
calls. No call blocks there. `get` and `wait` ask until the keys exist or the timeout is reached, at first
every millisecond, later ten times a second.

A broken connection is replaced, and a call is executed once however often it was sent, also if the registry
is restarted in between: it has the keys in a file. When it is gone for good, and so the job, calls fail with
a `DistStoreError` after the store's timeout. A trainer of an
earlier generation gets a RefusedError.

torch also calls these methods from its own threads. They need Python's lock while a call is packed, not while
it is in flight.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from karvan.clock import clock
from karvan.discovery.directory import RegistryClient
from karvan.job.address import MasterAddress
from karvan.job.environment import JobEnvironment
from karvan.protocol import master as protocol
from karvan.torch_internals import Store
from karvan.wire import Array, Message, Security, WireError
from karvan.wire.schema import A, Call

_PAUSES = 0.001, 0.1  # seconds between two calls, at first and at most
# Calls that a restarted registry must know again.
_ONCE = protocol.STORE_ADD, protocol.STORE_APPEND, protocol.STORE_COMPARE_SET, protocol.STORE_DELETE

# torch's objects hold only the C++ half of a store that is written in Python.
_in_use: set[WireStore] = set()


class WireStore(Store):
    """The store of one generation of trainers, at the registry's "host:port", until `close`.

    timeout: seconds to wait for a registry that does not answer, and for keys; `set_timeout` changes the
    latter.
    """

    timeout: timedelta  # torch's; `set_timeout` changes it

    def __init__(
        self,
        registry: str | MasterAddress,
        generation: int,
        security: Security | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout))
        self._deadline = timeout
        self._registry = registry
        self._generation = generation
        self._security = security
        self._client = RegistryClient(registry, security)
        _in_use.add(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        self._call(protocol.STORE_SET, {"keys": list(keys)}, values)

    def get(self, key: str) -> bytes:
        """The value of a key, once it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once all of them exist."""
        values: list[bytes] = []

        def ask() -> bool:
            answer, arrays = self._call(protocol.STORE_GET, {"keys": list(keys)})
            if answer.present:
                values.extend(protocol.unpack_values(answer.sizes, arrays))
            return answer.present

        self._poll(ask, keys, self.timeout)
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys exist."""
        self._poll(lambda: self.check(keys), keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys exist."""
        return self._call(protocol.STORE_CHECK, {"keys": list(keys)}).head.present

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return self._call(protocol.STORE_ADD, {"key": key, "amount": amount}).head.total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._call(protocol.STORE_APPEND, {"key": key}, [value])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; returns the value afterwards."""
        answer, arrays = self._call(protocol.STORE_COMPARE_SET, {"key": key}, [expected, desired])
        return protocol.unpack_values(answer.sizes, arrays)[0]

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Remove a key, for `delete_key`: torch looks it up by this name."""
        return self._call(protocol.STORE_DELETE, {"key": key}).head.deleted

    def getNumKeys(self) -> int:  # noqa: N802
        """The number of keys, for `num_keys`: torch looks it up by this name."""
        return self._call(protocol.STORE_COUNT, {}).head.keys

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` exist."""
        return True

    def clone(self) -> WireStore:
        """Another store with the same keys."""
        copy = WireStore(self._registry, self._generation, self._security, self._deadline)
        copy.set_timeout(self.timeout)
        return copy

    def close(self) -> None:
        """Disconnect from the registry; calls without an answer fail."""
        _in_use.discard(self)
        self._client.close()

    def _call(
        self, call: Call[Any, A], head: Mapping[str, Any], values: Sequence[str | bytes] = ()
    ) -> Message[A]:
        packed = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        head = {**head, "generation": self._generation}
        if call in _ONCE:
            head["request"] = secrets.token_hex(8)
        arrays: list[Array] = []
        if packed:
            head["sizes"], arrays = protocol.pack_values(packed)
        try:
            return self._client.call(call, head, arrays, deadline=self._deadline)
        except WireError as error:
            raise dist.DistStoreError(
                f"The connection to the job's registry is lost, and with it the trainers' store: {error}"
            ) from error

    def _poll(self, ask: Callable[[], bool], keys: Sequence[str], timeout: timedelta) -> None:
        due = clock.now() + timeout.total_seconds()
        pause, longest = _PAUSES
        while not ask():
            remaining = due - clock.now()
            if remaining <= 0:
                missing = ", ".join(keys)[:200]
                seconds = timeout.total_seconds()
                raise dist.DistStoreError(f"Expected {missing} within {seconds:g} seconds, got nothing.")
            time.sleep(min(pause, remaining))
            pause = min(longest, 2 * pause)


def launched_store(timeout: float) -> WireStore:
    """The store of the job that has launched this trainer, as the environment says."""
    job = JobEnvironment.read()
    return WireStore(job.master, job.generation, Security.from_environment(), timeout)
