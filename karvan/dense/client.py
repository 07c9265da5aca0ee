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
read here, unless pull_every is above 1. Servers receive the model before trainers join
(`DenseServerProxy.load_state`), including the parameters that need no gradient; buffers, such as the means of
a batch norm, stay local to each trainer.

All servers receive a push with the same sequence number. If one rejects it, or cannot be reached, the number
is used again: the next `step` is for the same batch, and servers that have accepted it change nothing. A
trainer that is restarted under its name continues with the numbers the servers expect.

With pull_every=k, a trainer pulls before every k-th step. In between, the optimizer makes each accepted step
here, too, with state of its own: that of this trainer's gradients. So the local parameters have all of this
trainer's steps, and the steps that the others had made at the last pull. A gradient's version says so: it is
the version pulled, plus the steps that the servers have made of this trainer's pushes since. A push that was
rejected is computed again after a pull, and the step after it pulls, too: servers that had accepted the first
attempt have the step of that one, so the local parameters would have it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from karvan.argument_checks import check_counts
from karvan.dense.optimizer_spec import rate_of
from karvan.dense.step_policies import Answer, Outcome, Staleness
from karvan.dense.tensors import Array, all_finite, dense_tensor
from karvan.native import _native

# Divides dense parameters over servers, and their state over any other number of servers.
#
# States can be merged if they were taken between the same pushes, which the caller must ensure; so merge them
# when they are saved, not when they are needed. Versions may differ, because servers may receive pushes in
# different orders: all continue from the largest.


