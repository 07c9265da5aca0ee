"""Trains, tests, dumps and loads: the nn worker of PERSIA's Adult example."""

import os

import numpy as np
import torch
from data_generator import AdultBatches
from model import DNN
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from persia.env import get_local_rank, get_rank, get_world_size
from persia.logger import get_default_logger
from persia.utils import setup_seed
from sklearn import metrics

logger = get_default_logger("nn_worker")
here = os.path.dirname(os.path.realpath(__file__))
setup_seed(3)


class TestDataset(IterableDataset):
    def __init__(self, path):
        super().__init__(buffer_size=10)
        self.batches = AdultBatches(path)

    def __iter__(self):
        for numbers, ids, label in self.batches:
            yield PersiaBatch(ids, non_id_type_features=[numbers], labels=[label], requires_grad=False)


def test(model, loader, checkpoint_dir):
    """The AUC of the test data, with the rows of a checkpoint if one is given."""
    model.eval()
    outputs, targets = [], []
    with eval_ctx(model=model) as ctx:
        if checkpoint_dir is not None:
            ctx.load_checkpoint(checkpoint_dir)
        for data in loader:
            output, labels = ctx.forward(data)
            outputs.append(output.cpu().detach().numpy())
            targets.append(labels[0].cpu().numpy())
    model.train()
    fpr, tpr, _ = metrics.roc_curve(np.concatenate(targets), np.concatenate(outputs))
    return metrics.auc(fpr, tpr)


if __name__ == "__main__":
    reproducible = bool(int(os.environ.get("REPRODUCIBLE", 0)))
    embedding_staleness = int(os.environ.get("EMBEDDING_STALENESS", 10))
    expected_auc = os.environ.get("EXPECTED_AUC", None)
    if reproducible:
        setup_seed(3)

    model = DNN()
    rank, device_id, world_size = get_rank(), get_local_rank(), get_world_size()
    mixed_precision = True
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(device_id)
        model.cuda(device_id)
    else:
        mixed_precision = False
        device_id = None

    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    embedding_optimizer = Adagrad(lr=1e-2)
    loss_fn = torch.nn.BCELoss(reduction="mean")
    test_interval = int(os.environ.get("BATCHES", 254)) // world_size - 1

    with TrainCtx(
        model=model,
        embedding_optimizer=embedding_optimizer,
        dense_optimizer=dense_optimizer,
        mixed_precision=mixed_precision,
        device_id=device_id,
    ) as ctx:
        train_loader = DataLoader(
            StreamingDataset(10), reproducible=reproducible, embedding_staleness=embedding_staleness
        )
        test_loader = DataLoader(TestDataset(os.path.join(here, "data", "test.npz")))
        for batch_idx, data in enumerate(train_loader):
            output, labels = ctx.forward(data)
            loss = loss_fn(output, labels[0])
            scaled_loss = ctx.backward(loss)
            logger.info(f"batch {batch_idx} loss {float(loss)} scaled {float(scaled_loss)}")

            if batch_idx % test_interval == 0 and batch_idx != 0:
                test_auc = test(model, test_loader, None)
                checkpoint_dir = os.environ.get("PERSIA_CKPT_DIR", None)
                if checkpoint_dir is not None and rank == 0:
                    ctx.dump_checkpoint(checkpoint_dir, with_jit_model=True)
                print(
                    f"rank {rank} of {world_size}, rows {ctx.get_embedding_size()}, auc {test_auc!r}",
                    flush=True,
                )
                if world_size == 1 and reproducible and expected_auc is not None:
                    np.testing.assert_equal(np.array([test_auc]), np.array([float(expected_auc)]))
                if world_size == 1 and checkpoint_dir is not None:
                    ctx.clear_embeddings()
                    assert sum(ctx.get_embedding_size()) == 0
                    again = test(model, test_loader, checkpoint_dir)
                    np.testing.assert_equal(np.array([test_auc]), np.array([again]))
                    print("loaded", flush=True)
                break
