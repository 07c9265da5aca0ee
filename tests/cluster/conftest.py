"""What tests of the references' behaviours run on: servers and workers that all of them share."""

import itertools

import pytest
from reference_helpers import Clusters
from worker_helpers import Loader

import karvan as kv

_names = itertools.count()


@pytest.fixture(scope="session")
def clusters():
    """Servers and workers of the tests of the references' behaviours, which start what they need."""
    made = Clusters()
    yield made
    for cluster in made.values():
        cluster.close()


@pytest.fixture
def job(clusters, monkeypatch):
    """job(servers, way) makes this process a trainer of empty tables; gives a function that sends ids."""
    loaders = []

    def begin(servers=1, way="trainer", **options):
        connection = clusters[servers].connect(monkeypatch, int(way == "worker"), **options)
        if way == "trainer":
            return lambda batch, ids=None: dict(batch)
        loader = Loader(clusters[servers], 1, f"reference job {next(_names)}").serve(connection)
        loaders.append(loader)
        return loader.send

    yield begin
    kv.connect("memory")
    for loader in loaders:
        loader.close()
