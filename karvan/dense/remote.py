"""Dense parameters that are updated on parameter servers (mode async).

A step may take several attempts: pull newer parameters, compute, push (with `pull_every`, some steps do not
pull; see `client.py`). One whose push is rejected is computed
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

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from karvan.dense.client import AsyncDense, merge_states, split_state
from karvan.dense.optimizer_spec import describe
from karvan.dense.step_policies import Answer, LocalDense, Outcome, Staleness
from karvan.dense.tensors import Array, state_message, state_of, tensors_message, tensors_of
from karvan.distributed import Connection, RankError
from karvan.distributed.parameter_servers import Servers
from karvan.distributed.step_commits import OwnCommits
from karvan.embedding import EmbeddingEngine
from karvan.protocol import parameter_server as protocol
from karvan.wire import Message
from karvan.wire.schema import A, Call

# `DenseServerProxy`: the dense parameters of a server, called over their own channel.


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


_MOST_REJECTIONS = 100  # of a step, in addition to those that faster trainers can cause


class RemoteDense(LocalDense):
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
        super().__init__(optimizer)
        assert connection.servers is not None
        describe(optimizer)  # raises if a server cannot run it
        servers, number = connection.servers, connection.servers.new_model()
        self._connection = connection
        self._number = number
        self._parameters = dict(model.named_parameters())
        self._servers = [self.proxy(servers, server, number) for server in range(len(servers))]
        self._pool = ThreadPoolExecutor(len(servers), "karvan-dense") if len(servers) > 1 else None
        self._call: Callable[..., Any] = map if self._pool is None else self._pool.map
        name, settings = f"trainer-{connection.rank}", connection.settings.dense
        self._dense = AsyncDense(
            model,
            optimizer,
            self._servers,
            trainer=name,
            call=self._call,
            pull_every=settings.pull_every,
        )
        self._steps_alone = settings.pull_every > 1
        self._rejects = settings.rejects
        self._engines = list(engines) if self._rejects else []
        self._most = _MOST_REJECTIONS + connection.world_size * (prefetch + 2)

    @property
    @override
    def staleness(self) -> Staleness:
        return self._dense.staleness

    @override
    def begin(self) -> None:
        self._first_does(self._fill)
        self._dense.join()

    @override
    def fresh(self) -> None:
        self._dense.before_step()

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

    @property
    @override
    def skips_on_device(self) -> bool:
        """Servers have to know whether a step is made."""
        return False

    @override
    def step(self) -> Outcome:
        outcome = self._dense.step()
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
        self._dense.pull()

    @override
    def take(self) -> None:
        self.settle()
        if self._steps_alone:
            self._take_slots()
            self._connection.main.barrier()  # nobody pushes before all have the same state
        else:
            self._first_does(self._take_slots)

    def _fill(self) -> None:
        """Send this rank's parameters and optimizer state to the servers."""
        assert self.optimizer is not None
        own = self.optimizer.state
        state = {
            "version": 0,
            "optimizer": describe(self.optimizer),
            "parameters": {name: each.detach() for name, each in self._parameters.items()},
            "slots": {
                name: dict(own[each]) if each in own else {} for name, each in self._parameters.items()
            },
            "waiting": [],
            "answers": {},
        }
        shares = split_state(state, len(self._servers))
        list(self._call(DenseServerProxy.load_state, self._servers, shares))

    def _take_slots(self) -> None:
        """Copy the state of the servers' optimizers into this rank's optimizer."""
        assert self.optimizer is not None
        slots = merge_states(list(self._call(DenseServerProxy.state, self._servers)))["slots"]
        if not self._steps_alone:
            for name, parameter in self._parameters.items():
                if slots[name]:
                    self.optimizer.state[parameter] = slots[name]
            return
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        trained = [names[id(each)] for group in self.optimizer.param_groups for each in group["params"]]
        state = {index: slots[name] for index, name in enumerate(trained) if slots[name]}
        # This moves the state to the parameters' devices, where steps need it.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

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


# Dense parameters on parameter servers, of trainers that come and go (mode async with sharding: dynamic).
#
# As in `remote.py`, a trainer pulls parameters, computes, and pushes gradients. But servers only stage what
# it pushes, and apply it when the trainer commits its step (`distributed/step_commits.py`): together
# with the gradients of rows, at all servers or at none.
#
# Nobody sends parameters to the servers by itself: one trainer does when a run begins (`fill`), and those who
# come later take what is there (`join`).


class StagingServerProxy(DenseServerProxy):
    """One server, at which gradients are staged for the step that this member has begun."""

    def push_gradients(
        self,
        gradients: Mapping[str, Array],
        version: int,
        *,
        trainer: str,
        sequence: int,
        lr: float | None = None,
    ) -> Answer:
        """Stage gradients. The answer is that of a step: the commit will make one, or the trainer fails."""
        commits = self._servers.commits
        assert isinstance(commits, OwnCommits)
        head = {"version": version, "step": commits.step, "lr": lr}
        found = self._call(protocol.STAGE_DENSE, tensors_message(gradients, **head)).head.version
        return Answer(True, found + 1, True, found - version)


class ElasticDense(RemoteDense):
    """Parameters that step on parameter servers, when a step is committed."""

    proxy = StagingServerProxy

    @override
    def begin(self) -> None:
        """What servers have is decided by all trainers."""

    def fill(self) -> None:
        """The run begins with the parameters and optimizer state of this trainer."""
        self._fill()
        self.join()

    def join(self) -> None:
        """Take the parameters of the servers."""
        self._dense.join()

    @override
    def step(self) -> Outcome:
        """Gradients are staged."""
        outcome = super().step()
        if outcome == "accepted":
            commits = self._connection.servers and self._connection.servers.commits
            assert isinstance(commits, OwnCommits)
            commits.note_dense(self._number)
        return outcome

    @override
    def settle(self) -> None:
        """Trainers have met, and none has a step in progress."""
        self._dense.pull()

    @override
    def take(self) -> None:
        self.settle()
        self._take_slots()
