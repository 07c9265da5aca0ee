"""Learns a planted click model with a plain PyTorch loop.

Users and items have hidden vectors. A user clicks an item with a probability that grows with the match of
their vectors, with the match of the item and those the user saw last, and with the hour. The program sees
only ids and clicks. At the end it prints its AUC beside that of the hidden probabilities, the best there is.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn

import karvan as kv

HISTORY = 12  # items at most that a user saw last


class World:
    """The planted truth, and batches drawn from it."""

    def __init__(self, users: int, items: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.users = torch.randn(users, 4, generator=self.random)
        self.items = torch.randn(items, 4, generator=self.random)
        self.hours = 0.5 * torch.randn(24, generator=self.random)

    def draw(self, size: int) -> tuple[kv.Batch, Tensor, Tensor]:
        """A batch, its clicks, and the probabilities they were drawn with."""
        user, item, hour = (
            torch.randint(n, (size,), generator=self.random) for n in (len(self.users), len(self.items), 24)
        )
        lengths = torch.randint(HISTORY + 1, (size,), generator=self.random)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        seen = torch.randint(len(self.items), (int(offsets[-1]),), generator=self.random)
        recent = nn.functional.embedding_bag(seen, self.items, offsets[:-1], mode="mean")
        logits = ((self.users[user] + 2 * recent) * self.items[item]).sum(1) + self.hours[hour] - 1
        # One visitor in twenty comes once and is never seen again; nothing is known about them.
        once = torch.rand(size, generator=self.random) < 0.05
        logits -= once * (self.users[user] * self.items[item]).sum(1)
        user = torch.where(once, torch.randint(1 << 40, 1 << 62, (size,), generator=self.random), user)
        truth = torch.sigmoid(logits)
        click = (torch.rand(size, generator=self.random) < truth).float()
        batch = kv.Batch({"user": user, "item": item, "history": kv.Ragged(seen, offsets), "hour": hour})
        return batch, click, truth


class ClickModel(nn.Module):
    """How user, item and history match, and a small net over all of them."""

    def __init__(self, dim: int, users: int) -> None:
        super().__init__()
        start = kv.init.Normal(std=0.1)
        self.embeddings = kv.EmbeddingEngine(
            {
                # A row only for users that come again, and only for the most recent ones.
                "user": kv.Table(
                    dim, init=start, admit=kv.admission.MinCount(2), evict=kv.eviction.LRU(capacity=2 * users)
                ),
                "item": kv.Table(dim, init=start),
                "history": kv.Table(dim, init=start, name="item", combiner="mean"),  # the same rows as "item"
                "hour": kv.Table(dim, init=start),
            }
        )
        self.net = nn.Sequential(nn.Linear(4 * dim + 3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: kv.Batch) -> Tensor:
        """The logits of a click."""
        user, item, history, hour = self.embeddings(batch).values()
        match = torch.stack([(user * item).sum(1), (history * item).sum(1), (user * history).sum(1)], 1)
        return match[:, :2].sum(1) + self.net(torch.cat([user, item, history, hour, match], 1)).squeeze(1)


def auc(score: Tensor, click: Tensor) -> float:
    """The chance that a click has a higher score than a non-click."""
    rank = torch.empty(len(score), dtype=torch.float64)
    rank[score.argsort()] = torch.arange(1.0, len(score) + 1, dtype=torch.float64)
    clicks = click.sum().double()
    wins = rank[click > 0].sum() - clicks * (clicks + 1) / 2
    return float(wins / (clicks * (len(click) - clicks)))


def positive(text: str) -> int:
    """An argument that must be at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {number}")
    return number


def main() -> None:
    """Train, telling loss and AUC on the way."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python examples/planted.py\n"
        "  python examples/planted.py --steps 500 --every 100\n"
        "  python examples/planted.py --users 50000 --items 20000 --steps 10000   # needs more data",
    )
    parser.add_argument(
        "--users", type=positive, default=2_000, help="users with a hidden vector (%(default)s)"
    )
    parser.add_argument(
        "--items", type=positive, default=1_000, help="items with a hidden vector (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=2_000, help="batches to train on (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=1_024, help="samples in a batch (%(default)s)")
    parser.add_argument("--every", type=positive, default=200, help="steps between two reports (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the world and the model (%(default)s)")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the net is too small to be worth sharing out; karvan uses all cores
    world = World(arguments.users, arguments.items, arguments.seed)
    test, test_click, test_truth = world.draw(50_000)
    model = ClickModel(dim=8, users=arguments.users)
    sparse = kv.optim.Adagrad(model, lr=0.1)  # the rows of every engine in the model
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)  # the net's weights
    terminal = sys.stdout.isatty()
    begin, total = time.perf_counter(), 0.0
    for step in range(1, arguments.steps + 1):
        batch, click, _ = world.draw(arguments.batch_size)
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), click)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if step % arguments.every == 0 or step == arguments.steps:
            model.eval()
            with torch.no_grad():
                reached = auc(model(test), test_click)
            model.train()
            since = (step - 1) % arguments.every + 1
            rate = step * arguments.batch_size / (time.perf_counter() - begin)
            line = f"step {step:>6}  loss {total / since:.4f}  AUC {reached:.4f}  {rate:,.0f} samples/s"
            print(f"\r{line}\033[K" if terminal else line, end="" if terminal else "\n", flush=True)
            total = 0.0
    best = auc(test_truth, test_click)
    users = model.embeddings.table("user")
    print(
        "\n" * terminal
        + f"{users.rows} users have a row; {users.stats()['rejected']:,} first visits left none"
    )
    print(f"AUC {reached:.4f} of {best:.4f} reachable (0.5 is chance)")


if __name__ == "__main__":
    main()
