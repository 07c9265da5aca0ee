"""A factorization machine beside a net, in the form of RecIS's deepfm example."""

import os
import random
from dataclasses import dataclass
from multiprocessing import cpu_count

import numpy as np
import torch
import torch.distributed as dist
from columns import DIM, IDS, NUMBERS, DataArguments, embeddings, features, read
from recis.features.feature_engine import FeatureEngine
from recis.framework.metrics import add_metric
from recis.framework.trainer import Trainer, TrainingArguments
from recis.hooks import Hook, ProfilerHook
from recis.metrics.auroc import AUROC
from recis.nn import EmbeddingEngine
from recis.nn.modules.hashtable import filter_out_sparse_param
from recis.optim.sparse_adamw import SparseAdamW
from recis.utils.logger import Logger
from recis.utils.parser import ArgumentParser
from torch import nn
from torch.optim import AdamW

logger = Logger(__name__)


@dataclass
class Rates:
    dense_lr: float = 0.001
    sparse_lr: float = 0.001


class Inputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = FeatureEngine(feature_list=features())
        self.embeddings = EmbeddingEngine(embeddings())

    def forward(self, samples):
        samples = self.embeddings(self.features(samples))
        return samples, samples.pop("clicked")


class Machine(nn.Module):
    def __init__(self):
        super().__init__()
        fields = len(NUMBERS) + len(IDS)
        self.inputs = Inputs()
        self.vectors = nn.Parameter(0.001 * torch.randn(len(NUMBERS), DIM))
        self.biases = nn.Parameter(0.001 * torch.randn(len(NUMBERS), 1))
        self.net = nn.Sequential(nn.Linear(fields * DIM, 8), nn.ReLU(), nn.Linear(8, 1))
        self.auc = AUROC(num_thresholds=200, dist_sync_on_step=True)
        self.loss = nn.BCELoss()

    def forward(self, samples):
        samples, clicked = self.inputs(samples)
        rows = clicked.shape[0]
        weights = torch.stack([samples[name] for name in NUMBERS], dim=1)
        weights = torch.cat([weights, torch.ones([rows, len(IDS), 1], device=weights.device)], dim=1)
        vectors = torch.stack([samples[f"{name}_vector"] for name in IDS], dim=1)
        vectors = torch.cat([self.vectors.repeat(rows, 1, 1), vectors], dim=1)
        biases = torch.stack([samples[f"{name}_bias"] for name in IDS], dim=1)
        biases = torch.cat([self.biases.repeat(rows, 1, 1), biases], dim=1)
        linear = (weights * biases).squeeze(-1).sum(-1, keepdim=True)
        weighted = vectors * weights
        pairs = 0.5 * (weighted.sum(1) ** 2 - (weighted**2).sum(1)).sum(-1, keepdim=True)
        deep = self.net(vectors.view(-1, vectors.shape[1] * vectors.shape[2]))
        score = torch.sigmoid(linear + pairs + deep)
        self.auc.update(score, clicked)
        add_metric("auc", self.auc.compute())
        return self.loss(score, clicked)


class Batches(Hook):
    """A hook as those of RecIS 1.0 are."""

    def __init__(self):
        self.seen = 0

    def after_step(self, metrics, global_step):
        self.seen += 1

    def end(self):
        logger.info(f"hook: {self.seen} batches")


def main(args):
    model = Machine()
    logger.info(str(model))
    data = read(args.data)
    tables = filter_out_sparse_param(model)
    logger.info(f"tables: {tables}")
    sparse = SparseAdamW(tables, lr=args.rates.sparse_lr)
    dense = AdamW(params=model.parameters(), lr=args.rates.dense_lr)
    model = model.cuda()
    trainer = Trainer(
        model=model,
        args=args.training,
        train_dataset=data,
        dense_optimizers=(dense, None),
        sparse_optimizer=sparse,
    )
    trainer.add_hook(Batches())
    if int(os.environ.get("RANK", 0)) == 0:
        trainer.add_hooks(
            [ProfilerHook(wait=1, warmup=1, active=1, repeat=1, output_dir=args.training.output_dir)]
        )
    trainer.train()


def prepare(seed):
    threads = cpu_count() // 16
    for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
        os.environ[f"{name}_NUM_THREADS"] = str(threads)
    torch.set_num_interop_threads(threads)
    torch.set_num_threads(threads)
    torch.cuda.set_device(int(os.getenv("RANK", "-1")))
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


if __name__ == "__main__":
    prepare(42)
    dist.init_process_group()
    parser = ArgumentParser()
    parser.add_arguments(Rates, dest="rates")
    parser.add_arguments(TrainingArguments, dest="training")
    parser.add_arguments(DataArguments, dest="data")
    arguments = parser.parse_args()
    logger.info(f"arguments: {arguments}")
    main(arguments)
