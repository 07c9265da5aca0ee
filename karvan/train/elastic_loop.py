"""`ElasticLoop`: the steps of a loop written by hand, together with the trainers of an elastic job.

Each trainer computes gradients of its own batch. Before `optimizer.step()` changes anything, a hook adds
them up over the trainers of the round, and every trainer makes the step of their mean. So all of them have
the same parameters after the same number of steps.

- **A trainer is lost**: the sum is not complete. The others meet in the next round and add up again what they
  have computed. If one of them has got the sum before, the others get it from that one.
- **A trainer joins**: it gets parameters, the optimizer's state and the counts before its first batch.
- **A trainer has no batch**, because others work on the last records of an epoch: it takes part with none
  (`take_part`), since the others wait for it.
- **The records have ended**: trainers wait for each other (`finish`), so that one that was started again
  still finds what the others have.

Trainers report their records themselves, after the step. The batch of a trainer that is lost between the two
is in the step, and is trained again by others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from karvan.checkpoint.format.state_bytes import pack, unpack
from karvan.clock import clock
from karvan.distributed import RankError, current
from karvan.distributed.elastic.group import ElasticGroup
from karvan.distributed.elastic.ordered_sum import ordered_sum
from karvan.train.step.optimizer_step import engines_of

_log = logging.getLogger("karvan.train")

_IDLE = 0.1  # seconds between two steps in which nobody has a batch
_COUNTS = (
    3  # at the end of a sum: batches, trainers that know of others that want to join, trainers at the end
)


class ElasticLoop:
    """Averages the gradients of a model over the trainers that are there; alone, it changes nothing.

    model, optimizer: those of the loop. group: the trainers, by default those of `kv.connect` in an elastic
    job. Call `begin` before each batch; `optimizer.step()` is then the step of all, and `finish` at the end.
    steps: how many were made; batches: how many are in them, over all trainers.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: ElasticGroup | None = None
    ) -> None:
        self.steps = 0
        self.batches = 0
        self._model = model
        self._optimizer = optimizer
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._group = current().group if group is None else group
        if self._group is not None and engines_of(model):
            raise ValueError(
                "ElasticLoop expects a model without embedding tables, whose rows would differ between "
                "trainers: use a kv.Trainer."
            )
        self._begun = False  # whether this trainer has the state of the others
        self._regroup_due = True
        self._last: Tensor | None = None  # the sum of the last step
        self._summed: Tensor | None = None  # that of the step which is being made
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def world_size(self) -> int:
        """How many trainers there are."""
        return 1 if self._group is None else self._group.world_size

    def begin(self) -> None:
        """Before a batch is computed: have the state of the others."""
        while self._group is not None and self._regroup_due:
            try:
                self._meet(self._group)
            except RankError as error:
                _log.warning("%s", self._group.describe_loss(error))

    def take_part(self) -> None:
        """Make one step with the others, without a batch."""
        self.begin()
        if self._group is None or not self._step_without_batch(self._group, ended=False)[0]:
            clock.sleep(_IDLE)

    def finish(self) -> None:
        """The records have ended: wait for the others, and part from them."""
        self.begin()
        if self._group is not None:
            ended = 0
            while ended < self._group.world_size:
                _, ended = self._step_without_batch(self._group, ended=True)
            self._group.dissolve()
        for hook in self._hooks:
            hook.remove()

    def _step_without_batch(self, group: ElasticGroup, ended: bool) -> tuple[int, int]:
        """The numbers of batches in the step, and of trainers at the end."""
        self._summed = total = self._sum(group, self._flat(batches=0, ended=ended))
        batches, _, at_end = _counts(total)
        if batches:
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            self._end_step(total)
        return batches, at_end

    # A step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if self._group is None:
            return
        if not self._begun:
            raise RuntimeError("ElasticLoop expects begin() before each batch, got a step without it.")
        if any(each is not None for each in (*args[1:], *options.values())):
            raise RuntimeError("ElasticLoop expects optimizer.step() without a closure, got one.")
        if self._summed is None:
            self._summed = self._sum(self._group, self._flat(batches=1))
        self._set_gradients(self._summed)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        self.steps += 1
        if self._summed is None:
            self.batches += 1
            return
        self.batches += _counts(self._summed)[0]
        self._last = self._summed
        self._end_step(self._summed)

    def _end_step(self, total: Tensor) -> None:
        self._summed = None
        self._regroup_due |= _counts(total)[1] > 0

    def _sum(self, group: ElasticGroup, mine: Tensor) -> Tensor:
        """The sum over the trainers of a round, whichever completes it."""
        while True:
            try:
                if self._regroup_due:
                    missed = self._meet(group)
                    if missed is not None:
                        return missed
                mine[-2] = float(group.regroup_wanted)
                return ordered_sum(group.channel, [mine], list(range(group.world_size)))
            except RankError as error:
                _log.warning("%s", group.describe_loss(error))
                self._regroup_due = True

    def _flat(self, batches: int, ended: bool = False) -> Tensor:
        """All gradients, whether each exists, and the counts."""
        pieces, exists = [], torch.zeros(len(self._parameters))
        for index, parameter in enumerate(self._parameters):
            if batches and parameter.grad is not None:
                if parameter.grad.layout != torch.strided:
                    raise TypeError(f"ElasticLoop expects dense gradients, got {parameter.grad.layout}.")
                pieces.append(parameter.grad.detach().reshape(-1).to("cpu", torch.float32))
                exists[index] = 1.0
            else:
                pieces.append(torch.zeros(parameter.numel()))
        return torch.cat([*pieces, exists, torch.tensor([float(batches), 0.0, float(ended)])])

    def _set_gradients(self, total: Tensor) -> None:
        mean = total / _counts(total)[0]
        exists = total[-_COUNTS - len(self._parameters) : -_COUNTS]
        first = 0
        for parameter, there in zip(self._parameters, exists.tolist(), strict=True):
            piece = mean[first : first + parameter.numel()]
            first += parameter.numel()
            parameter.grad = piece.reshape(parameter.shape).to(parameter) if there else None

    # A new round

    def _meet(self, group: ElasticGroup) -> Tensor | None:
        """Meet the others; the sum of the step that this trainer is in, if one of them has it."""
        before = group.world_size if self._begun else 0
        group.regroup()
        channel = group.channel
        said = channel.gather_json({"begun": self._begun, "steps": self.steps})
        standings = [each["steps"] if each["begun"] else -1 for each in said]
        leader = standings.index(max(standings))  # the first if nobody has begun
        needed = len(set(standings)) > 1 or standings[0] < 0
        states = channel.gather(pack(self._state()) if needed and channel.rank == leader else b"")
        missed: Tensor | None = None
        if needed and channel.rank != leader:
            state = unpack(states[leader])
            if not self._begun:
                self._load(state)
            elif self.steps < state["steps"]:
                assert self.steps == state["steps"] - 1, "a trainer missed more than one step"
                missed = state["last"]
        self._begun = True
        if channel.rank == 0:
            group.settle()
        channel.barrier()
        self._regroup_due = False
        if channel.rank == 0 and before != channel.world_size:
            _log.info("%d trainers from step %d on.", channel.world_size, self.steps)
        return missed

    def _state(self) -> dict[str, Any]:
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "batches": self.batches,
            "last": self._last,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.batches, self._last = state["steps"], state["batches"], state["last"]


def _counts(total: Tensor) -> tuple[int, int, int]:
    """Of a sum: batches, trainers that know of others that want to join, trainers at the end."""
    batches, joins, ended = total[-_COUNTS:].tolist()
    return int(batches), int(joins), int(ended)
