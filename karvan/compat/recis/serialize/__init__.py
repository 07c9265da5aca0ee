"""Checkpoints of tables and tensors, over `karvan.checkpoint`."""

from karvan.compat.recis.serialize.checkpoint_reader import CheckpointReader
from karvan.compat.recis.serialize.loader import Loader
from karvan.compat.recis.serialize.saver import Saver

__all__ = ["CheckpointReader", "Loader", "Saver"]
