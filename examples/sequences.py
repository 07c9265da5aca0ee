"""DIN: an item is clicked if the user's history has something like it, which attention finds and a sum hides.

Items are of hidden kinds. A user who has seen an item of a kind likes others of that kind. The program sees
ids of items alone, and learns which of them are alike. `--pooled` shows how far a model comes that has the
mean of the history instead.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import karvan as kv

KINDS, ITEMS, HISTORY = 40, 200, 12


class World:
    """Batches of items and histories, with clicks and the probabilities they were drawn with."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, rows: int) -> tuple[kv.Batch, Tensor]:
        """A tenth of each history is of the item's kind; some histories are empty."""
        user, item = (torch.randint(n, (rows,), generator=self.random) for n in (rows // 8, ITEMS))
        lengths = torch.randint(HISTORY + 1, (rows,), generator=self.random)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        row = torch.arange(rows).repeat_interleave(lengths)
        seen = torch.randint(ITEMS, (len(row),), generator=self.random)
        alike = item[row] % KINDS + KINDS * (seen // KINDS)
        seen = torch.where(torch.rand(len(row), generator=self.random) < 0.1, alike, seen)
        hits = torch.zeros(rows).index_add_(0, row, (seen % KINDS == item[row] % KINDS).float())
        truth = torch.sigmoid(6.0 * (hits > 0) - 3.0)
        click = (torch.rand(rows, generator=self.random) < truth).float()
        return kv.Batch(
            {"user": user, "item": item, "history": kv.Ragged(seen, offsets), "label": click}
        ), truth


def train(model: nn.Module, world: World, steps: int, rows: int) -> None:
    """Train on fresh batches, the learning rates falling to 0."""
    sparse = kv.optim.Adagrad(model, lr=0.1)
    dense = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizers = (sparse, dense)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.02, total_iters=steps) for o in optimizers]
    for step in range(1, steps + 1):
        batch, _ = world.draw(rows)
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        for each in (*optimizers, *schedules):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:>5}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Train, then test on fresh samples."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python examples/sequences.py\n"
        "  python examples/sequences.py --pooled        # without attention",
    )
    parser.add_argument("--steps", type=int, default=400, help="batches to train on (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=512, help="samples in a batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pooled", action="store_true", help="the mean of the history instead of attention")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the net is too small to be worth sharing out
    world = World(arguments.seed)
    model: nn.Module
    if arguments.pooled:
        model = kv.models.DCN([], ["item", "history"], dim=16, hidden=(64,))
    else:  # a history shares the rows of its item
        model = kv.models.DIN([], ["item"], {"history": "item"}, dim=16, hidden=(64,), attention=(64, 32))
    train(model, world, arguments.steps, arguments.batch_size)

    test, truth = world.draw(16_384)
    auc, best, within = kv.metrics.AUC(), kv.metrics.AUC(), kv.metrics.GAUC(group="user")
    model.eval()
    with torch.no_grad():
        logits = model(test)
    auc.update(logits, test)
    within.update(logits, test)
    best.add(truth, test["label"])
    print(f"GAUC {within.compute():.4f}, the AUC within users")
    print(f"AUC {auc.compute():.4f} of {best.compute():.4f} reachable")


if __name__ == "__main__":
    main()
