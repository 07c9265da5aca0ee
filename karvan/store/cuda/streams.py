"""`DeviceStreams`: the streams of a store on a GPU, each created once.

torch has 32 streams of each priority and gives them out in turn. If a store created them as it needs them, a
stream on which a graph is being recorded could be one on which another thread copies rows.
"""

from __future__ import annotations

import torch


class DeviceStreams:
    """The streams of a store; all are None for a store on "cpu", where kernels run when they are queued."""

    def __init__(self, device: torch.device) -> None:
        self.side = _stream(device, priority=-1)
        """For small kernels beside large ones, which must not wait until all of their programs have begun."""
        self.gathers = _stream(device, priority=-1)
        """For the rows that captures read: training waits for these kernels."""
        self.copies = _stream(device)
        """For copies of rows to the host."""
        self.recording = _stream(device)
        """For work that is recorded into graphs."""

    def refuse_graph(self) -> None:
        """Raise if the program is recording a CUDA graph of its own on the current stream."""
        if self.recording is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Tables on a GPU cannot be looked up or updated while the program records a CUDA graph: its "
                "replays would not reserve memory for new rows. Record the dense part only; lookups and "
                "updates of batches of the same shape are replayed as graphs of the store's own."
            )


def _stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
