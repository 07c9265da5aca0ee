"""A master that moves to another address is found there, by clients that wait for it, through a file."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from karvan.cluster.role_process import Generations
from karvan.data.work_client import WorkClient
from karvan.discovery.directory import Directory, Membership
from karvan.discovery.registry import Registry
from karvan.distributed.elastic import GroupClient
from karvan.distributed.wire_store import WireStore
from karvan.job.address import MasterAddress, change_master_address, make_master_address
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.wire import Security, WireError
from karvan.work.service import WorkService
from karvan.work.task import WorkSpec
from karvan.work.trainer_group import TrainerGroup

SECRET = Security(token="secret")


@contextmanager
def master(folder):
    """A master at a port of its own, with what the last one has left in the folder."""
    with ExitStack() as stack:
        work = stack.enter_context(closing(WorkService(folder / "work.db")))
        beside = [work, TrainerGroup(folder / "group.json")]
        registry = Registry(security=SECRET, beside=beside, rendezvous=folder / "keys", generation=1)
        yield stack.enter_context(closing(registry))


def test_clients_that_wait_for_a_master_find_it_at_its_new_address(tmp_path):
    with ExitStack() as stack:
        with master(tmp_path) as first:
            make_master_address(path := tmp_path / "address", first.address)
            address = MasterAddress(first.address, str(path))
            directory = stack.enter_context(closing(Directory(address, SECRET)))
            store = stack.enter_context(closing(WireStore(address, 1, SECRET, timeout=60.0)))
            group = stack.enter_context(closing(GroupClient(address, "trainer", SECRET)))
            work = WorkClient(address, "holder", SECRET)
            stack.callback(work.disconnect)
            member = Membership(address, "parameter-server", 0, "h:1", SECRET, beat=0.05)
            stack.callback(member.leave)
            work.open(WorkSpec((("file", 10),), 10, None))
            [lease] = work.lease()
            assert store.add("n", 2) == 2
            run = group.enter()
            assert directory.find("parameter-server", 0, 60) == "h:1"
        with master(tmp_path) as second, ThreadPoolExecutor(5) as threads:
            answers = [
                threads.submit(directory.find, "parameter-server", 0, 60),
                threads.submit(store.add, "n", 2),
                threads.submit(group.enter),
                threads.submit(work.acknowledge, {lease.token: 10}),
                threads.submit(Generations(address, SECRET).check, 1),
            ]
            assert second.address != first.address == str(address)
            assert not any(answer.done() for answer in answers)
            change_master_address(path, second.address)
            assert str(address) == second.address
            assert [answer.result(60) for answer in answers] == ["h:1", 4, run, [], 1]
            assert second.healthy(Role.PARAMETER_SERVER, 0)
            member.leave()


def test_a_master_that_does_not_move_is_waited_for_no_longer_than_without_a_file(tmp_path):
    with master(tmp_path) as first:
        make_master_address(path := tmp_path / "address", first.address)
        address = MasterAddress(first.address, str(path))
    with pytest.raises(WireError, match=r"expected to answer 'members' within 0\.3 s"):
        Directory(address, SECRET).find("trainer", 0, 0.3)
    with pytest.raises(WireError, match=r"within 0\.3 s"):
        Membership(address, "trainer", 0, "h:1", SECRET, patience=0.3)


def test_the_first_address_counts_until_there_is_another(tmp_path):
    path, missing = tmp_path / "file", tmp_path / "missing"
    address = MasterAddress("a:1", str(path))
    for content in (b"", b"\n", b"\xff"):
        path.write_bytes(content)
        assert address() == "a:1"
    for at in ("a.long.name:12345", "b:2"):
        make_master_address(path, at)
        assert address() == str(address) == at
    change_master_address(path, "")
    assert address() == "b:2"
    change_master_address(missing, "c:3")
    assert not missing.exists()
    assert MasterAddress("a:1", str(missing))() == MasterAddress("a:1")() == "a:1"
    environment = {"KARVAN_REGISTRY": "a:1", "KARVAN_MASTER_ADDRESS_FILE": str(path)}
    assert JobEnvironment.read(environment).master == address
