"""`initialiser_of`: initialisers of rows by the names that Keras gives them, with its defaults."""

from __future__ import annotations

from karvan.argument_checks import listed
from karvan.compat.elasticdl.contract import ContractError
from karvan.embedding import init

_NAMES: dict[str, init.Initialiser] = {
    "uniform": init.Uniform(-0.05, 0.05),
    "random_uniform": init.Uniform(-0.05, 0.05),
    "normal": init.Normal(0.0, 0.05),
    "random_normal": init.Normal(0.0, 0.05),
    "truncated_normal": init.TruncatedNormal(0.0, 0.05),
    "zeros": init.Constant(0.0),
    "ones": init.Constant(1.0),
}


def initialiser_of(given: init.Initialiser | str) -> init.Initialiser:
    """An initialiser of kv.init, as it is or by a name."""
    if isinstance(given, init.Initialiser):
        return given
    if given not in _NAMES:
        raise ContractError(
            f"There is no initialiser {given!r}. Expected one of kv.init, or a name: "
            f"{listed(str(given), _NAMES)}"
        )
    return _NAMES[given]
