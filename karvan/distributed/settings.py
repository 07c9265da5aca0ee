"""`ConnectionSettings`: what a program has chosen by `connect`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from karvan.argument_checks import meant
from karvan.job.environment import SYNC, DenseSettings, ServerLoss, SyncMode

IN_PROCESS = ("memory", "cuda")
KINDS = (*IN_PROCESS, "sharded", "remote")
WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHOICES = {
    "wire": tuple(WIRES),
    "grad_reduce": ("mean", "key", "sum"),
    "transport": ("auto", "memory", "network"),
    "device": ("cpu", "cuda"),
}


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

    def __post_init__(self) -> None:
        kind = self.kind
        if kind not in KINDS:
            raise ValueError(f"connect expects one of {', '.join(KINDS)}, got {kind!r}.{meant(kind, KINDS)}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
        if self.device == "cuda" and kind != "sharded":
            raise ValueError(
                f'device="cuda" is for connect("sharded"), got connect("{kind}"): use connect("cuda") for '
                "rows on the GPU of one process, or Table(device=…) for some tables."
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}.")
        if self.device_memory is not None and kind != "cuda" and self.device != "cuda":
            raise ValueError(
                'device_memory is for connect("cuda") and connect("sharded", device="cuda"), got '
                f'connect("{kind}").'
            )
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"connect expects a capacity of at least 1 row, got {self.capacity}.")
        if self.capacity is not None and (kind not in ("memory", "sharded") or self.device == "cuda"):
            raise ValueError(
                'capacity is for connect("memory") and connect("sharded") with rows in memory, got '
                f'connect("{kind}"): use device_memory for a GPU, roles.parameter_servers.capacity for '
                "servers."
            )

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


# What tables on a GPU need of this machine.

_UNITS = {"": 1, "B": 1} | {
    unit + suffix: base ** (power + 1)
    for power, unit in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def missing_cuda() -> str:
    """Why torch finds no GPU, for a message."""
    if torch.version.cuda is None:
        return f"torch.version.cuda is None here (torch {torch.__version__})"
    return (
        "torch.cuda.is_available() is False here "
        f"(torch {torch.__version__} for CUDA {torch.version.cuda}; nvidia-smi and karvan doctor say more)"
    )


def require_gpu(wanted: str) -> None:
    """Raise unless there are a GPU and triton; wanted: what needs them, as the program wrote it."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"{wanted} expects a GPU and a torch that is built with CUDA, but {missing_cuda()}. Rows can be "
            'in the memory of the machine instead: kv.connect("memory"), and no Table(device="cuda").'
        )
    if find_spec("triton") is None:
        raise ValueError(
            f'{wanted} needs triton, which is not installed: pip install "triton>=3.6" (torch for CUDA '
            "comes with it)."
        )


def memory_size(requested: str | int) -> int:
    """The bytes of a size such as "20GB", "1.5GiB" or 512_000_000; raises ValueError for anything else."""
    size = 0.0
    if isinstance(requested, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?i?B?)", requested.strip())
        if match is not None and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
    elif isinstance(requested, int) and not isinstance(requested, bool):
        size = requested
    if not size >= 1:
        raise ValueError(
            'device_memory expects a size above 0, such as "20GB", "512MiB" or a number of bytes, got '
            f"{requested!r}."
        )
    return int(size)
