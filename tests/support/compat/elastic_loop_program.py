"""A loop of elasticai_api whose parameters count how often each record was trained, by whichever workers.

NOTES is a folder: each worker notes its steps, and at its end what it has. PAUSE: seconds after each batch,
until there is a note that says hurry.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from elasticai_api.pytorch.controller import create_elastic_controller
from elasticai_api.pytorch.optimizer import DistributedOptimizer
from torch.utils.data import DataLoader, Dataset

records, epochs, size = map(int, sys.argv[1:4])
notes = Path(os.environ["NOTES"])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(records))
        self.drift = torch.nn.Parameter(torch.zeros(1))  # its gradient is 1 in every batch


class Counting(torch.optim.Optimizer):
    """Adds 1 to every number with a gradient, and the gradient to the drift; it counts its steps."""

    def __init__(self, model):
        super().__init__([{"params": [model.times]}, {"params": [model.drift]}], {})

    @torch.no_grad()
    def step(self, closure=None):
        (times,), (drift,) = (group["params"] for group in self.param_groups)
        times += (times.grad != 0).float()
        drift += drift.grad
        state = self.state[drift]
        state["steps"] = state.get("steps", 0) + 1


class Records(Dataset):
    def __len__(self):
        return sys.maxsize

    def __getitem__(self, _):
        return controller.data_shard_service.fetch_record_index()


def train_one_batch(numbers):
    optimizer.zero_grad()
    loss = model.times[numbers].sum() + model.drift.sum()
    loss.backward()
    optimizer.step()
    return loss


controller = create_elastic_controller(size, epochs, records, shuffle=True)
model = Model()
if os.environ["KARVAN_INDEX"] != "0":
    torch.nn.init.constant_(model.drift, 1e6)  # what the first worker has is what counts
optimizer = DistributedOptimizer(Counting(model))
controller.set_broadcast_model(model)
controller.set_broadcast_optimizer(optimizer)
with controller.scope():
    for numbers in DataLoader(Records(), batch_size=size):
        controller.elastic_run(train_one_batch)(numbers)
        (notes / f"step-{os.getpid()}").write_text(str(controller.global_completed_batch_num))
        if not (notes / "hurry").exists():
            time.sleep(float(os.environ.get("PAUSE", "0")))
has = {
    "times": model.times.tolist(),
    "drift": model.drift.item(),
    "steps": optimizer.state[model.drift]["steps"],
    "batches": controller.global_completed_batch_num,
}
(notes / f"end-{os.getpid()}").write_text(json.dumps(has))
