"""`persia.embedding`: how new rows start, which ids get rows, and how large their values may be."""

from __future__ import annotations

from dataclasses import dataclass

from karvan.presets import persia


@dataclass
class EmbeddingConfig:
    """New rows are uniform within emb_initialization; values stay within ±weight_bound, if it is above 0.

    admit_probability: with which probability an unknown id gets a row, each time it occurs.
    """

    emb_initialization: tuple[float, float] = persia.INITIAL_RANGE
    admit_probability: float = 1.0
    weight_bound: float = persia.WEIGHT_BOUND

    @property
    def bound(self) -> float | None:
        """The bound of values; None without one."""
        return self.weight_bound if self.weight_bound > 0 else None


def get_default_embedding_config() -> EmbeddingConfig:
    """The defaults."""
    return EmbeddingConfig()
