"""Names of variables in the environment of workers."""


class WorkerEnv:
    """What a worker knows of its job."""

    MASTER_ADDR = "MASTER_ADDR"
    WORKER_ID = "WORKER_ID"
    WORKER_NUM = "WORKER_NUM"
