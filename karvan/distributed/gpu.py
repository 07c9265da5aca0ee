"""What tables on a GPU need of this machine."""

from __future__ import annotations

from importlib.util import find_spec

import torch


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
            f"{wanted} expects triton, whose kernels work on the rows, but it is not installed: "
            'pip install "triton>=3.6" (torch for CUDA comes with it).'
        )
