"""`DenseServerProxy`: the dense parameters of a server, called over their own channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from karvan.dense.step_policies import Answer
from karvan.dense.tensor_checks import Array
from karvan.dense.wire_format import state_message, state_of, tensors_message, tensors_of
from karvan.distributed.parameter_servers import Servers
from karvan.protocol import parameter_server as protocol
from karvan.wire import Message
from karvan.wire.schema import A, Call


class DenseServerProxy:
    """One server, which holds a share of a model; a `DenseServer`."""

    def __init__(self, servers: Servers, server: int, model: int) -> None:
        self._servers = servers
        self._server = server
        self._model = model

    def pull(self, version: int | None = None) -> tuple[int, Mapping[str, Array] | None]:
        """Ask for the parameters that have changed."""
        answer = self._call(protocol.PULL_DENSE, Message({"version": version}))
        version, tensors = answer.head.version, answer.head.tensors
        return version, None if tensors is None else tensors_of(tensors, answer.arrays)

    def push_gradients(
        self,
        gradients: Mapping[str, Array],
        version: int,
        *,
        trainer: str,
        sequence: int,
        lr: float | None = None,
    ) -> Answer:
        """Send gradients; the server steps its optimizer."""
        head = {"version": version, "trainer": trainer, "sequence": sequence, "lr": lr}
        answer = self._call(protocol.PUSH_DENSE, tensors_message(gradients, **head))
        return Answer(*answer.head.answer)

    def next_sequence(self, trainer: str) -> int:
        """Ask for the number of the next push."""
        return self._call(protocol.NEXT_SEQUENCE, Message({"trainer": trainer})).head.sequence

    def flush(self) -> int:
        """Wait until all pushes are applied."""
        return self._call(protocol.FLUSH_DENSE, Message({})).head.version

    def state(self) -> dict[str, Any]:
        """Ask for parameters and optimizer state."""
        return state_of(self._call(protocol.DENSE_STATE, Message({})).arrays)

    def load_state(self, state: Mapping[str, Any], *, first: bool = False) -> None:
        """Replace parameters and optimizer state."""
        self._call(protocol.LOAD_DENSE_STATE, state_message(state, **({"first": True} if first else {})))

    def _call(self, declared: Call[Any, A], call: Message) -> Message[A]:
        head = {**call.head, "model": self._model}
        return self._servers.peer(self._server, "dense").call(declared, head, call.arrays)
