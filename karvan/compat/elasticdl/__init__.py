"""The names of ElasticDL, over Karvan: the model contract, its commands, data readers, and the PS client.

`karvan run --as elasticdl train --model_zoo … --model_def …` runs a model that is written for ElasticDL, and
`karvan run --as elasticdl program.py` a program. Models are those of PyTorch.
"""

from karvan.compat.elasticdl.contract import (
    DistributionStrategy,
    LearningRateScheduler,
    MaxStepsStopping,
    Mode,
    SavedModelExporter,
    TaskType,
)
from karvan.compat.elasticdl.ps_client import PSClient
from karvan.compat.elasticdl.readers import AbstractDataReader, Metadata, Task

__all__ = [
    "AbstractDataReader",
    "DistributionStrategy",
    "LearningRateScheduler",
    "MaxStepsStopping",
    "Metadata",
    "Mode",
    "PSClient",
    "SavedModelExporter",
    "Task",
    "TaskType",
]
