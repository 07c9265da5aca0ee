"""`DenseServerProxy`: the dense parameters of a server, called over their own channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from karvan.dense.step_policies import Answer
from karvan.dense.tensor_checks import Array
from karvan.dense.wire_format import state_message, state_of, tensors_message, tensors_of
from karvan.distributed.parameter_servers import Servers
from karvan.wire import Message


class DenseServerProxy:
    """One server, which holds a share of a model; a `DenseServer`."""

    def __init__(self, servers: Servers, server: int, model: int) -> None:
        self._servers = servers
        self._server = server
        self._model = model

    def pull(self, version: int | None = None) -> tuple[int, Mapping[str, Array] | None]:
        """Ask for the parameters that have changed."""
        answer = self._call("pull_dense", Message({"version": version}))
        return int(answer.head["version"]), tensors_of(answer) if answer.arrays else None

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
        answer = self._call("push_dense", tensors_message(gradients, **head))
        return Answer(*answer.head["answer"])

    def next_sequence(self, trainer: str) -> int:
        """Ask for the number of the next push."""
        return int(self._call("next_sequence", Message({"trainer": trainer})).head["sequence"])

    def flush(self) -> int:
        """Wait until all pushes are applied."""
        return int(self._call("flush_dense", Message({})).head["version"])

    def state(self) -> dict[str, Any]:
        """Ask for parameters and optimizer state."""
        return state_of(self._call("dense_state", Message({})))

    def load_state(self, state: Mapping[str, Any], *, first: bool = False) -> None:
        """Replace parameters and optimizer state."""
        self._call("load_dense_state", state_message(state, **({"first": True} if first else {})))

    def _call(self, method: str, call: Message) -> Message:
        head = {**call.head, "model": self._model}
        return self._servers.peer(self._server, "dense").call(method, head, call.arrays)
