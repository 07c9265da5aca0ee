"""`HashTableFilterHook`: removes rows that tables with a `FilterHook` do not need any more."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from karvan.compat.recis.hooks.hook import Hook
from karvan.compat.recis.nn.modules.hashtable import filtered


class HashTableFilterHook(Hook):
    """Applies the filters of all tables every filter_interval steps; None never does."""

    def __init__(self, filter_interval: int | None = 100) -> None:
        self.reset_filter_interval(filter_interval)
        self._steps = 0

    def reset_filter_interval(self, interval: int | None = 100) -> None:
        """Filter at another interval from now on."""
        if interval is not None and interval < 1:
            raise ValueError(f"HashTableFilterHook expects an interval of at least 1, got {interval}.")
        self.filter_interval = interval

    @override
    def after_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if not is_train or self.filter_interval is None:
            return
        self._steps += 1
        if self._steps % self.filter_interval == 0:
            for handle in sorted(filtered, key=lambda each: each.name):
                handle.evict()
