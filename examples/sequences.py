"""DIN: what a user saw before matters as far as it is like the item that is shown now.

The clicks are synthetic. Their probability grows with the share of the history that is of the item's
category, which the program is not told: it sees ids of items alone, and learns which of them are alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from torch import nn

import karvan as kv


def train(model: nn.Module, batches: Iterable[kv.Batch], steps: int) -> None:
    """One pass over the batches, the learning rates falling to 0."""
    sparse = kv.optim.Adagrad(model, lr=0.2)
    dense = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizers = (sparse, dense)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.02, total_iters=steps) for o in optimizers]
    for batch in batches:
        nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
        for each in (*optimizers, *schedules):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[kv.Batch]) -> dict[str, float]:
    """AUC over all samples, and within users."""
    metrics = {"AUC": kv.metrics.AUC(), "GAUC": kv.metrics.GAUC(group="user")}
    model.eval()
    for batch in batches:
        for metric in metrics.values():
            metric.update(model(batch), batch)
    model.train()
    return {name: metric.compute() for name, metric in metrics.items()}


def main() -> None:
    """Train, then test on records after those."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python examples/sequences.py\n"
        "  python examples/sequences.py --rows 600000 --dim 32",
    )
    parser.add_argument("--rows", type=int, default=200_000, help="to learn from (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    log = kv.data.synthetic.ClickLog(arguments.seed, users=200, items=100, categories=10)
    features = kv.FeatureEngine(
        [kv.Feature("price").log1p(), kv.Feature("recency").log1p(), kv.Feature("history").truncate(20)]
    )
    size = arguments.batch_size
    clicks = kv.data.read(log.table(0, arguments.rows), size, transform=features)
    test = kv.data.read(log.table(arguments.rows, 50_000), size, transform=features)
    model = kv.models.DIN(
        numbers=["price", "recency"],
        ids=["user", "item", "device", "hour"],
        sequences={"history": "item"},  # shares the rows of "item"
        dim=arguments.dim,
        hidden=(128, 64),
        attention=(32,),
        seed=arguments.seed,
    )
    train(model, clicks, -(-arguments.rows // size))
    reached = evaluate(model, test)
    print(f"GAUC {reached['GAUC']:.4f} (AUC within each user)")
    print(f"AUC {reached['AUC']:.4f} of {log.best_auc:.4f} reachable")


if __name__ == "__main__":
    main()