def owner_of_parameter(name: str, servers: int) -> int:
    """The server whose range of hashes contains the name's: FarmHash64 of its UTF-8; must not change."""
    if servers < 1:
        raise ValueError(f"servers must be at least 1, got {servers}.")
    upper = (_native.farm64(name.encode()) & 0xFFFF_FFFF_FFFF_FFFF) >> 32
    return upper * servers >> 32


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a single server that holds what all of these hold."""
    if not states:
        raise ValueError("Expected the states of at least one server, got none.")
    for state in states[1:]:
        if state["optimizer"] != states[0]["optimizer"]:
            raise ValueError(
                f"Servers of one model have the same optimizer, got {states[0]['optimizer']} and "
                f"{state['optimizer']}."
            )
    return {
        "version": max(state["version"] for state in states),
        "optimizer": states[0]["optimizer"],
        "parameters": _joined([state["parameters"] for state in states]),
        "slots": _joined([state["slots"] for state in states]),
        "waiting": _merged_waiting([state["waiting"] for state in states]),
        "answers": _merged_answers([state["answers"] for state in states]),
    }


def split_state(state: Mapping[str, Any], servers: int) -> list[dict[str, Any]]:
    """The states of so many servers, each with the parameters it owns; tensors are shared, not copied."""
    return [
        {
            **state,
            "parameters": _owned(state["parameters"], server, servers),
            "slots": _owned(state["slots"], server, servers),
            "waiting": [
                {**push, "gradients": _owned(push["gradients"], server, servers)} for push in state["waiting"]
            ],
        }
        for server in range(servers)
    ]


def _owned(values: Mapping[str, Any], server: int, servers: int) -> dict[str, Any]:
    return {name: value for name, value in values.items() if owner_of_parameter(name, servers) == server}


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined = {name: value for part in parts for name, value in part.items()}
    if len(joined) != sum(map(len, parts)):
        twice = sorted(name for name in joined if sum(name in part for part in parts) > 1)
        raise ValueError(f"Each parameter is on one server, but these are on several: {', '.join(twice)}.")
    return dict(sorted(joined.items()))


def _merged_waiting(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    pushes = [[(push["trainer"], push["sequence"]) for push in part] for part in parts]
    if any(each != pushes[0] for each in pushes):
        raise ValueError(
            "The states are not of one moment: on different servers different pushes wait for a step, "
            + " and ".join(str(each) for each in pushes)
            + ". Expected states that were taken while no push is in flight, or after a flush."
        )
    return [
        {
            **same[0],
            "staleness": max(push["staleness"] for push in same),
            "gradients": _joined([push["gradients"] for push in same]),
        }
        for same in zip(*parts, strict=True)
    ]


def _merged_answers(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """All answers that servers remember; of different answers to a push the smallest: a refusal, if any."""
    merged: dict[str, dict[int, list[Any]]] = {}
    for part in parts:
        for trainer, answers in part.items():
            its = merged.setdefault(trainer, {})
            for answer in answers:
                its[answer[0]] = min(its.get(answer[0], answer), answer)
    return {trainer: [its[number] for number in sorted(its)] for trainer, its in sorted(merged.items())}


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

    call: a `map` that calls the servers, such as a thread pool's, to call all at once. pull_every: see above.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        servers: Sequence[DenseServer],
        *,
        trainer: str,
        call: Callable[..., Iterable[Any]] = map,
        pull_every: int = 1,
    ) -> None:
        if not servers:
            raise ValueError("Expected at least one server, got none.")
        check_counts(1, pull_every=pull_every)
        self._servers = list(servers)
        self._optimizer = optimizer
        self._trainer = trainer
        self._call = call
        self._parameters = dict(model.named_parameters())
        self._trained = _trained(optimizer, self._parameters)
        self._owners = {name: owner_of_parameter(name, len(servers)) for name in self._parameters}
        self._versions: list[int | None] = [None] * len(servers)
        self._sequence = 0
        self._pull_every = pull_every
        self._steps_left = 0  # until the next pull
        self._own_steps = [0] * len(servers)  # of the servers since the last pull, by this trainer's pushes
        self._moved = False  # whether steps were made here since the last pull
        self._rejected = False  # whether the last push was
        self.staleness = Staleness()

    def join(self) -> None:
        """Take the servers' parameters, and continue with the sequence numbers that they expect."""
        self._versions = [None] * len(self._servers)
        self._sequence = max(self._call(lambda server: server.next_sequence(self._trainer), self._servers))
        self._rejected = False
        self.pull()

    def before_step(self) -> bool:
        """Pull if it is time to, or if the last push was rejected; returns whether there was anything new."""
        if self._steps_left and not self._rejected:
            self._steps_left -= 1
            return False
        newer = self.pull()
        self._steps_left = self._pull_every - 1
        return newer

    def pull(self) -> bool:
        """Take parameters that are newer than the local ones, if there are any; the next step pulls again."""
        known = [None] * len(self._servers) if self._moved else self._versions
        answers = list(self._call(lambda server, version: server.pull(version), self._servers, known))
        self._steps_left, self._moved = 0, False
        self._own_steps = [0] * len(self._servers)
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
        repeats, self._rejected = self._rejected, outcome == "rejected"
        steps_here = outcome == "accepted" and self._pull_every > 1
        if steps_here:
            self._optimizer.step()
            self._moved = True
        self._optimizer.zero_grad()
        if outcome != "rejected":
            self._sequence += 1
            if repeats:
                self._steps_left = 0
        if outcome == "accepted" and not steps_here:
            # Without gradients it changes nothing, but schedulers and hooks see that there was a step.
            self._optimizer.step()
        return outcome

    def _push(self, gradients: Mapping[str, Tensor], rate: float) -> Outcome:
        sequence = self._sequence

        def push(server: DenseServer, share: Mapping[str, Tensor], version: int | None) -> Answer:
            if version is None:
                raise RuntimeError("Gradients of parameters that were never pulled: expected join() first.")
            return server.push_gradients(share, version, trainer=self._trainer, sequence=sequence, lr=rate)

        versions = [
            None if pulled is None else pulled + own
            for pulled, own in zip(self._versions, self._own_steps, strict=True)
        ]
        answers: list[Answer] = list(self._call(push, self._servers, self._shares(gradients), versions))
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
        if self._pull_every > 1:
            for number, (answer, version) in enumerate(zip(answers, versions, strict=True)):
                # The answer to a repeated push may be older than the last pull, which has its step already.
                if answer.applied and version is not None and answer.version > version:
                    self._own_steps[number] += 1
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
            f"The optimizer has {len(ids)} parameters, but {len(ids) - len(trained)} do not belong to the "
            "model: expected an optimizer of the model's parameters."
        )
    return trained
