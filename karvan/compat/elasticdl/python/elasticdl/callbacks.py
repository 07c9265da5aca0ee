"""See `karvan/compat/elasticdl/callbacks.py`."""

from karvan.compat.elasticdl.callbacks import LearningRateScheduler, MaxStepsStopping, SavedModelExporter

__all__ = ["LearningRateScheduler", "MaxStepsStopping", "SavedModelExporter"]
