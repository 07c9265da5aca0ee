"""Sends the training data: the loader of PERSIA's Adult example."""

import os

from data_generator import AdultBatches
from persia.ctx import DataCtx
from persia.embedding.data import PersiaBatch
from persia.logger import get_logger
from persia.utils import setup_seed

logger = get_logger("data_loader")
setup_seed(3)
here = os.path.dirname(os.path.realpath(__file__))

if __name__ == "__main__":
    with DataCtx() as ctx:
        for numbers, ids, label in AdultBatches(os.path.join(here, "data", "train.npz")):
            ctx.send_data(
                PersiaBatch(ids, non_id_type_features=[numbers], labels=[label], requires_grad=True)
            )
    logger.info("all batches are sent")
