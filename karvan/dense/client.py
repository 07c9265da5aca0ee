"""A trainer's client of dense parameters on servers: pull, compute gradients, push.

    dense = AsyncDense(model, optimizer, servers, trainer="trainer-0")
    dense.join()
    for batch in batches:
        while True:
            dense.before_step()
            loss(model, batch).backward()
            if dense.step() != "rejected":
                break

The optimizer is the user's; it steps on the servers, and only its learning rate, which schedulers change, is
read here. Servers receive the model before trainers join (`DenseServerProxy.load_state`), including the
parameters that need no gradient; buffers, such as the means of a batch norm, stay local to each trainer.

All servers receive a push with the same sequence number. If one rejects it, or cannot be reached, the number
is used again: the next `step` is for the same batch, and servers that have accepted it change nothing. A
trainer that is restarted under its name continues with the numbers the servers expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from karvan.dense.optimizer_spec import rate_of
from karvan.dense.sharding import owner_of_parameter
from karvan.dense.step_policies import Answer, Outcome, Staleness
from karvan.dense.tensor_checks import Array, all_finite, dense_tensor


class DenseServer(Protocol):
    """A server as a trainer sees it: `DenseParameters` itself, or a proxy for one in another process."""

    def pull(self, version: int | None = None) -> tuple[int, Mapping[str, Array] | None]:
        """The version, and its parameters unless the caller has it."""

    def push_gradients(
        self,
        gradients: Mapping[str, Array],
        version: int,
        *,
        trainer: str,
        sequence: int,
        lr: float | None = None,
    ) -> Answer:
        """Take gradients."""

    def next_sequence(self, trainer: str) -> int:
        """The number after a trainer's largest."""


class AsyncDense:
    """A model whose dense parameters are on servers, which must be listed in the same order every time.

    call: a `map` that calls the servers, such as a thread pool's, to call all at once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        servers: Sequence[DenseServer],
        *,
        trainer: str,
        call: Callable[..., Iterable[Any]] = map,
    ) -> None:
        if not servers:
            raise ValueError("Expected at least one server, got none.")
        self._servers = list(servers)
        self._optimizer = optimizer
        self._trainer = trainer
        self._call = call
        self._parameters = dict(model.named_parameters())
        self._trained = _trained(optimizer, self._parameters)
        self._owners = {name: owner_of_parameter(name, len(servers)) for name in self._parameters}
        self._versions: list[int | None] = [None] * len(servers)
        self._sequence = 0
        self.staleness = Staleness()

    def join(self) -> None:
        """Take the servers' parameters, and continue with the sequence numbers that they expect."""
        self._versions = [None] * len(self._servers)
        self._sequence = max(self._call(lambda server: server.next_sequence(self._trainer), self._servers))
        self.before_step()

    def before_step(self) -> bool:
        """Take parameters that are newer than the local ones; returns whether there were any."""
        answers = list(
            self._call(lambda server, version: server.pull(version), self._servers, self._versions)
        )
        newer = False
        for number, (version, parameters) in enumerate(answers):
            if parameters is not None:
                self._take(number, parameters)
                newer = True
            self._versions[number] = version
        return newer

    def step(self) -> Outcome:
        """Push the gradients, and drop them.

        "rejected": compute the gradients of the same batch again, after `before_step`. "not finite": nothing
        was applied, continue with the next batch.
        """
        gradients = {
            name: dense_tensor(name, each.grad, copy=False)
            for name, each in self._trained.items()
            if each.grad is not None
        }
        if not all_finite(gradients.values()):
            self._optimizer.zero_grad()
            return "not finite"
        outcome = self._push(gradients, rate_of(self._optimizer))
        self._optimizer.zero_grad()
        if outcome != "rejected":
            self._sequence += 1
        if outcome == "accepted":
            # Without gradients it changes nothing, but schedulers and hooks see that there was a step.
            self._optimizer.step()
        return outcome

    def _push(self, gradients: Mapping[str, Tensor], rate: float) -> Outcome:
        sequence = self._sequence

        def push(server: DenseServer, share: Mapping[str, Tensor], version: int | None) -> Answer:
            if version is None:
                raise RuntimeError("Gradients of parameters that were never pulled: expected join() first.")
            return server.push_gradients(share, version, trainer=self._trainer, sequence=sequence, lr=rate)

        answers: list[Answer] = list(self._call(push, self._servers, self._shares(gradients), self._versions))
        reasons = {answer.reason for answer in answers if not answer.accepted}
        behind = max(0, *(answer.staleness for answer in answers))
        self.staleness.pushes += 1
        self.staleness.total += behind
        self.staleness.largest = max(self.staleness.largest, behind)
        if "forgotten" in reasons:
            raise RuntimeError(
                f"Push {sequence} of '{self._trainer}' is older than what a server remembers, so it is "
                "unknown whether it was applied. Expected one process for each trainer's name."
            )
        if reasons & {"stale", "ahead"}:
            self.staleness.rejected += 1
            return "rejected"
        return "not finite" if reasons else "accepted"

    def _shares(self, values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        shares: list[dict[str, Tensor]] = [{} for _ in self._servers]
        for name, value in values.items():
            shares[self._owners[name]][name] = value
        return shares

    def _take(self, number: int, parameters: Mapping[str, Array]) -> None:
        owned = {name for name, owner in self._owners.items() if owner == number}
        if owned != set(parameters):
            raise ValueError(
                f"Server {number} of {len(self._servers)} must have {sorted(owned)}, "
                f"but it returned {sorted(parameters)}."
            )
        with torch.no_grad():
            for name, value in parameters.items():
                self._parameters[name].copy_(dense_tensor(name, value, copy=False))


def _trained(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer has, by name."""
    ids = {id(each) for group in optimizer.param_groups for each in group["params"]}
    trained = {name: each for name, each in parameters.items() if id(each) in ids}
    if len(trained) != len(ids):
        raise ValueError(
            f"The optimizer has {len(ids)} parameters, of which {len(ids) - len(trained)} are not the "
            "model's: expected an optimizer of the model's parameters."
        )
    return trained
