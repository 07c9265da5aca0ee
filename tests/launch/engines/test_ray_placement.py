"""Where processes run on a Ray cluster: placement groups, elastic trainers, and nodes that die."""

import os
import signal

import pytest
from engine_helpers import HAS_RAY, NEEDS_RAY
from launch_helpers import spec_of, wait_until
from processes import is_alive, parent_of
from test_engines import FAMILY, family_of
from test_ray_engine import SLEEP, Driver, actor_of, folder_of

from karvan.job.roles import Role, role_of, start_order
from karvan.launch.engines.base import Needs
from karvan.launch.engines.choice import lasting_replicas
from karvan.launch.engines.ray.placement import plan_groups

pytestmark = pytest.mark.skipif(not HAS_RAY, reason=NEEDS_RAY)
SERVER, LOADER, TRAINER = Role.PARAMETER_SERVER, Role.LOADER, Role.TRAINER


def plans_of(**roles):
    found = plan_groups(lasting_replicas(spec_of(roles)))
    return {plan.name: (plan.strategy, [f"{role}-{index}" for role, index in plan.members]) for plan in found}


def test_servers_are_spread_and_trainers_packed_with_their_loader():
    assert plans_of(trainers=3, loaders=2, parameter_servers=2, embedding_workers=3) == {
        "parameter-servers": ("SPREAD", ["parameter-server-0", "parameter-server-1"]),
        "embedding-workers": ("SPREAD", [f"embedding-worker-{index}" for index in range(3)]),
        "loader-0": ("PACK", ["loader-0", "trainer-0", "trainer-2"]),
        "loader-1": ("PACK", ["loader-1", "trainer-1"]),
    }
    assert plans_of(trainers=4, parameter_servers=1) == {}  # nobody is near or far from anybody


def groups_of(job):
    """The states of Ray's groups of a job, by their names in it."""
    from ray.util import placement_group_table

    found = placement_group_table().values()
    prefix = f"{job}/launch/"
    return {
        each["name"].removeprefix(prefix): (each["strategy"], each["state"])
        for each in found
        if each["name"].startswith(prefix) and each["state"] != "REMOVED"
    }


@pytest.fixture
def engine_on(make_ray, nodes):
    """An engine of a job on the nodes of this test."""
    needs = dict.fromkeys(start_order(), Needs(cpus=0.1, resources={nodes.resource: 0.1}))
    engines = []

    def make(**replicas):
        numbers = {role_of(role.replace("_", "-")): count for role, count in replicas.items()}
        engines.append(make_ray(needs=needs, launch="launch", replicas=numbers))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.slow
def test_groups_place_the_processes_and_end_with_the_job(engine_on, start_on, tmp_path):
    engine = engine_on(parameter_server=3, loader=2, trainer=3)
    spread = [start_on(engine, *SLEEP, role=SERVER, index=index) for index in range(3)]
    loaders = [start_on(engine, *SLEEP, role=LOADER, index=index) for index in range(2)]
    trainers = [start_on(engine, *SLEEP, role=TRAINER, index=index) for index in range(3)]
    for run in (*spread, *loaders, *trainers):
        run.first_line()
    assert len({run.handle.node for run in spread}) == 3
    near = [loaders[index].handle.node for index in (0, 1, 0)]
    assert [run.handle.node for run in trainers] == near
    packed = dict.fromkeys(["loader-0", "loader-1"], ("PACK", "CREATED"))
    assert groups_of(tmp_path.name) == {"parameter-servers": ("SPREAD", "CREATED"), **packed}

    # A process that is restarted, also by a later master, is in its place again.
    trainers[2].handle.kill()
    assert trainers[2].end() == -9
    again = start_on(engine_on(parameter_server=3, loader=2, trainer=3), *SLEEP, role=TRAINER, index=2)
    assert wait_until(lambda: again.handle.node) == near[2]
    assert len(groups_of(tmp_path.name)) == 3
    engine.close()
    wait_until(lambda: groups_of(tmp_path.name) == {}, "the groups to be removed")


