"""Trainers that come and go: real processes, a real master, real kills."""

import json
import signal
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import torch
from forked_programs import ForkedProgram
from free_ports import free_port
from hypothesis import given
from hypothesis import strategies as st
from ranks_helpers import run
from role_loaders import in_threads
from small_disk import small_disk
from support_paths import support_path
from wire_helpers import wait_for

from karvan import errors
from karvan.discovery.registry import Registry
from karvan.distributed.collectives import CollectiveChannel, RankError
from karvan.distributed.elastic import ElasticGroup, GroupClient, ordered_sum
from karvan.distributed.wire_store import WireStore
from karvan.wire import RefusedError
from karvan.work.trainer_group import TrainerGroup

PROGRAM = support_path("distributed/group_program.py")


class Member:
    """A process of `group_program.py`, and the lines that it has printed."""

    def __init__(self, address, name, transport="auto", pause=0.01):
        command = [sys.executable, str(PROGRAM), address, name, transport, str(pause)]
        self.process = ForkedProgram(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.lines = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    @property
    def world(self):
        return next((each["world"] for each in reversed(self.lines) if "step" in each), 0)

    @property
    def step(self):
        return next((each["step"] for each in reversed(self.lines) if "step" in each), 0)

    def end(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.wait(60)


@pytest.fixture
def group(tmp_path):
    """start(name) starts a member of a job whose group begins with two."""
    service = TrainerGroup(tmp_path / "group.json", least=2, lost_after=5.0)
    registry = Registry(beside=[service])
    members = {}

    def start(name, transport="auto"):
        members[name] = Member(registry.address, name, transport)
        return members[name]

    start.service = service
    yield start
    for member in members.values():
        member.process.kill()
        member.process.wait()
    registry.close()


def trains(*members):
    """Wait until all of them have made three more steps together."""
    target = max(member.step for member in members) + 3
    wait_for(lambda: all(m.world == len(members) and m.step >= target for m in members))


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_survivors_continue_in_their_processes_and_joiners_come_in_at_the_current_step(group, transport):
    one, two = group("one", transport), group("two", transport)
    trains(one, two)
    three = group("three", transport)
    trains(one, two, three)
    assert [each["rank"] for each in three.lines if "round" in each] == [2]
    assert next(each["step"] for each in three.lines if "step" in each) > 3
    rank = [each["rank"] for each in one.lines if "round" in each][-1]  # 0, or 1 if the other one came first
    one.process.send_signal(signal.SIGKILL)
    trains(two, three)
    assert [each["rank"] for each in two.lines if "round" in each][-1] == 0
    lost = [each["lost"] for each in two.lines if "lost" in each]
    if transport == "auto":  # the memory that they share knows whose process has ended
        assert lost == [f"Lost rank {rank} of 3 trainers; the others continue."]
    assert not any("channel" in line for line in lost)  # that is nobody's but ours
    two.process.send_signal(signal.SIGKILL)
    trains(three)
    four = group("four", transport)
    trains(three, four)
    steps = [each["step"] for each in three.lines if "step" in each]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert (four.end(), three.process.poll()) == (0, None)
    trains(three)
    assert three.end() == 0


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_who_leaves_for_the_failure_of_another_says_so(tmp_path, transport):
    """The master knows that the round is broken, and not yet who is gone."""
    service = TrainerGroup(tmp_path / "group.json", least=2, lost_after=60.0)
    with closing(Registry(beside=[service])) as registry:
        groups = [
            ElasticGroup(
                GroupClient(registry.address, name), WireStore(registry.address, 0), transport=transport
            )
            for name in ("one", "two")
        ]
        in_threads([group.regroup for group in groups])
        one, two = groups
        again = threading.Thread(target=one.regroup, daemon=True)  # as after an error that two does not get
        again.start()
        with pytest.raises(RankError) as caught:
            two.channel.gather_json(0)
        assert two.describe_loss(caught.value) == (
            "Another trainer could not complete a collective. The trainers meet again."
        )
        two.regroup()
        again.join(60)
        assert in_threads([lambda each=each: each.channel.gather_json(each.rank) for each in groups])
        for group in groups:
            group.close()


def test_a_member_that_is_stopped_is_left_behind_and_refused_when_it_continues(group):
    one, two = group("one"), group("two")
    trains(one, two)
    one.process.send_signal(signal.SIGSTOP)
    trains(two)
    one.process.send_signal(signal.SIGCONT)
    assert one.process.wait(60) != 0
    trains(two)


def test_the_engine_says_which_process_has_ended(group):
    one, two = group("one"), group("two")
    trains(one, two)
    one.process.send_signal(signal.SIGSTOP)
    assert group.service.remove("one")
    trains(two)
    assert group.service.members == ["two"]
    assert not group.service.remove("two")


def test_a_group_outlives_its_master(tmp_path):
    path = tmp_path / "group.json"
    service = TrainerGroup(path, least=1)
    port = free_port()
    registry = Registry(port=port, beside=[service])
    one = Member(registry.address, "one")
    try:
        trains(one)
        registry.close()
        registry = Registry(port=port, beside=[TrainerGroup(path, least=1)])
        two = Member(registry.address, "two")
        trains(one, two)
        assert [each["members"] for each in two.lines if "round" in each] == [[0, 1]]
        assert [one.end(), two.end()] == [0, 0]
    finally:
        one.process.kill()
        registry.close()


def test_a_full_disk_of_the_master_ends_no_trainer(tmp_path, caplog):
    with small_disk(tmp_path / "disk") as disk:
        path = disk.folder / "group.json"
        service = TrainerGroup(path, least=1)
        with closing(Registry(beside=[service])) as registry:
            one, two = (GroupClient(registry.address, name) for name in ("one", "two"))
            with closing(one), closing(two):
                assert one.join(0).members == (0,)
                disk.fill()
                assert two.join(0) is None
                assert one.join(1).members == (0, 1)
                assert service.remove("two")
                assert one.watch(2).gone == [1]
                disk.empty()
                one.watch(2)
        assert TrainerGroup(path).gone == ["two"]
    [said] = caplog.records
    assert "group.json could not be written" in said.getMessage()


class Silences:
    """Members of a group whose time the test sets, by the calls that they make."""

    def __init__(self):
        self.seconds = 0.0
        self.service = TrainerGroup(least=2, lost_after=60.0, now=lambda: self.seconds)
        self.registry = Registry(beside=[self.service])
        self.clients = [GroupClient(self.registry.address, name) for name in ("one", "two")]

    def close(self):
        for client in self.clients:
            client.close()
        self.registry.close()

    def wait(self, seconds, watching=(), joining=()):
        """Let time pass, while some watch their round, and some wait for the next one."""
        for _ in range(seconds):
            self.seconds += 1.0
            for client in watching:
                client.watch(self.service.round)
            for client in joining:
                client.join(self.service.round)


@pytest.fixture
def silences():
    made = Silences()
    one, two = made.clients
    assert one.join(0) is None
    assert two.join(0).members == one.join(0).members == (0, 1)
    yield made
    made.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_member_that_falls_silent_is_gone_also_while_it_waits_for_the_next_round(silences, waits):
    one, two = silences.clients
    two.watch(1)
    if waits:
        assert two.join(1) is None
    silences.wait(59, watching=[one])
    assert not one.watch(1).gone
    silences.wait(2, joining=[one])
    assert one.join(1).members == (0,)
    with pytest.raises(RefusedError, match="continued without two") as refused:
        two.watch(1)
    assert errors.code_of(refused.value) == errors.TEMPORARY


def test_a_master_that_nobody_reached_blames_none_of_them(silences):
    one, two = silences.clients
    silences.wait(5, watching=[one, two])
    silences.seconds += 1000.0
    assert not one.watch(1).broken
    assert not two.watch(1).broken
    silences.seconds += 1000.0
    silences.wait(59, watching=[one])
    assert not one.watch(1).gone
    silences.wait(3, watching=[one])
    assert one.watch(1).gone == [1]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(0, 12),
    st.integers(0, 2**31),
)
def test_a_sum_of_one_rank_is_in_the_order_of_the_parts(ranks, size, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator) for _ in ranks]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(ordered_sum(CollectiveChannel("main"), parts, [0] * len(ranks)), total)


@pytest.mark.parametrize("transport", ["memory", "network"])
def test_a_sum_has_the_same_bits_whoever_has_which_parts(transport):
    results = run(3, "collective_programs:add_in_order", transport=transport)
    for result in results:
        for total, expected in result:
            assert torch.equal(total, expected)
