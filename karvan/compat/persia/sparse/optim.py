"""`persia.sparse.optim`: the first generation's name of `persia.embedding.optim`."""

from karvan.compat.persia.embedding.optim import SGD, Adagrad, Adam, Optimizer

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]
