"""A PERSIA job in one process: its embedding configuration, and imports of `persia` that find the adapter."""

import os

import pytest
import yaml

from karvan import distributed
from karvan.compat.imports import import_aliases

SLOTS = {"slots_config": {"user": {"dim": 4}, "item": {"dim": 4}}}


@pytest.fixture(autouse=True)
def persia(tmp_path, monkeypatch):
    """`persia` can be imported; rows are in this process."""
    for name in ("PERSIA_NATS_URL", "PERSIA_NATS_IP", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with import_aliases({"persia": "karvan.compat.persia"}):
        yield
    distributed.disconnect()
    os.environ.clear()  # contexts and launchers set variables of their processes
    os.environ.update(before)


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Writes an embedding_config.yml and has the job use it."""

    def write(content):
        path = tmp_path / "embedding_config.yml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(path))

    write(SLOTS)
    return write
