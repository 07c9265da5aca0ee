"""What tables on a GPU need of this machine."""

from __future__ import annotations

import re
from importlib.util import find_spec

import torch

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


def memory_size(given: str | int) -> int:
    """The bytes of a size such as "20GB", "1.5GiB" or 512_000_000; raises ValueError for anything else."""
    size = 0.0
    if isinstance(given, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?i?B?)", given.strip())
        if found is not None and found[2] in _UNITS:
            size = float(found[1]) * _UNITS[found[2]]
    elif isinstance(given, int) and not isinstance(given, bool):
        size = given
    if not size >= 1:
        raise ValueError(
            'device_memory expects a size above 0, such as "20GB", "512MiB" or a number of bytes, got '
            f"{given!r}."
        )
    return int(size)
