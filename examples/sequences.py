"""DIN: an item is clicked if the user's history has something like it, which attention finds and a sum hides.

Items are of hidden kinds. A user who has seen an item of a kind likes others of that kind. The program sees
ids of items alone, and learns which of them are alike. `--pooled` shows how far a model comes that has the
mean of the history instead.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import karvan as kv

KINDS, ITEMS, HISTORY = 40, 200, 12


def draw(rows: int, random: torch.Generator) -> kv.Batch:
    """Samples; a tenth of each history is of the item's kind, some histories are empty."""
    user, item = (torch.randint(n, (rows,), generator=random) for n in (rows // 8, ITEMS))
    lengths = torch.randint(HISTORY + 1, (rows,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    row = torch.arange(rows).repeat_interleave(lengths)
    seen = torch.randint(ITEMS, (len(row),), generator=random)
    alike = item[row] % KINDS + KINDS * (seen // KINDS)
    seen = torch.where(torch.rand(len(row), generator=random) < 0.1, alike, seen)
    hits = torch.zeros(rows).index_add_(0, row, (seen % KINDS == item[row] % KINDS).float())
    truth = torch.sigmoid(6.0 * (hits > 0) - 3.0)
    click = (torch.rand(rows, generator=random) < truth).float()
    history = kv.Ragged(seen, offsets)
    return kv.Batch({"user": user, "item": item, "history": history, "label": click, "truth": truth})


def main() -> None:
    """Train, then test on fresh samples."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python examples/sequences.py\n"
        "  python examples/sequences.py --pooled        # without attention",
    )
    parser.add_argument("--steps", type=int, default=200, help="batches to train on (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=512, help="samples in a batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pooled", action="store_true", help="the mean of the history instead of attention")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the net is too small to be worth sharing out
    if arguments.pooled:
        model: nn.Module = kv.models.DCN([], ["item", "history"], dim=16, hidden=(64,))
    else:  # a history shares the rows of its item
        model = kv.models.DIN([], ["item"], {"history": "item"}, dim=16, hidden=(64,), attention=(64, 32))
    trainer = kv.Trainer(
        model,
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=partial(torch.optim.Adam, lr=7e-3),
        sparse_optimizer=kv.optim.Adagrad(lr=0.25),
        scheduler=lambda optimizer: LinearLR(optimizer, 1.0, 0.1, total_iters=arguments.steps),  # of both
        metrics={"auc": kv.metrics.AUC(), "gauc": kv.metrics.GAUC(group="user")},
    )
    random = torch.Generator().manual_seed(arguments.seed)
    trainer.fit(draw(arguments.batch_size, random) for _ in range(arguments.steps))

    test = draw(16_384, random)
    reached, best = trainer.evaluate([test]), kv.metrics.AUC()
    best.add(test["truth"], test["label"])
    print(f"GAUC {reached['gauc']:.4f}, the AUC within users")
    print(f"AUC {reached['auc']:.4f} of {best.compute():.4f} reachable")


if __name__ == "__main__":
    main()
