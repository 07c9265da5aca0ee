"""Constants of ElasticDL: the modes of `feed`, the strategies, the types of tasks."""


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
