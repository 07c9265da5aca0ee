"""`TierStream`: the stream of exchanges, and how all other work on rows comes after them."""

from __future__ import annotations

import torch


class TierStream:
    """Exchanges of rows are queued beside the current stream; `join` makes the current stream wait for them.

    On a CPU device, kernels run when they are queued. used: whether there is a host tier.
    """

    def __init__(self, device: torch.device, *, used: bool) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and used:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None  # of the last exchange, until it is known to be over

    def record(self) -> None:
        """An exchange was queued."""
        if self.stream is not None:
            self._done = self.stream.record_event()

    def join(self) -> None:
        """What is queued from now on, on the current stream, comes after the last exchange.

        A graph that is being recorded waits for nothing: whoever replays it joins.
        """
        done = self._done
        if done is None or torch.cuda.is_current_stream_capturing():
            return
        if done.query():  # type: ignore[no-untyped-call]
            self._done = None
            return
        current = torch.cuda.current_stream(self._device)
        if current != self.stream:
            current.wait_event(done)
