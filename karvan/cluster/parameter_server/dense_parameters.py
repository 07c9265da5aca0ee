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
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from statistics import mean
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from karvan.dense.steps import (
    Answer,
    Array,
    all_finite,
    dense_tensor,
    expect_gradients,
    expect_number,
)
from karvan.dense.wire_format import (
    WRONG,
    describe,
    make_optimizer,
    rate_of,
    state_message,
    state_of,
    tensors_message,
    tensors_of,
)
from karvan.job.environment import DenseSettings
from karvan.protocol import parameter_server as protocol
from karvan.protocol.parameter_server import ANSWERS, OPTIMIZER, WAITING
from karvan.protocol.values import NUMBER, RunHello
from karvan.wire import Endpoint, Message, RefusedError, Request
from karvan.wire.schema import Call

K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=protocol.OfModel)
T = TypeVar("T")

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


# Each trainer numbers its pushes. The answers to its last `window` numbers are remembered; a push with one of
# these is answered as it was the first time. Older numbers are refused: it is not known any more whether they
# were applied. A window has to be longer than the number of pushes that a trainer can have in flight.


class AnswerWindow(Generic[K, T]):
    """Answers by trainer, or part of one, and sequence number."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        self._window = window
        self.answers: dict[K, dict[int, T]] = {}

    def find(self, trainer: K, sequence: int) -> T | None:
        """What was answered, if that is known."""
        return self.answers.get(trainer, {}).get(sequence)

    def forgotten(self, trainer: K, sequence: int) -> bool:
        """Whether the number is before those that are remembered."""
        return sequence < self.next_sequence(trainer) - self._window

    def next_sequence(self, trainer: K) -> int:
        """The number after the largest one that a trainer has used."""
        return max(self.answers.get(trainer, ()), default=-1) + 1

    def remember(self, trainer: K, sequence: int, answer: T) -> None:
        """Store an answer, and drop those that are too old."""
        answers = self.answers.setdefault(trainer, {})
        answers[sequence] = answer
        oldest = self.next_sequence(trainer) - self._window
        for old in [number for number in answers if number < oldest]:
            del answers[old]

    def forget(self, trainer: K) -> None:
        """Drop the answers of a trainer that will not come back."""
        self.answers.pop(trainer, None)

    def load(self, answers: Mapping[K, Mapping[int, T]]) -> None:
        """Remember these instead."""
        self.answers = {}
        for trainer, its in answers.items():
            for sequence in sorted(its):
                self.remember(trainer, sequence, its[sequence])


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
class _LoadedModel:
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
        self._repeats: AnswerWindow[str, Answer] = AnswerWindow(window)
        self._model: _LoadedModel | None = None
        self._counts = PushCounts()
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether there is a model."""
        return self._model is not None

    @property
    def version(self) -> int:
        """The number of steps made."""
        with self._lock:
            return self._loaded().version

    @property
    def counts(self) -> PushCounts:
        """How many pushes there were since this process started."""
        with self._lock:
            return replace(self._counts)

    def pull(self, version: int | None = None) -> tuple[int, dict[str, Tensor] | None]:
        """The version, and copies of its parameters unless it is the one the caller has."""
        with self._lock:
            model = self._loaded()
            if version == model.version:
                return version, None
            return model.version, {name: parameter.clone() for name, parameter in model.parameters.items()}

    def expect(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise if `push_gradients` would not accept them."""
        with self._lock:
            expect_gradients(self._loaded().parameters, gradients)
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
            model = self._loaded()
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
            model = self._loaded()
            if model.waiting:
                self._apply()
            return model.version

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, copied: dicts and lists of tensors and JSON values."""
        with self._lock:
            model = self._loaded()
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
                    for trainer, its in sorted(self._repeats.answers.items())
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
            self._model = _LoadedModel(parameters, optimizer, state["version"], waiting)
            self._repeats.load(answers)
            self._apply_full()

    def _loaded(self) -> _LoadedModel:
        if self._model is None:
            raise RuntimeError("No trainer has loaded a model into this server: expected load_state first.")
        return self._model

    def _apply_full(self) -> bool:
        """Make a step if enough pushes wait."""
        if len(self._loaded().waiting) < self._settings.together:
            return False
        self._apply()
        return True

    def _apply(self) -> None:
        """Make a step with the mean of all waiting pushes."""
        model = self._loaded()
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


def _cloned(value: Any) -> Any:
    """A plain value, a tensor or a dict of such values, in which nothing is shared."""
    if isinstance(value, Mapping):
        return {name: _cloned(part) for name, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


# The calls by which trainers reach a server's dense parameters; `dense_parameters.py` explains them.
#
# | call | head and arrays | answer |
# |---|---|---|
# | pull_dense | version, or none | version; tensors, if they are newer |
# | push_dense | version, trainer, sequence, lr; tensors | the outcome |
# | stage_dense | version, step, lr; tensors | version; in an elastic run, see `elastic_batches.py` |
# | next_sequence | trainer | sequence |
# | flush_dense | | version |
# | dense_state | | the state |
# | load_dense_state | the state; first: only if there is none yet | version |
#
# Each call has the number of a model, as trainers may have several. The trainers' hello says what makes a
# step, the same for all of them; a run of trainers with other settings continues with the parameters of the
# run before. A malformed call is refused and changes nothing.

_MOST_MODELS = 1024


class DenseService:
    """The models whose dense parameters a server has."""

    def __init__(self) -> None:
        self._settings = DenseSettings()
        self._models: dict[int, DenseParameters] = {}
        self._lock = threading.Lock()
        self.endpoints: list[Endpoint[Any]] = [
            self._about(protocol.PULL_DENSE, _pull),
            self._about(protocol.PUSH_DENSE, _push),
            Endpoint(protocol.STAGE_DENSE, _refuse_staging),
            self._about(
                protocol.NEXT_SEQUENCE,
                lambda model, call: Message({"sequence": model.next_sequence(call.head.trainer)}),
            ),
            self._about(protocol.FLUSH_DENSE, lambda model, call: Message({"version": model.flush()})),
            self._about(protocol.DENSE_STATE, lambda model, call: state_message(model.state())),
            self._about(protocol.LOAD_DENSE_STATE, _load_state),
        ]

    def begin(self, settings: DenseSettings) -> None:
        """A new run of trainers; parameters stay."""
        with self._lock:
            self._settings = settings
            for number, model in list(self._models.items()):
                renewed = DenseParameters(settings)
                if model.ready:
                    renewed.load_state(model.state())
                self._models[number] = renewed

    def check(self, settings: DenseSettings) -> None:
        """All trainers of a run must have the same settings."""
        if settings != self._settings:
            raise RefusedError(
                f"expected dense parameters with {_in_words(self._settings)}, as the first trainer said, "
                f"got {_in_words(settings)}."
            )

    def describe(self) -> dict[str, Any]:
        """Versions and counts of pushes, by model."""
        with self._lock:
            models = dict(self._models)
        return {
            str(number): {"version": model.version, **asdict(model.counts)}
            for number, model in models.items()
            if model.ready
        }

    def forget(self, trainer: str) -> None:
        """A trainer will not come back: its numbers are not needed any more."""
        with self._lock:
            models = list(self._models.values())
        for model in models:
            model.forget(trainer)

    def model(self, number: int) -> DenseParameters:
        """The model of a number, without parameters before they are loaded."""
        with self._lock:
            if number not in self._models:
                if len(self._models) >= _MOST_MODELS:
                    raise RefusedError(f"expected up to {_MOST_MODELS} models, got one more.")
                self._models[number] = DenseParameters(self._settings)
            return self._models[number]

    def _about(
        self, call: Call[M, Any], work: Callable[[DenseParameters, Request[M]], Message]
    ) -> Endpoint[Any]:
        """The endpoint of a call about one model."""
        return Endpoint(call, lambda request: work(self.model(request.head.model), request))


def _pull(model: DenseParameters, call: Request[protocol.PullDense]) -> Message:
    version, parameters = model.pull(call.head.version)
    if parameters is None:
        return Message({"version": version})
    return tensors_message(parameters, version=version)


def _push(model: DenseParameters, call: Request[protocol.PushDense]) -> Message:
    head, gradients = call.head, tensors_of(call.head.tensors, call.arrays)
    answer = model.push_gradients(
        gradients, head.version, trainer=head.trainer, sequence=head.sequence, lr=head.lr
    )
    return Message({"answer": astuple(answer)})


def _load_state(model: DenseParameters, call: Request[protocol.LoadDenseState]) -> Message:
    state = state_of(call.arrays)
    try:
        model.load_state(state, first=call.head.first)
    except WRONG as error:
        raise RefusedError(
            f"expected a state of dense parameters, got one that cannot be used: {error}"
        ) from error
    return Message({"version": model.version})


def _refuse_staging(call: Request[protocol.StageDense]) -> Message:
    raise RefusedError("expected an elastic run of mode async, got gradients to stage in another run.")


def settings_of(hello: RunHello) -> DenseSettings:
    """The settings of steps in a trainer's hello; a RefusedError if they are not valid."""
    settings = hello.dense or {}
    try:
        return DenseSettings(**settings)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            "expected lr_staleness, grads_to_wait, tolerance and pull_every, "
            f"got {str(settings)[:100]}: {error}"
        ) from error


def _in_words(settings: DenseSettings) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(settings).items())
