"""Types of tasks; messages are Karvan's own. See `karvan/compat/elasticdl/constants.py`."""

from karvan.compat.elasticdl.constants import TaskType

NONE = TaskType.NONE
TRAINING = TaskType.TRAINING
EVALUATION = TaskType.EVALUATION
PREDICTION = TaskType.PREDICTION
WAIT = TaskType.WAIT
TRAIN_END_CALLBACK = TaskType.TRAIN_END_CALLBACK
