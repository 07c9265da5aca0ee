"""Constants of ElasticDL, and the logger that models write to."""

from __future__ import annotations

import logging


class Mode:
    """What `feed` prepares records for."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"


class DistributionStrategy:
    """How workers train together."""

    LOCAL = "Local"
    PARAMETER_SERVER = "ParameterServerStrategy"
    ALLREDUCE = "AllreduceStrategy"


class TaskType:
    """What a task is for; those of readers have one of the first three."""

    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"
    PREDICTION = "PREDICTION"
    NONE = "NONE"
    WAIT = "WAIT"
    TRAIN_END_CALLBACK = "TRAIN_END_CALLBACK"


# In the environment of workers of --job_command: flags of the job, for data shards without these numbers.
NUM_EPOCHS = "ELASTICDL_NUM_EPOCHS"
MINIBATCHES_PER_TASK = "ELASTICDL_NUM_MINIBATCHES_PER_TASK"


class WorkerEnv:
    """What a worker knows of its job."""

    MASTER_ADDR = "MASTER_ADDR"
    WORKER_ID = "WORKER_ID"
    WORKER_NUM = "WORKER_NUM"


default_logger = logging.getLogger("elasticdl")


def get_logger(
    name: str, level: str | int = "INFO", handlers: list[logging.Handler] | None = None
) -> logging.Logger:
    """A logger of this name and level, with these handlers."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    for handler in handlers or ():
        logger.addHandler(handler)
    return logger
