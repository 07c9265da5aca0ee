"""Tables and optimizers with the defaults of other systems: `kv.presets.persia`, `kv.presets.recis`.

A program that moves to Karvan gets the numbers that it had. Each function makes what `kv.Table`, `kv.optim`
or `kv.init` make, with other defaults; all their options can be given.
"""

from karvan.argument_checks import publish
from karvan.presets import persia, recis

__all__ = ["persia", "recis"]

publish("karvan.presets")
