"""The programs of PERSIA's documents, as roles; their slips are mended, each where `mended` says so."""

import numpy as np
import pytest
from persia_job import PersiaJob

ROLES = {
    "nn-worker": [["{folder}/train.py"]],
    "data-loader": [["{folder}/data.py"]],
    "embedding-worker": [["--port", 0]],
    "embedding-parameter-server": [["--port", 0]],
}

DLRM_DATA = """
import numpy as np
from persia.ctx import init_backend
from persia.prelude import PyPersiaBatchData

source_data = "FOLDER/train.txt"
batch_size = 5
batch_data = []
backend = init_backend(init_output=True, wait_server_ready=True)

with open(source_data, "r") as file:
    for line in file:
        splitter = line.rstrip("\\n").split("\\t")  # mended: denseline
        target = np.int32(splitter[0])  # mended: line[0]
        dense_sample = np.array([x or 0 for x in splitter[1:14]], dtype=np.float32)  # mended: empty cells
        sparse_sample = np.array(
            list(map(lambda x: int(x or "0", 16), splitter[14:])), dtype=np.uint64  # mended: line[14:]
        )
        batch_data.append((dense_sample, sparse_sample, target))  # mended: sample_sample
        if len(batch_data) == batch_size:
            persia_batch_data = PyPersiaBatchData()
            batch_dense_data, batch_all_sparse_data, batch_target_data = zip(*batch_data)
            batch_data = []
            batch_dense_data = np.stack(batch_dense_data)
            persia_batch_data.add_dense_f32(batch_dense_data)

            batch_sparse_category_data = []
            # mended: the document goes through samples in place of features
            for (idx, batch_sparse_data) in enumerate(np.stack(batch_all_sparse_data).T):
                category_name = f"sparse_feature{idx}"
                sparse_array = []
                for i in range(batch_size):
                    sparse_array.append(batch_sparse_data[i:i+1])
                batch_sparse_category_data.append((category_name, sparse_array))
            persia_batch_data.add_sparse(batch_sparse_category_data)

            batch_target_data = np.array(batch_target_data, dtype=np.float32)
            batch_target_data = np.stack([batch_target_data[i:i+1] for i in range(batch_size)])  # mended: 1-D
            persia_batch_data.add_target(batch_target_data)
            backend.send_data(persia_batch_data)
"""
DLRM_TRAIN = """
import os
from typing import List

import torch
from torch import nn
from torch.optim import SGD
from persia.ctx import TrainCtx
from persia.logger import get_default_logger
from persia.sparse.optim import Adagrad

logger = get_default_logger()

class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(13, 8)
        self.over = nn.Linear(8 * 27, 1)

    def forward(self, dense: List[torch.Tensor], sparse: List[torch.Tensor]):
        return self.over(torch.cat([self.dense(dense[0].log1p()), *sparse], 1)).sigmoid(), torch.zeros(())

torch.manual_seed(0)
model = DLRM()
loss_fn = nn.BCELoss()
dense_optimizer = SGD(model.parameters(), lr=0.1)
sparse_optimizer = Adagrad(lr=1e-1)
scaler = torch.cuda.amp.GradScaler() # for half training
losses = []

with TrainCtx(
    grad_scaler=scaler,
    sparse_optimizer=sparse_optimizer,
    port=int(os.environ["TRAINER_PORT"]),
    data_queue_size=int(os.environ["FORWARD_QUEUE_SIZE"]),
) as ctx:
    for (batch_idx, data) in enumerate(ctx.data_loader()):
        (dense, sparse), target = ctx.prepare_features(data)
        output, aux_loss = model(dense, sparse)  # mended: model((dense, sparse))
        bce_loss = loss_fn(output, target)
        loss = aux_loss + bce_loss

        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        finite = ctx.on_after_backward(scale, batch_idx)
        scaler.step(dense_optimizer)
        dense_optimizer.zero_grad()
        if finite:
            scaler.update()
        else:
            scaler.update(scale / 4.0)
        logger.info(f"current idx: {batch_idx} loss: {loss}")
        losses.append(float(loss.detach()))
    print("result", losses, ctx.get_embedding_size())
"""
CUSTOM_DATA = """
import numpy as np
from persia.prelude import PyPersiaBatchData
from persia.ctx import DataCtx

categorical_names = [
    "id",
    "age",
    "gender"
]

batch_size = 64
dim = 256
categorical_data_num = 3
max_categorical_len = 5

with DataCtx() as ctx:
    for _ in range(10):
        batch_data = PyPersiaBatchData()
        batch_data.add_non_id_type_feature(np.ones((batch_size, dim), dtype=np.float32))
        batch_categorical_data = []
        for categorical_idx in range(categorical_data_num):
            batch_categorical_data_item = []
            for batch_idx in range(batch_size):
                cnt_categorical_len = np.random.randint(0, max_categorical_len)
                sample_data = np.ones((cnt_categorical_len), dtype=np.uint64)  # mended: np.random.one
                batch_categorical_data_item.append(sample_data)
            # mended: batch_sparse_data
            batch_categorical_data.append((categorical_names[categorical_idx], batch_categorical_data_item))
        batch_data.add_id_type_features(batch_categorical_data)
        batch_data.add_label(np.ones((batch_size, 2), dtype=np.float32))
        ctx.send_data(batch_data)
"""
CUSTOM_TRAIN = """
import torch
from torch import nn
from torch.optim import SGD

from persia.ctx import TrainCtx
from persia.data import StreamDataset, Dataloader
from persia.env import get_local_rank
from persia.embedding.optim import Adagrad
from persia.logger import get_default_logger
from typing import List

class DNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256 + 24, 2)
    def forward(self, non_id_tensors: List[torch.Tensor], embedding_tensors: List[torch.Tensor]):
        return self.layer(torch.cat([*non_id_tensors, *embedding_tensors], 1)).sigmoid()

logger = get_default_logger()
model = DNN()
prefetch_size = 10
dataset = StreamDataset(prefetch_size)
losses = []

local_rank = get_local_rank()

use_cuda = True
if use_cuda:
    device_id = get_local_rank()
    torch.cuda.set_device(device_id)
    model.cuda(device_id)
    mixed_precision = True
else:
    mixed_precision = False
    device_id = None

# DNN parameters optimizer
dense_optimizer = SGD(model.parameters(), lr=0.1)
# Embedding parameters optimizer
embedding_optimizer = Adagrad(lr=1e-3)

loss_fn = nn.BCELoss()

with TrainCtx(
    model=model,
    embedding_optimizer=embedding_optimizer,
    dense_optimizer=dense_optimizer,
    device_id=device_id,
    mixed_precision=mixed_precision
) as ctx:

    train_data_loader = Dataloader(dataset)
    for (batch_idx, data) in enumerate(train_data_loader):  # mended: loader
        output, labels = ctx.forward(data)
        label = labels[0]
        loss= loss_fn(output, label)  # mended: target
        scaled_loss = ctx.backward(loss)
        logger.info(f"current idx: {batch_idx} loss: {loss}")
        losses.append(float(loss.detach()))
    print("result", losses, ctx.get_embedding_size())
"""


