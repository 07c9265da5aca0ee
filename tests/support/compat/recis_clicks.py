"""A small model of RecIS's kind with its data in ORC files, and a Trainer of it."""

import pyarrow as pa
import torch
from pyarrow import orc
from torch import nn

from karvan.compat.recis.framework.metrics import add_metric
from karvan.compat.recis.framework.trainer import Trainer, TrainingArguments
from karvan.compat.recis.io.orc_dataset import OrcDataset
from karvan.compat.recis.nn import EmbeddingEngine, EmbeddingOption
from karvan.compat.recis.nn.initializers import NormalInitializer
from karvan.compat.recis.nn.modules.hashtable import filter_out_sparse_param
from karvan.compat.recis.optim import SparseAdamW

RECORDS = 40


def write_files(tmp_path):
    """Two files with two columns of numbers, two of ids, a string and a weighted column."""
    folder = tmp_path / "data" / "day"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part in range(2):
        first = part * RECORDS // 2
        rows = range(first, first + RECORDS // 2)
        table = pa.table(
            {
                "label": [[float(i % 3 == 0)] for i in rows],
                "dense": [[i / 10, i / 20] if i != 3 else None for i in rows],
                "user": [[i] for i in rows],
                "items": [torch.randint(50, (int(i % 4),), generator=generator).tolist() for i in rows],
                "word": [f"word {i}" for i in rows],
                "liked": pa.array(
                    [[{"k": i, "v": 0.5}] for i in rows],
                    pa.list_(pa.struct([("k", pa.int64()), ("v", pa.float32())])),
                ),
            }
        )
        orc.write_table(table, folder / f"part-{part}.orc")
    return tmp_path / "data"


def dataset(folder, batch_size=8, **options):
    made = OrcDataset(batch_size, transform_fn=[lambda tables: tables[0]], **options)
    made.add_path(str(folder))
    made.fixedlen_feature("label", [0.0])
    made.fixedlen_feature("dense", [1.0, 2.0])
    made.varlen_feature("user")
    made.varlen_feature("items")
    return made


def batches(data):
    return [batch for is_end, batch in data if not is_end]


class Model(nn.Module):
    """A model as RecIS's are: it returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        init = NormalInitializer(std=0.1)
        self.engine = EmbeddingEngine(
            {
                "user": EmbeddingOption(4, shared_name="user", initializer=init),
                "items": EmbeddingOption(4, shared_name="items", initializer=init, combiner="mean"),
            }
        )
        self.net = nn.Linear(10, 1)

    def forward(self, samples):
        made = self.engine(samples)
        joined = torch.cat([made["user"], made["items"], made["dense"]], 1)
        score = self.net(joined)
        loss = nn.functional.binary_cross_entropy_with_logits(score, made["label"])
        add_metric("mean", score.mean())
        return loss


def make(files, folder, *, eval_dataset=None, hooks=(), data=None, **arguments):
    model = Model()
    sparse = SparseAdamW(filter_out_sparse_param(model), lr=0.05)
    dense = torch.optim.Adam(model.parameters(), lr=0.05)
    settings = {"output_dir": str(folder), "log_steps": 2, **arguments}
    return Trainer(
        model,
        TrainingArguments(**settings),
        data or dataset(files),
        eval_dataset,
        hooks,
        dense_optimizers=(dense, torch.optim.lr_scheduler.StepLR(dense, 2)),
        sparse_optimizer=sparse,
    )


def state(model):
    rows = {
        name: sorted(zip(*(each.tolist() for each in table.ids_embeddings()), strict=True))
        for name, table in filter_out_sparse_param(model).items()
    }
    return rows, {name: value.tolist() for name, value in model.net.state_dict().items()}
