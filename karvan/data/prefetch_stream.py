"""`Stream`: batches of endless data, prefetched on a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from karvan.argument_checks import check_counts
from karvan.data.identity import Identity
from karvan.data.loading.pipeline import DeviceDelivery, make_delivery
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
        states = getattr(self._batches, "transform_states", None)
        return dict(states()) if states is not None else {}

    def column_kinds(self) -> dict[str, Any]:
        """Return the kinds of the columns of the iterable, if it is a Loader or like it.

        Returns:
            The kinds by column.
        """
        kinds = getattr(self._batches, "column_kinds", None)
        return dict(kinds()) if kinds is not None else {}

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
        require = getattr(self._batches, "require_values", None)
        if require is None:
            return nullcontext()
        required: AbstractContextManager[Any] = require(labels, weights)
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
        before = getattr(self._batches, "check_batches", None)
        checked: AbstractContextManager[None] = nullcontext() if before is None else before(check)
        return checked

    def identity(self) -> Identity | None:
        """Return the identity of the iterable's data.

        Returns:
            The identity; None if it has none.
        """
        identity = getattr(self._batches, "identity", None)
        return None if identity is None else identity()

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
