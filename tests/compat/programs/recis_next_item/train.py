"""Predicts the next item of a session by attention, in the form of RecIS's seq2seq example."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from recis.features.feature import Feature
from recis.features.feature_engine import FeatureEngine
from recis.features.op import SelectField, SequenceTruncate
from recis.framework.metrics import add_metric
from recis.framework.trainer import Trainer, TrainingArguments
from recis.io.orc_dataset import OrcDataset
from recis.nn import EmbeddingEngine
from recis.nn.initializers import TruncNormalInitializer
from recis.nn.modules.embedding import EmbeddingOption
from recis.nn.modules.hashtable import filter_out_sparse_param
from recis.optim import SparseAdamW
from recis.utils.logger import Logger
from recis.utils.parser import ArgumentParser
from torch import nn
from torch.optim import AdamW

logger = Logger(__name__)
LENGTH = 6
COLUMNS = [
    {"name": "item", "dim": 8, "bucket": 2048},  # ids, so that the bucket has no meaning
    {"name": "action", "dim": 4, "hash": "murmur", "bucket": 0},
    {"name": "hour", "dim": 4, "hash": "murmur", "bucket": 100},
]


@dataclass
class DataArguments:
    data_paths: str
    batch_size: int
    prefetch: int
    drop_remainder: bool


@dataclass
class ModelArguments:
    hidden_size: int = 8
    heads: int = 2
    seq_len: int = LENGTH


def read(arguments):
    data = OrcDataset(
        arguments.batch_size,
        worker_idx=int(os.environ.get("RANK", 0)),
        worker_num=int(os.environ.get("WORLD_SIZE", 1)),
        prefetch=arguments.prefetch,
        drop_remainder=arguments.drop_remainder,
        transform_fn=[lambda tables: tables[0]],
        device="cuda",
    )
    for path in arguments.data_paths.split(","):
        data.add_path(path)
    for column in COLUMNS:
        data.varlen_feature(column["name"], column.get("hash", None), column.get("bucket", 0))
    return data


def features():
    return [
        Feature(column["name"])
        .add_op(SelectField(column["name"]))
        .add_op(
            SequenceTruncate(
                seq_len=LENGTH, truncate=True, truncate_side="right", check_length=False, n_dims=3
            )
        )
        for column in COLUMNS
    ]


def embeddings():
    return {
        column["name"]: EmbeddingOption(
            embedding_dim=column["dim"],
            shared_name=column["name"],
            combiner="mean",
            initializer=TruncNormalInitializer(std=0.001),
            device=torch.device("cuda"),
        )
        for column in COLUMNS
    }


class NextItem(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.features = FeatureEngine(feature_list=features())
        self.embeddings = EmbeddingEngine(embeddings())
        self.project = nn.Linear(sum(column["dim"] for column in COLUMNS), config.hidden_size)
        self.attend = nn.MultiheadAttention(config.hidden_size, config.heads, batch_first=True)
        self.later = torch.ones(config.seq_len, config.seq_len).triu(1).bool().cuda()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, samples):
        samples = self.embeddings(self.features(samples))
        joined = torch.cat([samples[column["name"]] for column in COLUMNS], dim=-1)
        with torch.amp.autocast(dtype=torch.bfloat16, device_type="cuda"):
            items = self.project(joined)
            length = items.shape[1]
            guesses, _ = self.attend(items, items, items, attn_mask=self.later[:length, :length])
            guesses = F.normalize(guesses[:, :-1].reshape(-1, items.shape[-1]), dim=-1)
            targets = F.normalize(items[:, 1:].reshape(-1, items.shape[-1]), dim=-1)
            similar = guesses @ targets.t()
            answers = torch.arange(len(similar), device=similar.device)
            loss = self.loss(similar, answers)
        add_metric("hit_rate", (similar.argmax(1) == answers).float().mean())
        add_metric("loss", loss)
        return loss


if __name__ == "__main__":
    torch.cuda.set_device(int(os.getenv("RANK", "-1")))
    torch.manual_seed(42)
    dist.init_process_group()
    parser = ArgumentParser()
    parser.add_arguments(TrainingArguments, dest="training")
    parser.add_arguments(DataArguments, dest="data")
    parser.add_arguments(ModelArguments, dest="model")
    args = parser.parse_args()
    model = NextItem(args.model)
    sparse = SparseAdamW(filter_out_sparse_param(model), lr=0.01)
    dense = AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(
        model=model.cuda(),
        args=args.training,
        train_dataset=read(args.data),
        dense_optimizers=(dense, None),
        sparse_optimizer=sparse,
    )
    trainer.train()
