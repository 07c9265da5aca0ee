"""A loop of the form of ElasticDL's example of images: a DataLoader with workers, and steps of a fixed size.

NOTES is a folder: each worker notes the images of its batches, and at its end what it has. PAUSE: seconds
after each batch, until there is a note that says hurry.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from elasticai_api.pytorch.controller import create_elastic_controller
from elasticai_api.pytorch.optimizer import DistributedOptimizer
from torch import nn
from torch.utils.data import DataLoader, Dataset

notes = Path(os.environ["NOTES"])


class Images(Dataset):
    """Stripes whose direction is the label; with a service, those that workers lease."""

    def __init__(self, numbers, service=None):
        self.numbers, self.service = numbers, service

    def __len__(self):
        return sys.maxsize if self.service else len(self.numbers)

    def __getitem__(self, index):
        if self.service:
            index = self.service.fetch_record_index()
        number = self.numbers[index]
        noise = np.random.default_rng(number).normal(0.0, 0.3, (1, 8, 8))
        stripes = np.arange(8) // 2 % 2
        image = noise + (stripes if number % 2 else stripes[:, None])
        return image.astype(np.float32), number % 2, number


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.output = nn.Linear(4 * 6 * 6, 2)

    def forward(self, images):
        return self.output(torch.relu(self.convolution(images)).flatten(1))


def train(options):
    controller = create_elastic_controller(
        batch_size=options.batch_size,
        dataset_size=options.images,
        num_epochs=options.num_epochs,
        shuffle=True,
    )
    data = Images(range(options.images), controller.data_shard_service)
    loader = DataLoader(data, batch_size=options.batch_size, num_workers=2)
    test_loader = DataLoader(Images(range(10_000, 10_050)), batch_size=options.batch_size, num_workers=2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = DistributedOptimizer(optimizer, fixed_global_batch_size=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    controller.set_broadcast_model(model)
    controller.set_broadcast_optimizer(optimizer)
    train_batch = controller.elastic_run(train_one_batch)
    epoch, right = 0, 0.0
    with controller.scope():
        for images, labels, numbers in loader:
            model.train()
            loss = train_batch(model, optimizer, images, labels)
            with (notes / f"step-{os.getpid()}").open("a") as note:
                print(*numbers.tolist(), file=note)
            if controller.get_current_epoch() > epoch:
                epoch = controller.get_current_epoch()
                scheduler.last_epoch = epoch - 1
                scheduler.step()
                right = test(model, test_loader)
                print(f"epoch {epoch}: loss {loss:.3f}, {right:.0%} right", flush=True)
            if not (notes / "hurry").exists():
                time.sleep(float(os.environ.get("PAUSE", "0")))
    has = {
        "parameters": hashlib.sha256(
            nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        ).hexdigest(),
        "batches": controller.global_completed_batch_num,
        "epoch": controller.get_current_epoch(),
        "workers": os.environ["WORKER_NUM"],
        "right": right,
    }
    (notes / f"end-{os.getpid()}").write_text(json.dumps(has))


def train_one_batch(model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    before = model.output.bias.detach().clone()
    optimizer.step()
    with (notes / f"changes-{os.getpid()}").open("a") as note:
        print(int(not torch.equal(before, model.output.bias)), file=note)
    return loss


def test(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels, _ in loader)
    return right / len(loader.dataset)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("batch_size", "num_epochs", "images"):
        parser.add_argument(f"--{name}", type=int, required=True)
    train(parser.parse_args())
