"""The generation of a job, as its registry confirms it.

The launcher starts a generation in the registry, which lives in its process, before it starts the processes
of that generation. A trainer names its generation when it connects to a service. One that is older than what
the service knows is refused; for a newer one the service asks the registry, and refuses it if the registry
has another. So a caller that makes up a generation cannot cause a service to drop its rows and refuse the
real trainers. While the registry cannot be reached, trainers of the known generation are served as before;
newer ones wait for it and are refused if it does not come back.

A job without a registry, whose processes know each other's addresses, has no such authority: its generation
is the one that each service was started with, until the service is restarted.
"""

from __future__ import annotations

import threading
from typing import Any

from karvan.cluster.role_process import RoleSettings
from karvan.job.address import MasterAddress
from karvan.protocol.values import GENERATION, REGISTRY_CALLS
from karvan.wire import Client, RefusedError, Security, WireError

_PATIENCE = 60.0  # seconds for the registry to answer


class Generations:
    """What a service knows of its job's generation.

    registry: "host:port", or "" if there is none. own: the generation with which the service was started.
    """

    def __init__(
        self,
        registry: str | MasterAddress = "",
        security: Security | None = None,
        own: int = 0,
        *,
        patience: float = _PATIENCE,
    ) -> None:
        self._registry = registry
        self._security = security
        self._patience = patience
        self._lock = threading.Lock()
        self.newest = own

    def check(self, value: Any) -> int:
        """The generation that a trainer names, if it is the job's; a RefusedError otherwise."""
        generation = GENERATION.check(value, "the generation")
        if not self._registry:
            if generation != self.newest:
                raise RefusedError(
                    f"expected generation {self.newest}, as when this service started, got {generation}: "
                    "a job without a registry changes its generation by restarting its services."
                )
            return generation
        if generation > self.newest:
            with self._lock:  # one call to the registry for all trainers that connect at the same time
                if generation > self.newest:
                    self.newest = max(self.newest, self._ask(generation))
        if generation != self.newest:
            raise RefusedError(f"expected generation {self.newest}, as the registry says, got {generation}.")
        return generation

    def _ask(self, generation: int) -> int:
        peer = Client("registry", self._registry, self._security, forgetful=True, calls=REGISTRY_CALLS)
        try:
            confirmed: int = peer.call("generation", deadline=self._patience).head["generation"]
            return confirmed
        except WireError as error:
            raise RefusedError(
                f"expected the registry at {self._registry} to confirm generation {generation}, got: {error}"
            ) from error
        finally:
            peer.close()


def generations_of(settings: RoleSettings) -> Generations:
    """The generations of the service of a process."""
    return Generations(settings.master if settings.registry else "", settings.security, settings.generation)
