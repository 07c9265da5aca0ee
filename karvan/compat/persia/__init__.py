"""PERSIA's names for Karvan: contexts, batches, loaders, optimizers and launchers of its programs.

`persia.ctx`, `persia.data` and `persia.embedding` are the second generation of its API, `persia.prelude` and
`persia.sparse` the first. All of them are adapters: contexts reach Karvan's engine by an `EmbeddedModel`.
"""

__version__ = "0.1.0"  # of PERSIA, whose names these are
