"""Dense parameters on a server: trainers push gradients and pull new values without waiting.

    load_state(state)                    parameters, the optimizer and its state, of rank 0
    pull(version)                        the parameters, if they are newer than that version
    push_gradients(gradients, version)   gradients of the parameters of that version; returns an Answer

A server has its share of the parameters (`owner_of_parameter`), the optimizer for them, and a version, the
number of steps made. A gradient's *staleness* is the server's version less the gradient's.

By default every push is a step, in the order of arrival. With `tolerance` or `grads_to_wait`
(`DenseSettings`), a push is rejected if its staleness is above the tolerance; `grads_to_wait` of the others
make a step with their mean, summed in the order of the trainers' names, so that the bits of a step depend on
what was pushed and not on when. A trainer that pushes twice before such a step counts twice: with fewer
trainers than grads_to_wait a job still advances, and faster trainers contribute more. A push that lacks a
parameter has no gradient for it: zero in a mean, and if no push has one, the optimizer does not change the
parameter, as torch's do not.

The learning rate comes with the push, since schedulers run in trainers; it applies to that step only, and
a mean of gradients is applied with the mean of their rates. Without one it is that of the optimizer's spec.

A push has a trainer's name and a sequence number. One that was accepted, or refused because it is not
finite, is remembered; the same number again gets the same answer and changes nothing. A rejected push is
not remembered: the trainer pushes the same number again, with gradients from fresh parameters. So a
push to several servers, accepted by some and rejected by others, is applied by each of them once.

If a trainer dies, its pushes stay, including those that wait for others; it continues with `next_sequence`.
If a server dies, its parameters are those of the last `state()` that was saved. Trainers may then know a
later version than the server; pushes of such gradients are rejected, so they pull first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import mean
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from karvan.cluster.parameter_server.done_once import AnswerWindow
from karvan.dense.steps import (
    Answer,
    Array,
    all_finite,
    dense_tensor,
    expect_gradients,
    expect_number,
)
from karvan.dense.wire_format import describe, make_optimizer, rate_of
from karvan.job.sync_modes import DenseSettings
from karvan.protocol.parameter_server import ANSWERS, OPTIMIZER, WAITING
from karvan.protocol.values import NUMBER

# Checks states of dense parameters that a server receives.
#
# torch's optimizers trust their slots: one of another shape or dtype makes a step read out of bounds. So the
# slots of each parameter are compared with those that a new optimizer of that spec has after a step.


_MOST_STEPS = 2**53
_PARTS = ("version", "optimizer", "parameters", "slots", "waiting", "answers")


def check_state(state: Mapping[str, Any]) -> None:
    """A ValueError or RefusedError unless a server could have made the state."""
    if missing := [part for part in _PARTS if part not in state]:
        raise ValueError(f"Expected a state of dense parameters, but it has no {', '.join(sorted(missing))}.")
    NUMBER.check(state["version"], "version")
    OPTIMIZER.check(_listed(state["optimizer"]), "optimizer")
    ANSWERS.check(_listed(state["answers"]), "answers")
    parameters, slots, waiting = state["parameters"], state["slots"], state["waiting"]
    if not _is_tensors(parameters) or not isinstance(slots, Mapping) or not isinstance(waiting, list):
        raise ValueError("Expected parameters and slots by name and a list of pushes that wait.")
    _check_slots(state["optimizer"], parameters, slots)
    for push in waiting:
        gradients = push.get("gradients") if isinstance(push, Mapping) else None
        if not isinstance(gradients, Mapping) or not _is_tensors(gradients):
            raise ValueError("Expected the gradients of each push that waits, by name.")
        WAITING.check({name: value_ for name, value_ in push.items() if name != "gradients"}, "waiting")
        expect_gradients(parameters, gradients)


def _check_slots(
    optimizer: Mapping[str, Any], parameters: Mapping[str, Tensor], slots: Mapping[str, Any]
) -> None:
    names_by_shape: dict[torch.Size, dict[str, str]] = {}
    for name, its in slots.items():
        if name not in parameters:
            raise ValueError(f"Slots for '{name}', which is not a parameter.")
        if not isinstance(its, Mapping):
            raise ValueError(f"Expected slots by name for '{name}', got {type(its).__name__}.")
        if not its:  # no step has been made yet
            continue
        shape = parameters[name].shape
        if shape not in names_by_shape:
            names_by_shape[shape] = _made_slots(optimizer, shape)
        received = {slot: _kind(value) for slot, value in its.items()}
        if received != names_by_shape[shape]:
            raise ValueError(
                f"Expected the slots of '{name}' to be {_text(names_by_shape[shape])}, got {_text(received)}."
            )
        # torch uses it as an exponent.
        if "step" in its and not 0 <= float(its["step"]) <= _MOST_STEPS:
            raise ValueError(f"Expected '{name}' to have made 0 to {_MOST_STEPS} steps, got {its['step']}.")


def _made_slots(optimizer: Mapping[str, Any], shape: torch.Size) -> dict[str, str]:
    parameter = torch.zeros(shape)
    parameter.grad = torch.zeros(shape)
    built = make_optimizer(optimizer, [parameter])
    built.step()
    return {slot: _kind(value) for slot, value in built.state.get(parameter, {}).items()}


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _text(slots: Mapping[str, str]) -> str:
    return ", ".join(f"{slot} {kind}" for slot, kind in sorted(slots.items())[:8]) or "none"


def _is_tensors(values: Any) -> bool:
    return isinstance(values, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in values.items()
    )


def _listed(value: Any) -> Any:
    """As decoded from JSON: tuples become lists."""
    if isinstance(value, Mapping):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass
class PushCounts:
    """Pushes by outcome; a repeated push counts as nothing else."""

    accepted: int = 0
    rejected: int = 0
    not_finite: int = 0
    repeated: int = 0
    forgotten: int = 0


@dataclass(frozen=True)
class _Push:
    trainer: str
    sequence: int
    staleness: int
    lr: float | None
    gradients: dict[str, Tensor]


@dataclass
class _Held:
    """What a server has once a model was loaded."""

    parameters: dict[str, Tensor]
    optimizer: Optimizer
    version: int = 0
    waiting: list[_Push] = field(default_factory=list)


class DenseParameters:
    """A server's share of the dense parameters; any number of threads may call at the same time.

    window: how many sequence numbers of each trainer are remembered.
    """

    def __init__(self, settings: DenseSettings | None = None, *, window: int = 128) -> None:
        self._settings = settings or DenseSettings()
        self._repeats: AnswerWindow[Answer] = AnswerWindow(window)
        self._model: _Held | None = None
        self._counts = PushCounts()
        self._lock = Lock()

    @property
    def ready(self) -> bool:
        """Whether there is a model."""
        return self._model is not None

    @property
    def version(self) -> int:
        """The number of steps made."""
        with self._lock:
            return self._held().version

    @property
    def counts(self) -> PushCounts:
        """How many pushes there were since this process started."""
        with self._lock:
            return replace(self._counts)

    def pull(self, version: int | None = None) -> tuple[int, dict[str, Tensor] | None]:
        """The version, and copies of its parameters unless it is the one the caller has."""
        with self._lock:
            model = self._held()
            if version == model.version:
                return version, None
            return model.version, {name: parameter.clone() for name, parameter in model.parameters.items()}

    def expect(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise if `push_gradients` would not accept them."""
        with self._lock:
            expect_gradients(self._held().parameters, gradients)
        if not all_finite(gradients.values()):
            raise ValueError("Expected finite gradients, got an infinity or a NaN.")

    def push_gradients(
        self,
        gradients: Mapping[str, Array],
        version: int,
        *,
        trainer: str,
        sequence: int,
        lr: float | None = None,
    ) -> Answer:
        """Accept or reject gradients of the parameters of a version; see the module's docstring."""
        expect_number("version", version)
        expect_number("sequence", sequence)
        if lr is not None and not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr must be finite and not negative, got {lr}.")
        waits = self._settings.together > 1
        copies = {name: dense_tensor(name, gradients[name], copy=waits) for name in sorted(gradients)}
        finite = all_finite(copies.values())
        with self._lock:
            model = self._held()
            expect_gradients(model.parameters, copies)
            staleness = model.version - version
            if (former := self._repeats.find(trainer, sequence)) is not None:
                self._counts.repeated += 1
                return former
            if self._repeats.forgotten(trainer, sequence):
                self._counts.forgotten += 1
                return Answer(False, model.version, False, staleness, "forgotten")
            if not finite:
                self._counts.not_finite += 1
                answer = Answer(False, model.version, False, staleness, "not finite")
            elif staleness < 0 or self._settings.refuses(staleness):
                self._counts.rejected += 1
                return Answer(False, model.version, False, staleness, "ahead" if staleness < 0 else "stale")
            else:
                model.waiting.append(_Push(trainer, sequence, staleness, lr, copies))
                applied = self._apply_full()
                self._counts.accepted += 1
                answer = Answer(True, model.version, applied, staleness)
            self._repeats.remember(trainer, sequence, answer)
            return answer

    def next_sequence(self, trainer: str) -> int:
        """The number after the largest that a trainer has pushed and that counted."""
        with self._lock:
            return self._repeats.next_sequence(trainer)

    def forget(self, trainer: str) -> None:
        """Drop the sequence numbers of a trainer that will not come back; its pushes stay."""
        with self._lock:
            self._repeats.forget(trainer)

    def flush(self) -> int:
        """Make a step of the waiting pushes, however few; returns the version. For the end of training."""
        with self._lock:
            model = self._held()
            if model.waiting:
                self._apply()
            return model.version

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, copied: dicts and lists of tensors and JSON values."""
        with self._lock:
            model = self._held()
            return {
                "version": model.version,
                "optimizer": describe(model.optimizer),
                "parameters": {name: parameter.clone() for name, parameter in model.parameters.items()},
                "slots": {
                    name: _cloned(model.optimizer.state.get(parameter, {}))
                    for name, parameter in model.parameters.items()
                },
                "waiting": [_cloned(vars(push)) for push in sorted(model.waiting, key=_order)],
                "answers": {
                    trainer: [[sequence, *astuple(outcome)] for sequence, outcome in sorted(its.items())]
                    for trainer, its in sorted(self._repeats.all().items())
                },
            }

    def load_state(self, state: Mapping[str, Any], *, first: bool = False) -> None:
        """Restore a `state`; the settings may be others. first: only if there is no model yet."""
        check_state(state)
        saved = state["parameters"]
        parameters = {name: dense_tensor(name, saved[name], copy=True) for name in sorted(saved)}
        optimizer = make_optimizer(state["optimizer"], list(parameters.values()))
        for name, slots in state["slots"].items():
            if slots:  # else those of the new optimizer stay: torch's Adagrad may have some before a step
                optimizer.state[parameters[name]] = _cloned(slots)
        waiting = [_Push(**_cloned(push)) for push in state["waiting"]]
        answers = {
            trainer: {sequence: Answer(*rest) for sequence, *rest in its}
            for trainer, its in state["answers"].items()
        }
        with self._lock:
            if first and self._model is not None:
                return
            self._model = _Held(parameters, optimizer, state["version"], waiting)
            self._repeats.load(answers)
            self._apply_full()

    def _held(self) -> _Held:
        if self._model is None:
            raise RuntimeError("No trainer has loaded a model into this server: expected load_state first.")
        return self._model

    def _apply_full(self) -> bool:
        """Make a step if enough pushes wait."""
        if len(self._held().waiting) < self._settings.together:
            return False
        self._apply()
        return True

    def _apply(self) -> None:
        """Make a step with the mean of all waiting pushes."""
        model = self._held()
        pushes, model.waiting = sorted(model.waiting, key=_order), []
        usual = rate_of(model.optimizer)
        rates = [self._settings.slowed(usual if p.lr is None else p.lr, p.staleness) for p in pushes]
        for name, parameter in model.parameters.items():
            parameter.grad = _mean([p.gradients[name] for p in pushes if name in p.gradients], len(pushes))
        try:
            _set_rate(model.optimizer, mean(rates))
            model.optimizer.step()
        finally:
            _set_rate(model.optimizer, usual)
            model.optimizer.zero_grad()
        model.version += 1


def _order(push: _Push) -> tuple[str, int]:
    return push.trainer, push.sequence


def _mean(gradients: Sequence[Tensor], count: int) -> Tensor | None:
    """The sum in this order, divided by the number of pushes; overwrites the first of several."""
    if not gradients:
        return None
    if count == 1:
        return gradients[0]
    total = gradients[0]
    for gradient in gradients[1:]:
        total += gradient
    return total.div_(count)


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of plain values, tensors and such dicts, in which nothing is shared."""
    return {name: _clone(value) for name, value in values.items()}


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return _cloned(value) if isinstance(value, Mapping) else value
