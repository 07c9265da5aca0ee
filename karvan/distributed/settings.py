"""`ConnectionSettings`: what a program has chosen by `connect`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from karvan.job.environment import ServerLoss
from karvan.job.sync_modes import SYNC, DenseSettings, SyncMode

IN_PROCESS = ("memory", "cuda")
KINDS = (*IN_PROCESS, "sharded", "remote")
TRANSPORTS = ("auto", "memory", "network")
WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REDUCES = ("mean", "key", "sum")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ConnectionSettings:
    """The settings of a connection; see `connect`.

    elastic: trainers of the run come and go. They are members, whose numbers and run the job's master gives
    out; servers stage their updates until their step is committed (`step_commits.py`).
    """

    kind: str = "memory"
    wire: str = "float32"
    grad_reduce: str = "mean"
    timeout: float = 300.0
    transport: str = "auto"
    device: str = "cpu"
    device_memory: int | None = None  # bytes that rows take on the GPU at most
    capacity: int | None = None  # rows of this process, over all tables
    staleness: int = 1
    on_server_loss: ServerLoss = ServerLoss.ROLLBACK
    mode: SyncMode = SYNC
    dense: DenseSettings = field(default_factory=DenseSettings)
    elastic: bool = False
    member: int = 0
    run: str = ""

    def check_elastic(self) -> None:
        """Raise a ValueError if an elastic run cannot have these settings."""
        if not self.run:
            raise ValueError("An elastic run has a name that its members share, got none.")
        if self.on_server_loss is ServerLoss.RELOAD:
            raise ValueError(
                "An elastic run goes back to its checkpoint when a server is lost: expected on_server_loss "
                "rollback, got reload."
            )
        if self.dense.rejects:
            raise ValueError(
                "An elastic run has neither grads_to_wait nor tolerance, because gradients that wait for "
                "others are lost when their trainer dies."
            )


def check_capacity(capacity: int, kind: str, device: str) -> None:
    """Raise a ValueError if a connection of this kind, with rows on this device, cannot have the capacity."""
    if capacity < 1:
        raise ValueError(f"connect expects a capacity of at least 1 row, got {capacity}.")
    if kind not in ("memory", "sharded") or device == "cuda":
        raise ValueError(
            'capacity is for connect("memory") and connect("sharded") with rows in memory, got '
            f'connect("{kind}"): use device_memory for a GPU, roles.parameter_servers.capacity for servers.'
        )
