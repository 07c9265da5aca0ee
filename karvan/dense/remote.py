"""Dense parameters that are updated on parameter servers (mode async).

A step may take several attempts: pull newer parameters, compute, push (with `pull_every`, some steps do not
pull; see `AsyncDense`). One whose push is rejected is computed
again, with the vectors that its rows had at the first attempt; rows are looked up, counted and updated once.
Whenever a fit starts, the servers receive the parameters and optimizer state of rank 0. Before an evaluation
and a checkpoint, and at the end, all trainers wait for each other: pushes that wait for others become a step,
and every trainer gets the servers' parameters; if trainers make steps of their own (`pull_every` above 1),
also the state of the servers' optimizers before a checkpoint, so that a fit that resumes from it continues as
one that went on.

Ranks take their batches in rounds in this mode, too, which limits how far they drift apart, and so how often
a push is rejected. Gradients of rows are divided by `grads_to_wait`, the pushes of a step, not by the number
of trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from karvan.argument_checks import check_counts
from karvan.dense.steps import Answer, Array, LocalDense, Outcome, all_finite, dense_tensor
from karvan.dense.wire_format import describe, rate_of, state_message, state_of, tensors_message, tensors_of
from karvan.distributed import Connection, RankError
from karvan.distributed.parameter_servers import OwnCommits, Servers
from karvan.embedding import EmbeddingEngine
from karvan.native import _native
from karvan.protocol import parameter_server as protocol
from karvan.wire import Message
from karvan.wire.schema import A, Call


def owner_of_parameter(name: str, servers: int) -> int:
    """The server whose range of hashes contains the name's: FarmHash64 of its UTF-8; must not change."""
    if servers < 1:
        raise ValueError(f"servers must be at least 1, got {servers}.")
    upper = (_native.farm64(name.encode()) & 0xFFFF_FFFF_FFFF_FFFF) >> 32
    return upper * servers >> 32


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a single server that holds what all of these hold.

    States can be merged if they were taken between the same pushes, which the caller must ensure; so merge
    them when they are saved, not when they are needed. Versions may differ, because servers may receive
    pushes in different orders: all continue from the largest.
    """
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


def first_state(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a single server that has just got these parameters, and what the optimizer has of them."""
    return {
        "version": 0,
        "optimizer": describe(optimizer),
        "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
        "slots": {name: dict(optimizer.state.get(parameter, {})) for name, parameter in parameters.items()},
        "waiting": [],
        "answers": {},
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
    if any(push != pushes[0] for push in pushes):
        raise ValueError(
            "The states are not of one moment: on different servers different pushes wait for a step, "
            + " and ".join(str(push) for push in pushes)
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


class AsyncDense(LocalDense):
    """A model whose dense parameters are on servers, which must be listed in the same order every time.

    call: a `map` that calls the servers, such as a thread pool's, to call all at once. pull_every: see above.

    A trainer's client of dense parameters on servers: pull, compute gradients, push.

        dense = AsyncDense(model, optimizer, servers, trainer="trainer-0")
        dense.join()
        for batch in batches:
            while True:
                dense.before_step()
                loss(model, batch).backward()
                if dense.step() != "rejected":
                    break

    The optimizer is the user's; it steps on the servers, and only its learning rate, which schedulers change,
    is read here, unless pull_every is above 1. Servers receive the model before trainers join
    (`DenseServerProxy.load_state`), including the parameters that need no gradient; buffers, such as the
    means of a batch norm, stay local to each trainer.

    All servers receive a push with the same sequence number. If one rejects it, or cannot be reached, the
    number is used again: the next `step` is for the same batch, and servers that have accepted it change
    nothing. A trainer that is restarted under its name continues with the numbers the servers expect.

    With pull_every=k, a trainer pulls before every k-th step. In between, the optimizer makes each accepted
    step here, too, with state of its own: that of this trainer's gradients. So the local parameters have all
    of this trainer's steps, and the steps that the others had made at the last pull. A gradient's version
    says so: it is the version pulled, plus the steps that the servers have made of this trainer's pushes
    since. A push that was rejected is computed again after a pull, and the step after it pulls, too: servers
    that had accepted the first attempt have the step of that one, so the local parameters would have it
    twice.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        servers: Sequence[DenseServerProxy],
        *,
        trainer: str,
        call: Callable[..., Iterable[Any]] = map,
        pull_every: int = 1,
    ) -> None:
        if not servers:
            raise ValueError("Expected at least one server, got none.")
        check_counts(1, pull_every=pull_every)
        super().__init__(optimizer)
        self._servers = list(servers)
        self._optimizer: Optimizer = optimizer
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
        versions = [None] * len(self._servers) if self._moved else self._versions
        answers = list(self._call(lambda server, version: server.pull(version), self._servers, versions))
        self._steps_left, self._moved = 0, False
        self._own_steps = [0] * len(self._servers)
        newer = False
        for number, (version, parameters) in enumerate(answers):
            if parameters is not None:
                self._take(number, parameters)
                newer = True
            self._versions[number] = version
        return newer

    @override
    def fresh(self) -> None:
        self.before_step()

    @property
    @override
    def skips_on_device(self) -> bool:
        """Servers have to know whether a step is made."""
        return False

    @override
    def step(self) -> Outcome:
        """Push the gradients, and drop them.

        "rejected": compute the gradients of the same batch again, after `before_step`. "not finite": nothing
        was applied, continue with the next batch.
        """
        gradients = {
            name: dense_tensor(name, parameter.grad, copy=False)
            for name, parameter in self._trained.items()
            if parameter.grad is not None
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

        def push(server: DenseServerProxy, share: Mapping[str, Tensor], version: int | None) -> Answer:
            if version is None:
                raise RuntimeError("Gradients of parameters that were never pulled: expected join() first.")
            return server.push_gradients(share, version, trainer=self._trainer, sequence=sequence, lr=rate)

        versions = [
            None if pulled is None else pulled + own_step
            for pulled, own_step in zip(self._versions, self._own_steps, strict=True)
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
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in parameters.items() if id(parameter) in ids}
    if len(trained) != len(ids):
        raise ValueError(
            f"The optimizer has {len(ids)} parameters, but {len(ids) - len(trained)} do not belong to the "
            "model: expected an optimizer of the model's parameters."
        )
    return trained


class DenseServerProxy:
    """One server, which holds a share of a model."""

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


_MOST_REJECTIONS = 100  # of a step, in addition to those that faster trainers can cause


class RemoteDense(AsyncDense):
    """Parameters that step on parameter servers."""

    proxy: type[DenseServerProxy] = DenseServerProxy

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        engines: Sequence[EmbeddingEngine],
        connection: Connection,
        prefetch: int,
    ) -> None:
        assert connection.servers is not None
        describe(optimizer)  # raises if a server cannot run it
        servers, settings = connection.servers, connection.settings.dense
        number = servers.new_model()
        proxies = [self.proxy(servers, server, number) for server in range(len(servers))]
        super().__init__(
            model,
            optimizer,
            proxies,
            trainer=f"trainer-{connection.rank}",
            call=map if len(servers) == 1 else ThreadPoolExecutor(len(servers), "karvan-dense").map,
            pull_every=settings.pull_every,
        )
        self._connection = connection
        self._number = number
        self._rejects = settings.rejects
        self._engines = list(engines) if self._rejects else []
        self._most = _MOST_REJECTIONS + connection.world_size * (prefetch + 2)

    @override
    def begin(self) -> None:
        self._first_does(self._fill)
        self.join()

    @override
    def attempts(self) -> Generator[int, None, None]:
        try:
            for number in range(self._most):
                for engine in self._engines:
                    engine.replay.replay() if number else engine.replay.record()
                self.fresh()
                yield number
        finally:
            for engine in self._engines:
                engine.replay.end()
        raise RuntimeError(
            f"The servers have rejected the gradients of a step {self._most} times: others were always "
            "faster. Expected a larger tolerance, or trainers of similar speed."
        )

    @override
    def step(self) -> Outcome:
        outcome = super().step()
        if outcome == "rejected" and not self._rejects:
            raise RuntimeError(
                "A parameter server is behind the gradients that it received: it has lost steps. "
                "Expected a job that returns to its checkpoint when a server is lost."
            )
        return outcome

    @override
    def settle(self) -> None:
        self._connection.main.barrier()
        self._first_does(lambda: list(self._call(DenseServerProxy.flush, self._servers)))
        self.pull()

    @override
    def take(self) -> None:
        self.settle()
        if self._pull_every > 1:
            self._take_slots()
            self._connection.main.barrier()  # nobody pushes before all have the same state
        else:
            self._first_does(self._take_slots)

    def _fill(self) -> None:
        """Send this rank's parameters and optimizer state to the servers."""
        state = first_state(self._optimizer, self._parameters)
        list(self._call(DenseServerProxy.load_state, self._servers, split_state(state, len(self._servers))))

    def _take_slots(self) -> None:
        """Copy the state of the servers' optimizers into this rank's optimizer."""
        slots = merge_states(list(self._call(DenseServerProxy.state, self._servers)))["slots"]
        if self._pull_every == 1:
            for name, parameter in self._parameters.items():
                if slots[name]:
                    self._optimizer.state[parameter] = slots[name]
            return
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        trained = [
            names[id(parameter)] for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        state = {index: slots[name] for index, name in enumerate(trained) if slots[name]}
        # This moves the state to the parameters' devices, where steps need it.
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})

    def _first_does(self, work: Callable[[], object]) -> None:
        """Rank 0 works while the others wait; an error is raised on all."""
        channel, error = self._connection.main, None
        if channel.rank == 0:
            try:
                work()
            except Exception as reason:
                if channel.world_size == 1:
                    raise
                error = reason
        problem = channel.gather_json(None if error is None else f"{type(error).__name__}: {error}")[0]
        if error is not None:
            raise error
        if problem is not None:
            raise RankError(f"Rank 0 could not reach the dense parameters on the servers: {problem}")


class StagingServerProxy(DenseServerProxy):
    """One server, at which gradients are staged for the step that this member has begun."""

    @override
    def push_gradients(
        self, gradients: Mapping[str, Array], version: int, *, lr: float | None = None, **_: Any
    ) -> Answer:
        """Stage gradients. The answer is that of a step: the commit will make one, or the trainer fails."""
        commits = self._servers.commits
        assert isinstance(commits, OwnCommits)
        head = {"version": version, "step": commits.step, "lr": lr}
        model_version = self._call(protocol.STAGE_DENSE, tensors_message(gradients, **head)).head.version
        return Answer(True, model_version + 1, True, model_version - version)


class ElasticDense(RemoteDense):
    """Parameters that step on parameter servers, when a step is committed.

    As in `RemoteDense`, a trainer pulls parameters, computes, and pushes gradients. But servers only stage
    what it pushes, and apply it when the trainer commits its step (`distributed/parameter_servers.py`):
    together with the gradients of rows, at all servers or at none.

    Nobody sends parameters to the servers by itself: one trainer does when a run begins (`fill`), and those
    who come later take what is there (`join`).
    """

    proxy = StagingServerProxy

    @override
    def begin(self) -> None:
        """What servers have is decided by all trainers."""

    def fill(self) -> None:
        """The run begins with the parameters and optimizer state of this trainer."""
        self._fill()
        self.join()

    @override
    def step(self) -> Outcome:
        """Gradients are staged."""
        outcome = super().step()
        if outcome == "accepted":
            commits = self._connection.servers and self._connection.servers.commits
            assert isinstance(commits, OwnCommits)
            commits.dense.append(self._number)
        return outcome

    @override
    def settle(self) -> None:
        """Trainers have met, and none has a step in progress."""
        self.pull()

    @override
    def take(self) -> None:
        self.settle()
        self._take_slots()
