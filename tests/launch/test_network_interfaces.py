"""Which interface a host means."""

import socket

import pytest

from karvan.job.roles import Role
from karvan.launch.job_spec import JobSpec
from karvan.launch.role_programs import environment_of, interface_of, interface_settings

NAMES = {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_loopback_is_found(host):
    assert interface_of(host) in NAMES
    name = interface_of(host)
    assert interface_settings(host) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.77", "no-such-host.invalid"])
def test_hosts_that_mean_no_single_interface_name_none(host):
    assert interface_settings(host) == {}


def test_an_address_of_the_machine_is_found():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards:
        try:
            outwards.connect(("198.51.100.1", 9))  # sends nothing: the kernel chooses an address of its own
        except OSError:
            pytest.skip("this machine has no address besides loopback")
        own = outwards.getsockname()[0]
    name = interface_of(own)
    assert name in NAMES
    assert name != interface_of("127.0.0.1")


def test_a_job_may_choose_the_interface_of_its_trainers_itself():
    trainers = {"env": {"NCCL_SOCKET_IFNAME": "ib0"}}
    spec = JobSpec.model_validate({"name": "a", "entry": "t.py", "roles": {"trainers": trainers}})
    found = environment_of(spec, Role.TRAINER, 0, registry="a:1", generation=0)
    assert found["NCCL_SOCKET_IFNAME"] == "ib0"
    assert found["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in environment_of(spec, Role.LOADER, 0, registry="a:1", generation=0)
