"""Former names of the public API and of environment variables: using one is an error with the new name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

# Module → its former names, and what each is called now.
_NAMES = {
    "karvan": {
        **{name: f"kv.admission.{name}" for name in ("Always", "MinCount", "Probability", "ReadOnly")},
        **{name: f"kv.eviction.{name}" for name in ("LFU", "LRU", "TTL", "Age", "Never", "Norm")},
        **{name: f"karvan.store.{name}" for name in ("MemoryStore", "Rows", "Store")},
        **{name: f"karvan.embedding.{name}" for name in ("HashStack", "TableHandle")},
        **{name: f"karvan.ragged.{name}" for name in ("NestedRagged", "Padded")},
        "DataContext": "kv.LoaderContext",
        "Job": "kv.TrainingJob",
        "stream": "kv.data.from_loaders",
    },
    "karvan.metrics": {
        "LogLoss": "kv.metrics.BinaryCrossEntropy",
        "MAE": "kv.metrics.MeanAbsoluteError",
        "MSE": "kv.metrics.MeanSquaredError",
    },
    "karvan.train": {
        **{name: f"kv.callbacks.{name}" for name in ("Callback", "EarlyStopping")},
        **{
            name: f"kv.loggers.{name}"
            for name in ("CSVLogger", "JSONLinesLogger", "Logger", "TensorBoardLogger")
        },
        "metrics": "kv.metrics",
    },
}
VARIABLES = {
    "KARVAN_TRAINERS": "KARVAN_TRAINER_COUNT",
    "KARVAN_SERVERS": "KARVAN_PARAMETER_SERVER_COUNT",
    "KARVAN_WORKERS": "KARVAN_EMBEDDING_WORKER_COUNT",
    "KARVAN_LOADERS": "KARVAN_LOADER_COUNT",
    "KARVAN_PARAMETER_SERVERS": "KARVAN_PARAMETER_SERVER_ADDRESSES",
    "KARVAN_EMBEDDING_WORKERS": "KARVAN_EMBEDDING_WORKER_ADDRESSES",
    "KARVAN_WORKER_EXPIRE": "KARVAN_EMBEDDING_WORKER_EXPIRE",
    "KARVAN_WORKER_BATCHES": "KARVAN_EMBEDDING_WORKER_BATCHES",
    "KARVAN_SERVER_LOSS": "KARVAN_ON_SERVER_LOSS",
}

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Class = TypeVar("Class")


def new_name(module: str, name: str) -> str | None:
    """What a former name of a module is called now."""
    return _NAMES.get(module, {}).get(name)


def missing_name(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have."""
    text = f"module '{module}' has no attribute '{name}'"
    new = new_name(module, name)
    return AttributeError(text if new is None else f"{text}: it is {new} now.")


def former_arguments(**new: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function with renamed keyword arguments: `@former_arguments(ahead="prefetch")`."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if former := new.keys() & kwargs.keys():
                name = min(former)
                what = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{what}() has no argument '{name}': it is {new[name]} now.")
            return function(*args, **kwargs)

        return checked

    return decorate


def former_fields(**new: str) -> Callable[[type[Class]], type[Class]]:
    """Decorate a dataclass with renamed fields: `@former_fields(train_steps="max_steps")`."""

    def decorate(kind: type[Class]) -> type[Class]:
        init: Callable[..., None] = vars(kind)["__init__"]
        type.__setattr__(kind, "__init__", former_arguments(**new)(init))
        return kind

    return decorate
