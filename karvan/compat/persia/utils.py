"""`persia.utils`: seeds, YAML files, free ports."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from karvan.settings.yaml_text import parse


def setup_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, and have torch choose deterministic algorithms."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


def load_yaml(filepath: str) -> Any:
    """The content of a YAML file."""
    if not Path(filepath).exists():
        raise FileNotFoundError(f"Expected a YAML file, but {filepath} does not exist.")
    return parse(Path(filepath).read_text())


def dump_yaml(content: Any, filepath: str) -> None:
    """Write a YAML file."""
    Path(filepath).write_text(yaml.safe_dump(content, sort_keys=False))


def find_free_port(port: int = 0) -> int:
    """This port of the local machine if it is free, else another one that is."""
    for wanted in (port, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("Expected a free port on this machine, found none.")
