"""Columns and features for tests of engines on a GPU: steps that do not wait for it, and steps that must."""

import numpy as np
import torch

from karvan.features import Feature
from karvan.ragged import OptionalRagged, Ragged


def strings_of(lengths, seed, before=0, device="cuda"):
    """Random strings as bytes, and on a device, `before` bytes after an aligned address."""
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 256, n, np.uint8).tobytes() for n in lengths]
    flat = torch.tensor(list(b" " * before + b"".join(rows)), dtype=torch.uint8, device=device)
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)], device=device)
    return rows, Ragged(flat[before:], offsets)


def columns(rows, seed, device="cuda"):
    """A batch of columns of many kinds."""
    random = np.random.default_rng(seed)
    _, query = strings_of(random.integers(0, 40, rows).tolist(), seed, 3, device)
    present = torch.from_numpy(random.integers(0, 2, rows))
    counts = torch.from_numpy(random.integers(0, 9, rows))
    total = int(counts.sum())
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return {
        "query": query,
        "user": torch.from_numpy(random.integers(-(1 << 63), (1 << 63) - 1, rows)).to(device),
        "item": torch.from_numpy(random.integers(0, 50, rows)).to(device),
        "age": torch.from_numpy(random.integers(0, 90, rows)).to(device),
        "price": torch.from_numpy(random.normal(0, 9, rows).astype(np.float32)).to(device),
        "visits": OptionalRagged(
            torch.from_numpy(random.integers(0, 9, int(present.sum()))),
            torch.nn.functional.pad(present.cumsum(0), (1, 0)),
        ).to(device),
        "history": Ragged(torch.from_numpy(random.integers(0, 5, total)), offsets, torch.rand(total)).to(
            device
        ),
        "seen": Ragged(torch.from_numpy(random.integers(0, 5, total)), offsets).to(device),
    }


WITHOUT_WAITING = [
    Feature("query").lower().hash("farm", bucket=1000),
    Feature("query_63").select("query", raw=True).hash("murmur63"),
    Feature("words").select("query", raw=True).vocabulary(["a", "b"], oov=5),
    Feature("user").hash("farm").mod(1 << 40),
    Feature("item").mod(7),
    Feature("item_stack").select("item").hash_stack(2, 100),
    Feature("item_several").select("item").multi_hash([10, 20]),
    Feature("item_prefix").select("user", raw=True).prefix(2, 8),
    Feature("age").bucketize([18, 25, 35]),
    Feature("price").fill_missing(0).bucketize([0.5, 3]),
    Feature("price_ids").select("price", raw=True).clip(0, 5).fill_missing(0).to_ids(6),
    Feature("price_log").select("price", raw=True).clip(0, 100).log1p().normalise(0.5, 2).round(2),
    Feature("visits").fill_missing(3),
    Feature("pair").cross("user", "item"),
    Feature("three").cross("user", "item", "age").mod(100),
    Feature("dense").select("seen").to_dense(4, -1),
    Feature("last").select("seen").to_dense(3, -1, side="left"),
    Feature("lists").concat("user", "item").to_ragged(),
    Feature("more_lists").concat("item", "age").to_ragged(),
    Feature("all").concat("history", "user", offsets=[0, 5]),
]


WAITING_ONCE = {
    "truncate": [Feature("history").truncate(3), Feature("seen").truncate(2, "right")],
    "cross": [Feature("a").cross("history", "seen"), Feature("b").cross("seen", "user")],
    "bucketize": [Feature("price").bucketize([1, 2]), Feature("p").select("price", raw=True).to_ids(4)],
}
