"""What a checkpoint contains, bit for bit, to compare it with another one."""

import hashlib
from pathlib import Path

import torch

from karvan.checkpoint import find


def state_of(path):
    """All tensors and numbers of a checkpoint, by their place in it."""
    found = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, entry in value.items():
                walk(entry, f"{name}/{key}")
        elif isinstance(value, list | tuple):
            for number, entry in enumerate(value):
                walk(entry, f"{name}/{number}")
        else:
            found[name] = value

    walk(find(path).state(), "")
    return {name: value for name, value in found.items() if not name.startswith("/data/identity")}


def assert_same(one, two):
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        assert same, name


def rows_of(path):
    """A checksum of each file of rows of a checkpoint."""
    newest = Path(path)
    files = sorted(newest.glob("tables/**/*.safetensors"))
    return {str(path.relative_to(newest)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
