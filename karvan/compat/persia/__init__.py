"""PERSIA's names for Karvan: contexts, batches, loaders, optimizers and launchers of its programs.

`persia.ctx`, `persia.data` and `persia.embedding` are the second generation of its API, `persia.prelude` and
`persia.sparse` the first. All of them are adapters: see `bridge/` for how they reach Karvan's engine.
"""

__version__ = "0.1.0"  # of PERSIA, whose names these are
