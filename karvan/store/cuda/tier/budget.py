"""`DeviceBudget`: the GPU memory that rows may take, divided over the row layouts."""

from __future__ import annotations

from collections.abc import Collection, Hashable


class DeviceBudget:
    """So many bytes for the rows of all layouts together.

    Layouts that have tables when the first of them needs memory get equal shares. One that comes later gets
    an equal share of what others have left: nothing, as a rule, so that its rows are in host memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._shares: dict[Hashable, int] = {}

    def share(self, layout: Hashable, in_use: Collection[Hashable]) -> int:
        """The bytes of a layout; in_use: those that have tables now. It stays the same from then on."""
        if layout not in self._shares:
            new = [each for each in {layout: None, **dict.fromkeys(in_use)} if each not in self._shares]
            left = self.size - sum(size for each, size in self._shares.items() if each in in_use)
            self._shares |= dict.fromkeys(new, max(0, left) // len(new))
        return self._shares[layout]
