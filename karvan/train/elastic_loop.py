"""`ElasticLoop`: the steps of a loop written by hand, together with the trainers of an elastic job.

Each trainer computes gradients of its own batch. Before `optimizer.step()` changes anything, a hook adds
them up over the trainers of the round, and every trainer makes the step of their mean, with the learning rate
and other settings of the first trainer that has a batch in it. So all of them have the same parameters after
the same number of steps, also if a program changes its learning rate while another one has no batch.

- **A trainer is lost**: the sum is not complete. The others meet in the next round and add up again what they
  have computed. If one of them has got the sum before, the others get it from that one.
- **A trainer joins**: it gets parameters, the optimizer's state and the counts before its first batch.
- **A trainer has no batch**, because others work on the last records of an epoch: it takes part with none
  (`take_part`), since the others wait for it.
- **The records have ended**: trainers wait for each other (`finish`), so that one that was started again
  still finds what the others have.
- **`global_batches`**: a step has so many batches, however many trainers there are. Each computes its share,
  and keeps the sum of their gradients. Then trainers tell each other how many they have. If some are missing,
  because a trainer was lost or has no records, those that have records compute them.

Trainers report their records themselves, after the step. The batches of a trainer that is lost between the
two are in the step, and are trained again by others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from karvan.argument_checks import check_counts
from karvan.checkpoint.state_tree import pack, unpack
from karvan.clock import clock
from karvan.distributed import RankError, current
from karvan.distributed.elastic import ElasticGroup, ordered_sum
from karvan.train.data_parallel import flat_gradients, set_gradients
from karvan.train.optimizer_step import engines_of

_log = logging.getLogger("karvan.train")

_IDLE = 0.1  # seconds between two steps in which nobody has a batch


class _Counts(NamedTuple):
    """What a sum ends with."""

    batches: int
    samples: int
    joins: int  # trainers that know of others that want to join
    ended: int  # trainers whose records have ended


_COUNTS = len(_Counts._fields)
_Settings = list[dict[str, Any]]  # of an optimizer: learning rate and others of each group of parameters


class ElasticLoop:
    """Average the gradients of a model over trainers that come and go, in a loop of your own.

    It is for models without embedding tables, in a job with `sharding: dynamic`. Call `begin` before each
    batch; `optimizer.step()` is then the step of all trainers. Call `finish` at the end. In a single process
    it changes nothing.

    The attributes `steps`, `batches` and `samples` count the steps so far and what is in them, over all
    trainers; `computed` counts the batches of this trainer.

    Args:
        model: The model of the loop.
        optimizer: Its optimizer.
        group: The trainers; by default those of `kv.connect` in an elastic job.
        global_batches: How many batches make a step, over all trainers; by default one of each trainer.
            `optimizer.step()` returns without a step until they are computed. It should not be below the
            number of trainers.

    Raises:
        ValueError: The model has embedding tables.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loop = kv.train.ElasticLoop(model, optimizer)
        >>> for batch in [torch.randn(8, 4), torch.randn(8, 4)]:
        ...     loop.begin(len(batch))
        ...     optimizer.zero_grad()
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
        >>> loop.finish()
        >>> loop.steps, loop.samples
        (2, 16)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: ElasticGroup | None = None,
        *,
        global_batches: int | None = None,
    ) -> None:
        check_counts(1, global_batches=global_batches)
        self.steps = 0
        self.batches = 0
        self.samples = 0
        self.computed = 0
        self._model = model
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._group = current().group if group is None else group
        if self._group is not None and engines_of(model):
            raise ValueError(
                "ElasticLoop expects a model without embedding tables, because rows would differ between "
                "trainers: use a kv.Trainer."
            )
        self._begun = False  # whether this trainer has the state of the others
        self._regroup_due = True
        self._last: Tensor | None = None  # the sum of the last step
        self._last_settings: _Settings = []
        self._summed: Tensor | None = None  # that of the step which is being made
        self._settings: _Settings = []  # of the optimizer in the step which is being made
        self._own_settings: _Settings = []  # those that are others in this trainer
        self._mine: Tensor | None = None  # of the batches of this trainer that are in no step yet
        self._samples = 0  # of the batch that is being computed
        self._global_batches = global_batches
        self._share = self._first_share()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if global_batches is not None:
            self._accumulate_in(optimizer)

    @property
    def world_size(self) -> int:
        """The number of trainers."""
        return 1 if self._group is None else self._group.world_size

    @property
    def accumulated(self) -> int:
        """The number of batches of this trainer that are in no step yet."""
        return 0 if self._mine is None else _counts(self._mine).batches

    def begin(self, samples: int = 0) -> None:
        """Get the state of the other trainers, before a batch is computed.

        Args:
            samples: How many samples the batch has.
        """
        self._samples = samples
        while self._group is not None and self._regroup_due:
            try:
                self._meet(self._group)
            except RankError as error:
                _log.warning("%s", self._group.describe_loss(error))

    def take_part(self) -> None:
        """Make one step with the others, without another batch of this trainer."""
        self.begin()
        counts = self._step_without_batch(ended=False)
        if counts is not None and not counts.batches:
            clock.sleep(_IDLE)

    def finish(self) -> None:
        """Wait for the others, and part from them: the records have ended."""
        self.begin()
        ended = 0
        while ended < self.world_size:
            counts = self._step_without_batch(ended=True)
            ended = 0 if counts is None else counts.ended
        if self._group is not None:
            self._group.dissolve()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _step_without_batch(self, ended: bool) -> _Counts | None:
        """What is in the step; None if the others have batches for it that they have not computed yet."""
        if self._mine is None:
            self._mine = self._flat(batches=0)
        self._summed = total = self._sum(idle=True, ended=ended)
        if total is None:
            return None
        counts = _counts(total)
        if counts.batches:
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            self._end_step(counts)
        return counts

    # A step

    def _accumulate_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer.step()` make a step when the step has its batches."""
        step = optimizer.step

        @wraps(step)
        def step_when_due(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            if self._hooks and self._summed is None:
                self._check_call(args, options)
                self._add_batch()
                for parameter in self._parameters:
                    parameter.grad = None
                if self.accumulated < self._share:
                    return None
                self._summed = self._sum(idle=False)
                if self._summed is None:
                    return None
            return step(*args, **options)

        optimizer.step = MethodType(step_when_due, optimizer)  # type: ignore[method-assign]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if self._summed is None:
            if self._group is None:
                return
            self._check_call(args[1:], options)
            self._add_batch()
            self._summed = self._sum(idle=False)
            assert self._summed is not None, "a step of one batch of each trainer has them all"
        set_gradients(self._parameters, self._summed / _counts(self._summed).batches)
        self._own_settings = _change(optimizer, self._settings)

    def _check_call(self, args: Any, options: Any) -> None:
        if self._group is not None and not self._begun:
            raise RuntimeError("ElasticLoop expects begin() before each batch, got a step without it.")
        if any(value is not None for value in (*args, *options.values())):
            raise RuntimeError("ElasticLoop expects optimizer.step() without a closure, got one.")

    def _add_batch(self) -> None:
        flat = self._flat(batches=1)
        self._mine = flat if self._mine is None else self._mine + flat
        self.computed += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        self.steps += 1
        if self._summed is None:
            self.batches += 1
            self.samples += self._samples
            self.computed += 1
            return
        _change(optimizer, self._own_settings)
        counts = _counts(self._summed)
        self.batches += counts.batches
        self.samples += counts.samples
        self._last, self._last_settings = self._summed, self._settings
        self._end_step(counts)

    def _end_step(self, counts: _Counts) -> None:
        self._summed = self._mine = None
        self._regroup_due |= counts.joins > 0
        self._share = self._first_share()

    def _sum(self, *, idle: bool, ended: bool = False) -> Tensor | None:
        """The sum over the trainers of a round, whichever completes it.

        None if batches are missing, and this trainer has some to compute, or others have.
        """
        assert self._mine is not None
        group = self._group
        if group is None:
            self._mine[-1] = float(ended)
            return self._mine
        while True:
            try:
                if self._regroup_due:
                    missed = self._meet(group)
                    if missed is not None:
                        self._settings = self._last_settings
                        return missed
                standings = self._gathered(group, idle)
                if standings is None:
                    return None
                self._settings = next(
                    (standing["settings"] for standing in standings if standing["batches"]), []
                )
                self._mine[-2:] = torch.tensor([float(group.regroup_wanted), float(ended)])
                return ordered_sum(group.channel, [self._mine], list(range(group.world_size)))
            except RankError as error:
                _log.warning("%s", group.describe_loss(error))
                self._regroup_due = True

    def _first_share(self) -> int:
        """How many batches of a step this trainer computes before it asks the others, and at least one."""
        if self._global_batches is None:
            return 1
        rank = 0 if self._group is None else self._group.rank
        return max(1, _part(self._global_batches, rank, self.world_size))

    def _gathered(self, group: ElasticGroup, idle: bool) -> list[dict[str, Any]] | None:
        """What trainers have for the step; None if batches are missing.

        Then those that have records compute them, and the others come back meanwhile.
        """
        while True:
            groups = self._optimizer.param_groups
            settings = [{name: group[name] for name in group if name != "params"} for group in groups]
            mine = {"batches": self.accumulated, "idle": idle, "settings": settings}
            standings = [unpack(answer) for answer in group.channel.gather(pack(mine))]
            missing = (self._global_batches or 0) - sum(standing["batches"] for standing in standings)
            able = [rank for rank, standing in enumerate(standings) if not standing["idle"]]
            if missing <= 0 or not able:
                return standings
            if idle:
                return None
            part = _part(missing, able.index(group.rank), len(able))
            if part:
                self._share = self.accumulated + part
                return None

    def _flat(self, batches: int) -> Tensor:
        """All gradients, whether each exists, and the counts."""
        for parameter in self._parameters if batches else ():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TypeError(f"ElasticLoop expects dense gradients, got {parameter.grad.layout}.")
        counts = _Counts(batches, self._samples if batches else 0, 0, 0)
        return flat_gradients(self._parameters, counts, none=not batches)

    # A new round

    def _meet(self, group: ElasticGroup) -> Tensor | None:
        """Meet the others; the sum of the step that this trainer is in, if one of them has it."""
        before = group.world_size if self._begun else 0
        group.regroup()
        channel = group.channel
        answers = channel.gather_json({"begun": self._begun, "steps": self.steps})
        standings = [answer["steps"] if answer["begun"] else -1 for answer in answers]
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
                missed, self._last_settings = state["last"], state["settings"]
        self._begun = True
        if not self.accumulated:
            self._share = self._first_share()
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
            "samples": self.samples,
            "last": self._last,
            "settings": self._last_settings,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.batches, self.samples = state["steps"], state["batches"], state["samples"]
        self._last, self._last_settings = state["last"], state["settings"]


def _counts(total: Tensor) -> _Counts:
    return _Counts(*map(int, total[-_COUNTS:].tolist()))


def _change(optimizer: torch.optim.Optimizer, settings: _Settings) -> _Settings:
    """Give an optimizer these settings; returns the former values of those that were others."""
    former: _Settings = []
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        others = [name for name in values if name in group and group[name] != values[name]]
        former.append({name: group[name] for name in others})
        group.update({name: values[name] for name in others})
    return former


def _part(batches: int, place: int, places: int) -> int:
    """How many batches the trainer at a place of so many computes."""
    return max(0, -(-(batches - place) // places))
