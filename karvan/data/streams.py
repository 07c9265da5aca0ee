"""Endless data: `Stream` prefetches batches on a thread, `Windows` follows folders that appear in time."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from karvan.activity import activity
from karvan.argument_checks import check_counts
from karvan.data.errors import located
from karvan.data.formats.paths import PathLike, exists, folders, join, resolve
from karvan.data.identity import Identity
from karvan.data.loading.loader import Loader
from karvan.data.loading.pipeline import DeviceDelivery, make_delivery
from karvan.data.loading.rank_shares import merge
from karvan.devices import Check, CopyInFlight, data_device
from karvan.ragged import Batch


class Stream:
    """Iterate over the batches of any iterable, and prefetch them on a thread.

    An error of the iterable is raised after the batches before it. If the iterable has `state_dict()` and
    `load_state_dict()`, so has the stream: its position is that after the last batch that was handed out.

    Args:
        batches: An iterable of batches, such as a generator over a `KafkaReader`.
        prefetch: How many batches are taken in advance.
        device: Where batches arrive. With "cuda" they are copied to the GPU beside the computation.

    Example:
        >>> stream = kv.data.Stream({"x": torch.ones(2)} for _ in range(3))
        >>> len(list(stream))
        3
    """

    def __init__(
        self, batches: Iterable[Batch], prefetch: int = 4, device: torch.device | str | None = None
    ) -> None:
        check_counts(1, prefetch=prefetch)
        self._delivery = make_delivery(data_device(device))
        self._batches = batches
        self._queue = _Queue(prefetch)
        self._started = False
        self._position: Any = None

    @property
    def transform(self) -> Any:
        """The transform of the iterable, if it has one; a Trainer saves its state in checkpoints."""
        return getattr(self._batches, "transform", None)

    @property
    def device(self) -> torch.device:
        """Where batches arrive."""
        if self._delivery is not None:
            return self._delivery.device
        before = getattr(self._batches, "device", None)
        return before if isinstance(before, torch.device) else torch.device("cpu")

    def transform_states(self) -> dict[str, Any]:
        """Return the statistics of transforms in other processes, if the iterable is `from_loaders()`.

        Returns:
            The statistics by name.
        """
        return dict(self._ask("transform_states", {}))

    def column_kinds(self) -> dict[str, Any]:
        """Return the kinds of the columns of the iterable, if it is a Loader or like it.

        Returns:
            The kinds by column.
        """
        return dict(self._ask("column_kinds", {}))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._started:
            self._started = True
            self._position = _state_of(self._batches)
            arguments = (self._batches, self._queue, self._delivery)
            threading.Thread(target=_take, args=arguments, name="karvan-data", daemon=True).start()
        batch, position = self._queue.get()
        if isinstance(batch, BaseException):
            raise batch
        self._position = position
        return batch.receive() if isinstance(batch, CopyInFlight) else batch

    def close(self) -> None:
        """End the stream after the batches that have arrived already, from any thread."""
        self._queue.close()

    def __del__(self) -> None:
        if hasattr(self, "_queue"):  # it is missing if the arguments were refused
            self._queue.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the iterable's position after the last batch that was handed out.

        Returns:
            The position.
        """
        state = self._positioned("state_dict")
        return dict(self._position if self._started else state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the iterable to a position, before the first batch.

        Args:
            state: The position.

        Raises:
            RuntimeError: The iteration has started.
        """
        if self._started:
            raise RuntimeError("A stream must be moved before its first batch is taken, but it has started.")
        self._positioned("load_state_dict")(state)

    def merge(self, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the positions of all ranks into one, as the iterable does it.

        Args:
            states: The positions.

        Returns:
            The joint position.
        """
        return dict(self._positioned("merge")(states))

    def require_values(
        self, labels: Sequence[str], weights: Sequence[str] = ()
    ) -> AbstractContextManager[Any]:
        """Make missing values of some columns errors, if the iterable supports it, as a `Loader` does.

        Args:
            labels: The columns of labels.
            weights: The columns of weights.

        Returns:
            A context that ends it.
        """
        required: AbstractContextManager[Any] = self._ask("require_values", nullcontext(), labels, weights)
        return required

    def check_batches(self, check: Check) -> AbstractContextManager[None]:
        """Return a context in which each batch is checked before it goes to a GPU.

        Args:
            check: A function of a batch that may raise.

        Returns:
            The context.
        """
        if self._delivery is not None:
            return self._delivery.check(check)
        checked: AbstractContextManager[None] = self._ask("check_batches", nullcontext(), check)
        return checked

    def identity(self) -> Identity | None:
        """Return the identity of the iterable's data.

        Returns:
            The identity; None if it has none.
        """
        identity: Identity | None = self._ask("identity", None)
        return identity

    def _ask(self, method: str, default: Any, *arguments: Any) -> Any:
        """What a method of the iterable returns; the default if it has no such method."""
        call = getattr(self._batches, method, None)
        return default if call is None else call(*arguments)

    def _positioned(self, method: str) -> Any:
        attribute = getattr(self._batches, method, None)
        if attribute is None:
            kind = type(self._batches).__name__
            raise TypeError(
                f"The position of a stream needs {method}() of its iterable, but {kind} has none."
            )
        return attribute


_Item = Batch | CopyInFlight | BaseException


class _Queue:
    """Prefetched batches; shared with the thread, which must not keep the stream itself alive."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._waiting: deque[tuple[_Item, Any]] = deque()
        self._ended = False

    def put(self, batch: _Item, position: Any) -> bool:
        """Wait for space and add; False, with nothing added, after the end."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._size or self._ended)
            if not self._ended:
                self._waiting.append((batch, position))
                self._changed.notify_all()
            return not self._ended

    def get(self) -> tuple[_Item, Any]:
        """Wait for the next one; raises StopIteration at the end."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._ended)
            if not self._waiting:
                raise StopIteration
            self._changed.notify_all()
            return self._waiting.popleft()

    def close(self) -> None:
        """No more will be added."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _take(batches: Iterable[Batch], queue: _Queue, delivery: DeviceDelivery | None) -> None:
    try:
        with nullcontext() if delivery is None else delivery.copies.on_stream():
            for batch in batches:
                sent = batch if delivery is None else delivery.send(batch)
                if not queue.put(sent, _state_of(batches)):
                    return
    except BaseException as error:
        queue.put(error, None)
    queue.close()


def _state_of(batches: Iterable[Batch]) -> Any:
    return getattr(batches, "state_dict", lambda: None)()


# Online training: windows of data that arrive in time-partitioned folders, e.g. `date=2026-01-31/hour=07`.
#
# Names sort in the order of time. A writer fills a folder and then puts an empty file `_SUCCESS` into it;
# only then is it read. Where writers leave no such file (`complete=None`), a folder is complete as soon as a
# later one, or the end, exists. A file `_END` in the root says that no more folders will come. Windows are
# read strictly in order: later folders wait for one that is not complete, and a folder that appears before
# the current window is too late and is never read.
#
# The position is the current window's name and its loader's position. All ranks must be in the same window
# when positions are saved to be merged, so `next_window` is called by all of them together.


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
                return None if name is None else self._open(name)
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

    def _open(self, name: str) -> Window:
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
