"""DLRM on Criteo's click logs: a label, 13 integers and 26 ids in base 16 on each line, tabs between them.

Every batch is predicted before the model learns from it, so one pass both trains and tests. Without a path
the program writes a sample in Criteo's format, whose clicks depend on hidden weights of ids and numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import karvan as kv
from karvan.data import criteo


def write_sample(path: Path, rows: int, seed: int) -> None:
    """Lines in Criteo's format; ids are frequent and rare, a tenth of all cells is missing."""
    random = np.random.default_rng(seed)
    vocabulary = 1000
    weights = random.normal(0, 0.5, (26, vocabulary))
    ids = np.minimum(random.zipf(1.3, (rows, 26)), vocabulary) - 1
    integers = random.geometric(0.05, (rows, 13)) - 1
    logits = weights[np.arange(26), ids].sum(1) + 0.2 * np.log1p(integers[:, :4]).sum(1) - 3
    labels = random.random(rows) < 1 / (1 + np.exp(-logits))
    missing = random.random((rows, 39)) < 0.1
    with path.open("w") as file:
        for label, numbers, keys, gone in zip(labels, integers, ids, missing, strict=True):
            cells = [*map(str, numbers), *(f"{column * 4096 + key:08x}" for column, key in enumerate(keys))]
            file.write("\t".join([str(int(label)), *np.where(gone, "", cells)]) + "\n")


def train(model: nn.Module, batches: Iterable[kv.Batch], every: int) -> float:
    """One pass; returns the AUC of the last report."""
    sparse = kv.optim.Adagrad(model, lr=0.05)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    auc, loss_of_all, begin, rows, last = kv.metrics.AUC(), kv.metrics.LogLoss(), time.perf_counter(), 0, 0.5
    for step, batch in enumerate(batches, 1):
        logits = model(batch)
        for metric in (auc, loss_of_all):
            metric.update(logits, batch)
        nn.functional.binary_cross_entropy_with_logits(logits, batch["label"]).backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        rows += batch.rows
        if step % every == 0:
            last, rate = auc.compute(), rows / (time.perf_counter() - begin)
            loss = loss_of_all.compute()
            print(f"step {step:>6}  log-loss {loss:.4f}  AUC {last:.4f}  {rate:,.0f} rows/s", flush=True)
            auc.reset()
            loss_of_all.reset()
    return last


def main() -> None:
    """Read, train, tell."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python examples/criteo.py                     # a generated sample\n"
        "  python examples/criteo.py train.txt --batch-size 4096 --every 1000\n"
        "  python examples/criteo.py 'day_*.gz' --dim 32",
    )
    parser.add_argument("path", nargs="?", help="log files, compressed or not; without it a sample is made")
    parser.add_argument("--rows", type=int, default=60_000, help="of the sample (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--every", type=int, default=30, help="steps between two reports (%(default)s)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--bottom", type=int, nargs="*", default=[128, 64], help="hidden layers")
    parser.add_argument("--top", type=int, nargs="*", default=[128, 64], help="hidden layers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    features = kv.FeatureEngine([kv.Feature(name).clip(0, None).log1p() for name in criteo.INTEGERS])
    model = kv.models.DLRM(
        criteo.INTEGERS, criteo.IDS, arguments.dim, arguments.bottom, arguments.top, seed=arguments.seed
    )
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.path
        if path is None:
            path = Path(folder) / "sample.tsv"
            write_sample(path, arguments.rows, arguments.seed)
        source = criteo.open_logs(path)
        batches = kv.data.read(source, arguments.batch_size, columns=criteo.columns(), transform=features)
        auc = train(model, batches, arguments.every)
    rows = sum(table.rows for table in model.embeddings.tables())
    print(f"{rows:,} ids have a row")
    print(f"AUC {auc:.4f} on rows not seen before")


if __name__ == "__main__":
    main()
