"""Online training: windows of data that arrive in time-partitioned folders, e.g. `date=2026-01-31/hour=07`.

Names sort in the order of time. A writer fills a folder and then puts an empty file `_SUCCESS` into it; only
then is it read. Where writers leave no such file (`complete=None`), a folder is complete as soon as a later
one, or the end, exists. A file `_END` in the root says that no more folders will come. Windows are read
strictly in order: later folders wait for one that is not complete, and a folder that appears before the
current window is too late and is never read.

The position is the current window's name and its loader's position. All ranks must be in the same window
when positions are saved to be merged, so `next_window` is called by all of them together.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from karvan.activity import activity
from karvan.data.errors import located
from karvan.data.formats.paths import PathLike, exists, folders, join, resolve
from karvan.data.loading.loader import Loader
from karvan.data.loading.rank_shares import merge


@dataclass(frozen=True, slots=True)
class Window:
    """A complete folder and the loader that reads it.

    Attributes:
        name: The name of the folder.
        loader: The loader.

    Example:
        >>> window = kv.data.Window("2026-01-31", kv.data.read({"x": [1.0]}, 1))
        >>> window.name
        '2026-01-31'
    """

    name: str
    loader: Loader


class Windows:
    """The folders of a root, one window each, as they become complete.

    Args:
        root: A path, or the URL of any file system.
        pattern: Which folders under the root are windows.
        read: A function that makes the loader of a folder.
        complete: The name of the file that says that a folder is complete; None if every folder is.
        end: The name of the file in the root that says that there will be no more windows.
        poll: How many seconds are between two listings of the root.

    Example:
        >>> windows = kv.data.Windows(
        ...     "clicks",
        ...     "day=*",
        ...     read=lambda folder: kv.data.read(folder, batch_size=4096),
        ... )
        >>> windows.ended
        False
    """

    def __init__(
        self,
        root: PathLike,
        pattern: str = "*",
        *,
        read: Callable[[str], Loader],
        complete: str | None = "_SUCCESS",
        end: str = "_END",
        poll: float = 5.0,
    ) -> None:
        self._root_url = os.fspath(root).rstrip("/")
        self._files, self._root = resolve(self._root_url)
        self._pattern = pattern
        self._read = read
        self._complete = complete
        self._end = end
        self._poll = poll
        self._closed = threading.Event()
        self._current: Window | None = None
        self._resumed: dict[str, Any] | None = None
        self._after = ""
        self._over = False

    @property
    def ended(self) -> bool:
        """Whether `next_window` has reached the end: there will be no more windows."""
        return self._over

    def next_window(self, timeout: float | None = None) -> Window | None:
        """Return the next complete window.

        The unread rest of the current one is skipped.

        Args:
            timeout: How many seconds to wait for it; None for no limit.

        Returns:
            The window; None if there is none. `ended` then says whether it is the end. Otherwise the current
            window stays.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            activity.advance()  # waiting for data that does not exist yet is not a stall
            name = self._look()
            if name is not None or self._over:
                return self._open(name)
            remaining = self._poll if deadline is None else min(self._poll, deadline - time.monotonic())
            if remaining <= 0:
                return None
            if self._closed.wait(remaining):
                self._over = True

    def __iter__(self) -> Iterator[Window]:
        while (window := self.next_window()) is not None:
            yield window

    def close(self) -> None:
        """Make the current window the last one.

        It wakes a `next_window` that waits on another thread.
        """
        self._closed.set()

    def state_dict(self) -> dict[str, Any]:
        """Return the current window and the position in it, for JSON.

        Returns:
            The position.
        """
        if self._current is not None:
            return {"window": self._current.name, "position": self._current.loader.state_dict()}
        return self._resumed or {"window": self._after, "position": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next `next_window` returns its window, which continues there.

        Args:
            state: The position.
        """
        self._current = None
        self._over = False
        self._after = state["window"]
        self._resumed = None if state["position"] is None else dict(state)

    @staticmethod
    def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the positions of all ranks into one that any number of ranks can start from.

        Args:
            states: The positions.

        Returns:
            The joint position.

        Raises:
            ValueError: The ranks are in different windows, or some have not started theirs.
        """
        states = list(states)
        names = sorted({state["window"] for state in states})
        if len(names) != 1:
            raise ValueError(f"Ranks must be in one window to merge their positions, but are in {names}.")
        inside = [state["position"] for state in states if state["position"] is not None]
        if inside and len(inside) != len(states):
            raise ValueError(
                f"All {len(states)} ranks must have started window '{names[0]}' to merge their positions, "
                f"but {len(inside)} have."
            )
        return {"window": names[0], "position": merge(inside) if inside else None}

    def _look(self) -> str | None:
        """The name of the next window if it is complete; sets `ended` at the end."""
        if self._closed.is_set():
            self._over = True
            return None
        with located(self._root_url):
            # Checked before the folders are listed, so that all folders written before the end marker are
            # seen.
            ending = exists(self._files, f"{self._root}/{self._end}")
            names = folders(self._files, self._root, self._pattern)
        if self._resumed is not None:
            if self._after not in names:
                raise FileNotFoundError(
                    f"The position is in window '{self._after}', but the root has no such window."
                )
            return self._after
        later = [name for name in names if name > self._after]
        if later and self._is_complete(later, ending):
            return later[0]
        self._over = ending and not later
        return None

    def _is_complete(self, names: list[str], ending: bool) -> bool:
        if self._complete is None:
            return ending or len(names) > 1
        with located(self._root_url):
            return exists(self._files, f"{self._root}/{names[0]}/{self._complete}")

    def _open(self, name: str | None) -> Window | None:
        if name is None:
            return None
        loader = self._read(join(self._root_url, name))
        loader.call_data(name)
        if self._resumed is not None:
            loader.load_state_dict(self._resumed["position"])
            self._resumed = None
        if self._current is not None:
            self._current.loader.close()
        self._after = name
        self._current = Window(name, loader)
        return self._current
