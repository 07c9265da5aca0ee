"""Engines for tests: the local one, and one of a Ray cluster on this machine."""

import os

import pytest
from engine_helpers import HAS_RAY, NEEDS_RAY, JobNodes, Output, Run, shared_cluster, token_settings

from karvan.job.roles import start_order
from karvan.launch.engines.base import Needs
from karvan.launch.engines.local import LocalEngine

SMALL = dict.fromkeys(start_order(), Needs(cpus=0.1))


@pytest.fixture(scope="session")
def shared_ray(tmp_path_factory):
    if not HAS_RAY:
        pytest.skip(NEEDS_RAY)
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with shared_cluster(base / "ray-cluster") as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in token_settings(cluster.token).items():
            patch.setenv(name, value)
        from ray._private.authentication_test_utils import reset_auth_token_state

        reset_auth_token_state()  # Ray may have read the environment before
        yield cluster


@pytest.fixture(scope="session")
def ray_address(shared_ray):
    return shared_ray.address


@pytest.fixture(scope="session")
def ray_cluster(ray_address, tmp_path_factory):
    """The connection of this process."""
    from karvan.launch.engines.ray.cluster import RayCluster

    cluster = RayCluster.connect(ray_address, tmp_path_factory.getbasetemp())
    yield cluster
    cluster.close()


@pytest.fixture
def nodes(shared_ray, tmp_path):
    """Three nodes for this test alone."""
    found = JobNodes(shared_ray, f"job{os.getpid()}x{abs(hash(tmp_path.name)) % 10**6}", 3)
    yield found
    found.close()


@pytest.fixture
def output():
    return Output()


@pytest.fixture
def make_ray(ray_cluster, output, tmp_path):
    """`make_ray()` is a Ray engine."""
    from karvan.launch.engines.ray.engine import RayEngine

    return lambda **more: RayEngine(
        output.write, ray_cluster, **{"job": tmp_path.name, "needs": SMALL, "unattended": 15.0, **more}
    )


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def engine(request, output, tmp_path):
    if request.param == "local":
        return LocalEngine(output.write, tmp_path / "run-folder")
    return request.getfixturevalue("make_ray")()


@pytest.fixture
def start(engine, output):
    """`start("print(1)")` runs a program; what is left of it at the end of the test is killed."""
    started = []

    def run(*code, **more):
        started.append(Run(engine, output, *code, **more))
        return started[-1]

    yield run
    for each in started:
        each.handle.kill()
    for each in started:
        each.end()


@pytest.fixture
def start_on(output):
    """The same with an engine of the test's own."""
    started = []

    def run(engine, *code, **more):
        started.append(Run(engine, output, *code, **more))
        return started[-1]

    yield run
    for each in started:
        each.handle.kill()
    for each in started:
        each.end()
