"""Optimizers of rows: `kv.optim.Adagrad(engine, lr=0.05)`.

Only rows that have a gradient change. In the formulas, p is an element of a row's vector and g its gradient.
Dense parameters have an optimizer of torch.
"""

from karvan.argument_checks import publish
from karvan.embedding.optim.base import SparseOptimizer
from karvan.embedding.optim.rules import FTRL, FTRLTF, SGD, Adagrad, Adam, AdamW, AdamWTF
from karvan.store import Rule

__all__ = ["Adagrad", "Adam", "AdamW", "AdamWTF", "SGD", "FTRL", "FTRLTF", "SparseOptimizer", "Rule"]

publish("karvan.embedding.optim")
