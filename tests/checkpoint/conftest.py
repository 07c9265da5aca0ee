"""Fixtures of the tests of checkpoints at URLs."""

import pytest
from object_stores import KEYS, object_store


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A store that the tests of a file share."""
    with object_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    """The store, with nothing that fails, and a cache folder of the test's own."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KARVAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    server.heal()
    yield server
    server.heal()