@pytest.mark.slow
def test_each_process_has_the_gpus_that_it_needs_for_itself(make_ray, start_on, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # of the launcher's machine
    engine = make_ray(needs={TRAINER: Needs(cpus=0.1, gpus=1.0), SERVER: Needs(cpus=0.1)})
    shows = ("import os, time", "print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))", "time.sleep(1000)")
    trainers = [start_on(engine, *shows, index=index) for index in range(2)]
    assert {run.first_line() for run in trainers} == {"'0'", "'1'"}
    third = start_on(engine, *shows, index=2)  # which waits: there is no third one
    trainers[0].handle.kill()
    assert third.first_line() == trainers[0].first_line()


@pytest.mark.slow
def test_the_processes_of_a_group_wait_for_room_for_all_of_them(
    make_ray, start_on, output, nodes, monkeypatch
):
    monkeypatch.setattr("karvan.launch.engines.ray.engine._SAY_AFTER", 0.5)
    needs = {SERVER: Needs(cpus=0.1, resources={nodes.resource: 0.8})}
    engine = make_ray(needs=needs, launch="launch", replicas={SERVER: 4})
    runs = [start_on(engine, *SLEEP, role=SERVER, index=index) for index in range(4)]
    [text] = wait_until(lambda: output.of("parameter-server-0"), "a line about room")
    together = f"0.4 CPU, 3.2 {nodes.resource} with its placement group"
    assert f"needs 0.1 CPU, 0.8 {nodes.resource} ({together}); free in the cluster: " in text
    assert [run.handle.pid for run in runs] == [None] * 4
    nodes.add()
    for run in runs:
        run.first_line()
    assert len({run.handle.node for run in runs}) == 4
    engine.close()


@pytest.mark.slow
def test_the_trainers_of_an_elastic_job_are_near_loaders_without_a_group(engine_on, start_on, tmp_path):
    engine = engine_on(loader=2, trainer=0)
    loaders = [start_on(engine, *SLEEP, role=LOADER, index=index) for index in range(2)]
    for run in loaders:
        run.first_line()
    trainers = [start_on(engine, *SLEEP, role=TRAINER, index=index) for index in range(3)]
    for run in trainers:
        run.first_line()
    assert [run.handle.node for run in trainers] == [loaders[index].handle.node for index in (0, 1, 0)]
    assert groups_of(tmp_path.name) == {}


@pytest.mark.slow
def test_nothing_survives_a_node_and_what_was_on_it_starts_again_on_another(
    engine_on, start_on, nodes, tmp_path
):
    engine = engine_on(parameter_server=2)
    runs = [start_on(engine, *FAMILY, role=SERVER, index=index) for index in range(2)]
    families = [family_of(run) for run in runs]
    raylets = [parent_of(actor_of(run)) for run in runs]
    assert len(set(raylets)) == 2
    os.kill(raylets[0], signal.SIGKILL)
    assert runs[0].end() == -9
    wait_until(lambda: not any(map(is_alive, families[0])), "all of the node to end")
    again = start_on(engine, *FAMILY, role=SERVER, index=0)
    wait_until(lambda: again.handle.pid, "another process")
    assert parent_of(actor_of(again)) not in raylets  # the third node has fewest of its kind
    assert all(map(is_alive, families[1]))

    # Ray notices the death later, and moves the place in the group; the next process is there.
    wait_until(lambda: groups_of(tmp_path.name) == {"parameter-servers": ("SPREAD", "CREATED")})
    again.handle.kill()
    again.end()
    last = start_on(engine, *SLEEP, role=SERVER, index=0)
    wait_until(lambda: last.handle.pid, "another process")
    assert parent_of(actor_of(last)) in set(nodes.living()) - {raylets[1]}


@pytest.mark.slow
def test_the_groups_of_a_job_whose_master_does_not_come_back_are_removed(ray_cluster, ray_address):
    driver = Driver(ray_address, 8.0, "# servers", *FAMILY)
    family = driver.record()[2]
    folder = folder_of(family[0])
    name = f"driven{driver.process.pid}"
    assert groups_of(name) == {"parameter-servers": ("SPREAD", "CREATED")}
    driver.kill()
    wait_until(lambda: not any(map(is_alive, family)), "all to end")
    wait_until(lambda: groups_of(name) == {}, "the group to be removed")
    assert not folder.exists()
