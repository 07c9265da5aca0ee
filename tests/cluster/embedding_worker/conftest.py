"""Servers and workers that tests of embedding workers share."""

import itertools

import pytest
from worker_helpers import Cluster, Loader

import karvan as kv

_names = itertools.count()


class _Clusters(dict):
    """By the number of parameter servers, started when needed, each with two embedding workers."""

    def __missing__(self, servers):
        cluster = self[servers] = Cluster(servers, 2)
        cluster.wait()
        return cluster


@pytest.fixture(scope="session")
def clusters():
    made = _Clusters()
    yield made
    for cluster in made.values():
        cluster.close()


@pytest.fixture
def job(clusters, monkeypatch):
    """job(servers, workers) makes this process a trainer, and gives a loader."""
    opened = []

    def begin(servers=1, workers=1, **options):
        connection = clusters[servers].connect(monkeypatch, workers, **options)
        loader = Loader(clusters[servers], workers, f"job {next(_names)}").serve(connection)
        opened.append(loader)
        return loader

    yield begin
    for loader in opened:
        loader.close()
    kv.connect("memory")
