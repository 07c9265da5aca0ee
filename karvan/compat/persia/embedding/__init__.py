"""`persia.embedding`: how new rows start, which ids get rows, and how large their values may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddingConfig:
    """New rows are uniform within emb_initialization; values stay within ±weight_bound, if it is above 0.

    admit_probability: with which probability an unknown id gets a row, each time it occurs.
    """

    emb_initialization: tuple[float, float] = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10


def get_default_embedding_config() -> EmbeddingConfig:
    """The defaults."""
    return EmbeddingConfig()
