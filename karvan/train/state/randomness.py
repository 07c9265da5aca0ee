"""The state of all random generators that a training step may draw from, as a tree of tensors."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Of torch, on the CPU and on GPUs in use, of numpy and of Python."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "numpy": {
            "kind": legacy["bit_generator"],
            "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    legacy = state["numpy"]
    key = legacy["key"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], key, legacy["pos"], legacy["has_gauss"], legacy["gauss"]))
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))


@contextmanager
def same_random_state_afterwards() -> Iterator[None]:
    """Restore the generators afterwards, whatever was drawn inside."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def seed_random(*numbers: int) -> None:
    """Seed all generators by these numbers, so that what follows depends on nothing else."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
