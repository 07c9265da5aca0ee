"""Trains and tests: the nn worker of PERSIA's Adult example."""

import os

import torch
from data_generator import make_batches
from model import DNN
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.optim import Adagrad
from persia.env import get_local_rank, get_rank, get_world_size
from persia.logger import get_default_logger
from persia.utils import setup_seed
from sklearn import metrics

logger = get_default_logger("nn_worker")
FOLDER = os.environ["ADULT_DATA"]
LIMIT = int(os.environ["ADULT_BATCHES"]) if "ADULT_BATCHES" in os.environ else None


class LocalDataset(IterableDataset):
    def __init__(self, name, **options):
        super().__init__(buffer_size=10)
        self.batches = list(make_batches(FOLDER, name, limit=LIMIT, **options))

    def __iter__(self):
        return iter(self.batches)


def test(model, loader):
    model.eval()
    outputs, targets = [], []
    with eval_ctx(model=model) as ctx:
        for data in loader:
            output, labels = ctx.forward(data)
            outputs.append(output.cpu())
            targets.append(labels[0].cpu())
    model.train()
    fpr, tpr, _ = metrics.roc_curve(torch.cat(targets).numpy(), torch.cat(outputs).numpy())
    return metrics.auc(fpr, tpr)


if __name__ == "__main__":
    setup_seed(3)
    model = DNN()
    device_id = None
    if torch.cuda.is_available():
        device_id = get_local_rank()
        torch.cuda.set_device(device_id)
        model.cuda(device_id)
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    embedding_optimizer = Adagrad(lr=1e-2)
    loss_fn = torch.nn.BCELoss(reduction="mean")
    alone = os.environ.get("ADULT_ALONE") == "1"
    dataset = LocalDataset("adult.data") if alone else StreamingDataset(10)

    with TrainCtx(
        model=model,
        embedding_optimizer=embedding_optimizer,
        dense_optimizer=dense_optimizer,
        mixed_precision=device_id is not None,
        device_id=device_id,
    ) as ctx:
        train_loader = DataLoader(dataset, reproducible=True, embedding_staleness=1)
        test_loader = DataLoader(LocalDataset("adult.test", requires_grad=False))
        for batch_idx, data in enumerate(train_loader):
            output, labels = ctx.forward(data)
            loss = loss_fn(output, labels[0])
            scaled_loss = ctx.backward(loss)
            if batch_idx % 50 == 0:
                logger.info(f"batch {batch_idx} loss {float(loss.detach())} scaled {float(scaled_loss)}")
        auc = test(model, test_loader)
        print(f"rank {get_rank()} of {get_world_size()}, rows {ctx.get_embedding_size()}, auc {auc!r}")
