"""Who earns more than 50,000 dollars: the UCI Adult data, 32,561 people to learn from and 16,281 to test on.

Categories become ids by hashing; numbers enter twice, standardised and as ids of buckets, from which a model
learns any shape. `--persia` is the setting of PERSIA's example: 8 categories and 5 numbers, dim 8, Adagrad at
0.01 for the rows, SGD at 0.1 for the net, batches of 128, one epoch.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

import karvan as kv

FOLDER = Path(__file__).parent.parent.parent / "shared" / "data" / "adult"
NUMBERS = ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
CATEGORIES = [
    *("workclass", "education", "marital_status", "occupation"),
    *("relationship", "race", "sex", "native_country"),
]
COLUMNS = [  # in the order of the file
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation"),
    *("relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country"),
    "income",
]
BUCKETS = {
    "age": range(18, 80, 3),
    "education_num": range(2, 17),
    "capital_gain": [1, *range(2000, 8001, 500), 10000, 14000, 20000],
    "capital_loss": [1, 1500, 1600, 1700, 1800, 1850, 1900, 1950, 2000, 2100, 2200, 2300, 2400, 2500, 3000],
    "hours_per_week": range(10, 90, 5),
}


def features() -> kv.FeatureEngine:
    """From the file's columns to numbers, ids and the label."""
    return kv.FeatureEngine(
        [
            *(kv.Feature(name).strip().hash("farm") for name in CATEGORIES),
            *(kv.Feature(name).log1p().normalise() for name in NUMBERS),
            *(kv.Feature(f"{n}_bucket").select(n, raw=True).bucketize(b) for n, b in BUCKETS.items()),
            # "<=50K" or ">50K", with a dot behind it in the test file
            kv.Feature("label").select("income").strip().substring(0, 1).vocabulary(["<", ">"]),
        ]
    )


def read(path: Path, batch_size: int, **options: Any) -> kv.data.Loader:
    """The batches of a file."""
    types = {name: pa.float32() if name in (*NUMBERS, "fnlwgt") else pa.string() for name in COLUMNS}
    return kv.data.read(path, batch_size, format="csv", options={"schema": types, "header": False}, **options)


def main() -> None:
    """Train for some epochs, with a test after each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python examples/adult.py path/to/adult        # a folder with adult.data and adult.test\n"
        "  python examples/adult.py --model DeepFM --epochs 2\n"
        "  python examples/adult.py --persia",
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FOLDER, help="of adult.data and adult.test (%(default)s)"
    )
    parser.add_argument("--model", choices=["DCN", "DeepFM"], default="DCN")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--persia", action="store_true", help="the setting of PERSIA's example")
    arguments = parser.parse_args()
    data, test = arguments.folder / "adult.data", arguments.folder / "adult.test"
    for path in (data, test):
        if not path.exists():
            sys.exit(
                f"There is no {path.name} in {path.parent}; it is at https://archive.ics.uci.edu/dataset/2."
            )

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the net is too small to be worth sharing out
    persia = arguments.persia
    ids = CATEGORIES if persia else [*CATEGORIES, *(f"{name}_bucket" for name in BUCKETS)]
    trainer = kv.Trainer(
        getattr(kv.models, arguments.model)(NUMBERS, ids, dim=8, hidden=(64, 32), seed=arguments.seed),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=partial(torch.optim.SGD, lr=0.1) if persia else partial(torch.optim.Adam, lr=1e-3),
        sparse_optimizer=kv.optim.Adagrad(lr=0.01 if persia else 0.05),
        metrics={"auc": kv.metrics.AUC(exact=True)},
    )
    made = features().fit(read(data, 4096))
    result = trainer.fit(
        read(data, 128 if persia else 256, shuffle=50_000, seed=arguments.seed, transform=made),
        epochs=1 if persia else arguments.epochs,
        eval_data=read(test, 4096, transform=made),
    )
    if result.stopped is None:  # not by Ctrl-C
        print(f"AUC {result.evaluation['auc']:.4f} on the test file")


if __name__ == "__main__":
    main()
