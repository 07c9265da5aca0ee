"""`persia.sparse`: the first generation's name of `persia.embedding`."""

from karvan.compat.import_aliases import submodules

__getattr__ = submodules(__name__, "optim")
