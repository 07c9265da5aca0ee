"""`WorkerClient`: how a loader sends id features to an embedding worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from karvan.clock import clock
from karvan.cluster.batch_messages import pack
from karvan.discovery.directory import directory_from_environment
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.protocol.embedding_worker import DESCRIBE_WORKER, FORGET, PUT
from karvan.ragged import Ragged
from karvan.wire import Security, WireError
from karvan.wire.client import LastingClient

_FOUND_WITHIN = 5.0  # seconds; a caller that finds no worker tries again until its deadline
_PAUSES = 0.01, 0.5  # seconds between attempts at a worker that is full: the first and the longest


class WorkerClient:
    """One worker, by address or by a function that finds it; its replacement is found again."""

    def __init__(
        self,
        index: int,
        find: str | Callable[[], str],
        security: Security | None = None,
        *,
        deadline: float = 120.0,
    ) -> None:
        self.index = index
        self._deadline = deadline
        name = f"embedding worker {index}"
        self._client = LastingClient(name, find, security, hello={"loader": True}, deadline=deadline)

    def put(self, reference: str, ids: Mapping[str, Tensor | Ragged], *, within: float | None = None) -> None:
        """Store id features in the worker; returns when it has them. Harmless if it has them already.

        A worker that is full of unclaimed batches is asked again, for up to `within` seconds. After a
        WireError another call finds the worker, or its replacement, again.
        """
        message, client = pack(ids), self._client.current()
        within = self._deadline if within is None else within
        due = clock.now() + within
        pause, longest = _PAUSES
        while not client.call(PUT, {**message.head, "reference": reference}, message.arrays).head.kept:
            if clock.now() > due:
                raise WireError(
                    f"embedding worker {self.index} expected to have room for a batch within "
                    f"{within:g} s, got too few claims of those it holds."
                )
            time.sleep(pause)
            pause = min(longest, 2 * pause)

    def forget(self, references: Sequence[str]) -> None:
        """Drop batches that nobody will claim."""
        self._client.current().call(FORGET, {"references": list(references)})

    def begin_forget(self, references: Sequence[str]) -> None:
        """The same, without waiting; a worker that cannot be reached has forgotten them, or will."""
        with suppress(WireError):
            self._client.current().begin(FORGET, {"references": list(references)})

    def describe(self) -> dict[str, int]:
        """What the worker holds and has done: waiting, kept, received, expired, claims, backwards, plans."""
        return self._client.current().call(DESCRIBE_WORKER).head

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def workers_from_environment(deadline: float = 120.0) -> list[WorkerClient]:
    """The embedding workers of this process's job; an empty list if it has none."""
    count = JobEnvironment.read().counts.get(Role.EMBEDDING_WORKER, 0)
    if not count:
        return []
    security = Security.from_environment()
    directory = directory_from_environment(security=security)
    return [
        WorkerClient(
            worker,
            partial(directory.find, Role.EMBEDDING_WORKER, worker, _FOUND_WITHIN),
            security,
            deadline=deadline,
        )
        for worker in range(count)
    ]