def result_of(output):
    """The losses, and the rows of each server."""
    line = next(line for line in output.splitlines() if line.startswith("result "))
    losses, _, sizes = line.removeprefix("result ").partition("] ")
    return [float(each) for each in losses.strip("[").split(",")], int(sizes.strip("[]"))


def run(folder, files, **environment):
    job = PersiaJob(folder, files, **environment)
    try:
        return result_of(job.run(ROLES, list(ROLES)))
    finally:
        job.close()


@pytest.mark.slow
def test_the_dlrm_document(tmp_path):
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(200):
        keys = generator.integers(0, 9, 26)
        numbers = [
            "" if generator.random() < 0.1 else str(number) for number in generator.integers(0, 99, 13)
        ]
        cells = ["" if generator.random() < 0.1 else f"{key:08x}" for key in keys]
        lines.append("\t".join([str(int(keys[0] % 2)), *numbers, *cells]))
    slots = "".join(f"  sparse_feature{number}: {{dim: 8}}\n" for number in range(26))
    losses, rows = run(
        tmp_path,
        {
            "train.txt": "\n".join(lines) + "\n",
            "embedding.yml": f"slot_configs:\n{slots}",
            "data.py": DLRM_DATA.replace("FOLDER", str(tmp_path)),
            "train.py": DLRM_TRAIN,
        },
        TRAINER_PORT="8000",
        FORWARD_QUEUE_SIZE="4",
    )
    assert len(losses) == 40
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert rows == 26 * 9


@pytest.mark.slow
def test_the_customization_document(tmp_path):
    slots = "slot_configs:\n  id:\n    dim: 8\n    embedding_summation: true # optional field\n"
    slots += "  age:\n    dim: 8\n  gender:\n    dim: 8\n"
    losses, rows = run(tmp_path, {"embedding.yml": slots, "data.py": CUSTOM_DATA, "train.py": CUSTOM_TRAIN})
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert rows == 3
