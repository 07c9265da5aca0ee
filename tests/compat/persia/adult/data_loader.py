"""Sends the training data: the loader of PERSIA's Adult example."""

import os

from data_generator import make_batches
from persia.ctx import DataCtx
from persia.env import get_replica_index, get_replica_size
from persia.logger import get_default_logger

logger = get_default_logger("data_loader")

if __name__ == "__main__":
    limit = int(os.environ["ADULT_BATCHES"]) if "ADULT_BATCHES" in os.environ else None
    with DataCtx() as ctx:
        for number, batch in enumerate(make_batches(os.environ["ADULT_DATA"], "adult.data", limit=limit)):
            if number % get_replica_size() == get_replica_index():
                ctx.send_data(batch)
    logger.info("all batches are sent")
