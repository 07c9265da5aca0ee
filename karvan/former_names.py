"""Former names of the public API: using one is an error that says the new name."""

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
}

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


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
