"""Tables as they were at one moment, for whoever writes them down while training goes on.

This default holds a copy of all rows in memory until they are read. A store that can do better overrides
`Store.capture`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from karvan.store.protocol import Keys, Rows, Store


class Capture(ABC):
    """All tables as they were at the call of `Store.capture`; its methods may be called on any thread."""

    versions: Mapping[str, int]  # of the tables at that moment: `since` of the next capture

    @abstractmethod
    def part(self, table: str, part: int) -> Rows:
        """The rows of one part, which is let go of; the parts of a table are asked for in ascending order."""

    @abstractmethod
    def erased(self, table: str) -> Keys:
        """The keys that left since the version asked for, those that came back included."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what has not been read."""


class CopiedCapture(Capture):
    """Copies everything at once. With `since`, the changed rows are those used from that step on."""

    def __init__(
        self,
        store: Store,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None,
    ) -> None:
        known = _last_steps.setdefault(store, {})
        self.versions = {table: store.version(table) for table in tables}
        self._erased: dict[str, Keys] = {}
        self._parts: dict[tuple[str, int], Rows] = {}
        for table in tables:
            least = 0
            if since is not None:
                if (table, since[table]) not in known:
                    raise ValueError(
                        f"Table '{table}': expected a version that was captured and no load after it, "
                        f"got version {since[table]}: take a full snapshot instead."
                    )
                least = known[table, since[table]]
                self._erased[table] = store.evicted_since(table, since[table])
            newest = least
            for part in range(parts[table]):
                rows = store.snapshot(table, part, parts[table])
                newest = max(newest, int(rows.last_steps.max(initial=0)))
                changed = rows.last_steps >= least
                self._parts[table, part] = rows._replace(
                    keys=rows.keys[changed],
                    vectors=rows.vectors[changed],
                    state=rows.state[changed],
                    counts=rows.counts[changed],
                    last_steps=rows.last_steps[changed],
                )
            for key in [key for key in known if key[0] == table]:
                del known[key]
            known[table, self.versions[table]] = newest

    def part(self, table: str, part: int) -> Rows:
        """See `Capture.part`."""
        return self._parts.pop((table, part))

    def erased(self, table: str) -> Keys:
        """See `Capture.erased`."""
        return self._erased[table]

    def close(self) -> None:
        """See `Capture.close`."""
        self._parts.clear()


# (table, version) of the last capture → the newest step in it.
_last_steps: weakref.WeakKeyDictionary[Store, dict[tuple[str, int], int]] = weakref.WeakKeyDictionary()


def forget_captures(store: Store, table: str) -> None:
    """Rows were loaded, and their steps do not tell: the next capture of the table must be a full one."""
    known = _last_steps.get(store, {})
    for key in [key for key in known if key[0] == table]:
        del known[key]
