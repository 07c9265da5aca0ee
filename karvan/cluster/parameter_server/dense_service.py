"""The calls by which trainers reach a server's dense parameters; `dense_parameters.py` explains them.

| call | head and arrays | answer |
|---|---|---|
| pull_dense | version, or none | version; tensors, if they are newer |
| push_dense | version, trainer, sequence, lr; tensors | the outcome |
| stage_dense | version, step, lr; tensors | version; in an elastic run, see `elastic_batches.py` |
| next_sequence | trainer | sequence |
| flush_dense | | version |
| dense_state | | the state |
| load_dense_state | the state; first: only if there is none yet | version |

Each call has the number of a model, as trainers may have several. The trainers' hello says what makes a step,
the same for all of them; a run of trainers with other settings continues with the parameters of the run
before. A malformed call is refused and changes nothing.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, astuple
from typing import Any

from karvan.cluster.parameter_server.dense_parameters import DenseParameters
from karvan.dense.wire_format import WRONG, state_message, state_of, tensors_message, tensors_of
from karvan.job.sync_modes import DenseSettings
from karvan.protocol import parameter_server as protocol
from karvan.protocol.values import RunHello
from karvan.wire import Endpoint, Message, RefusedError, Request

_MOST_MODELS = 1024


class DenseService:
    """The models whose dense parameters a server has."""

    def __init__(self) -> None:
        self._settings = DenseSettings()
        self._models: dict[int, DenseParameters] = {}
        self._lock = threading.Lock()
        self.endpoints: list[Endpoint[Any]] = [
            Endpoint(protocol.PULL_DENSE, self._pull),
            Endpoint(protocol.PUSH_DENSE, self._push),
            Endpoint(protocol.STAGE_DENSE, _refuse_staging),
            Endpoint(protocol.NEXT_SEQUENCE, self._next_sequence),
            Endpoint(protocol.FLUSH_DENSE, self._flush),
            Endpoint(protocol.DENSE_STATE, self._state),
            Endpoint(protocol.LOAD_DENSE_STATE, self._load_state),
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
                f"expected dense parameters with {_text(self._settings)}, as the first trainer said, "
                f"got {_text(settings)}."
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

    def _pull(self, call: Request[protocol.PullDense]) -> Message:
        version, parameters = self.model(call.head.model).pull(call.head.version)
        if parameters is None:
            return Message({"version": version})
        return tensors_message(parameters, version=version)

    def _push(self, call: Request[protocol.PushDense]) -> Message:
        head = call.head
        answer = self.model(call.head.model).push_gradients(
            tensors_of(head.tensors, call.arrays),
            head.version,
            trainer=head.trainer,
            sequence=head.sequence,
            lr=head.lr,
        )
        return Message({"answer": astuple(answer)})

    def _next_sequence(self, call: Request[protocol.NextSequence]) -> Message:
        return Message({"sequence": self.model(call.head.model).next_sequence(call.head.trainer)})

    def _flush(self, call: Request[protocol.OfModel]) -> Message:
        return Message({"version": self.model(call.head.model).flush()})

    def _state(self, call: Request[protocol.OfModel]) -> Message:
        return state_message(self.model(call.head.model).state())

    def _load_state(self, call: Request[protocol.LoadDenseState]) -> Message:
        model, state = self.model(call.head.model), state_of(call.arrays)
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


def _text(settings: DenseSettings) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(settings).items())
