"""DLRM on Criteo's click logs: a label, 13 integers and 26 ids in base 16 on each line, tabs between them.

Every batch is predicted before the model learns from it, so one pass both trains and tests. Without a path
the program writes a sample in Criteo's format, whose clicks depend on hidden weights of ids and numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv

import karvan as kv
from karvan.data.formats import criteo
from karvan.train import PlainProgress, Report


def write_sample(path: str, rows: int, seed: int) -> None:
    """Lines in Criteo's format; ids are frequent and rare, a tenth of all cells is missing."""
    random = np.random.default_rng(seed)
    vocabulary = 1000
    weights = random.normal(0, 0.5, (26, vocabulary))
    ids = np.minimum(random.zipf(1.3, (rows, 26)), vocabulary) - 1
    integers = random.geometric(0.05, (rows, 13)) - 1
    logits = weights[np.arange(26), ids].sum(1) + 0.2 * np.log1p(integers[:, :4]).sum(1) - 3
    labels = random.random(rows) < 1 / (1 + np.exp(-logits))
    missing = random.random((rows, 39)) < 0.1
    names = np.array([[f"{column * 4096 + key:08x}" for key in range(vocabulary)] for column in range(26)])
    cells = [*integers.T, *(names[column, keys] for column, keys in enumerate(ids.T))]
    arrays = [pa.array(values, mask=gone) for values, gone in zip(cells, missing.T, strict=True)]
    table = pa.table([pa.array(labels.astype(int)), *arrays], names=criteo.schema().names)
    csv.write_csv(table, path, csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none"))


class Reports(PlainProgress):
    """A line now and then, each about the batches since the one before."""

    def __init__(self, metric: kv.metrics.AUC, every: int) -> None:
        super().__init__(sys.stdout, seconds=0)
        self.metric, self.every, self.auc = metric, every, float("nan")

    def report(self, report: Report) -> None:
        """Print it, and begin anew."""
        super().report(report)
        if report.step % self.every == 0 or report.step < self.every:  # not what is left for the end
            self.auc = report.values["auc"]
        self.metric.reset()


def train(batches: kv.data.Loader, arguments: argparse.Namespace) -> float:
    """One pass; returns the AUC of the last report."""
    torch.manual_seed(arguments.seed)
    metric = kv.metrics.AUC()
    reports = Reports(metric, arguments.every)
    trainer = kv.Trainer(
        kv.models.DLRM(
            criteo.INTEGERS, criteo.IDS, arguments.dim, arguments.bottom, arguments.top, seed=arguments.seed
        ),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=partial(torch.optim.Adam, lr=1e-3),
        sparse_optimizer=kv.optim.Adagrad(lr=0.05),
        metrics={"auc": metric},
        log_every=arguments.every,
        progress=reports,
    )
    trainer.fit(batches)
    return reports.auc


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
    parser.add_argument("--rows", type=int, default=51_200, help="of the sample (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--every", type=int, default=25, help="steps between two reports (%(default)s)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--bottom", type=int, nargs="*", default=[128, 64], help="hidden layers")
    parser.add_argument("--top", type=int, nargs="*", default=[128, 64], help="hidden layers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    features = kv.FeatureEngine([kv.Feature(name).clip(0, None).log1p() for name in criteo.INTEGERS])
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.path
        if path is None:
            path = f"{folder}/sample.tsv"
            write_sample(path, arguments.rows, arguments.seed)
        try:
            logs = criteo.open_logs(path)
            batches = kv.data.read(logs, arguments.batch_size, columns=criteo.columns(), transform=features)
            auc = train(batches, arguments)
        except kv.data.DataError as error:
            sys.exit(str(error))
    print(f"AUC {auc:.4f} on rows not seen before")


if __name__ == "__main__":
    main()
