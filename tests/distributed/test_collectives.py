"""Collectives between real processes, and what the others are told when one is gone."""

import tempfile
from pathlib import Path

import pytest
import torch
from forked_programs import ForkedProgram
from ranks_helpers import run, start

from karvan import distributed
from karvan.distributed.connection import Connection, ConnectionSettings


@pytest.mark.parametrize("transport", ["memory", "network"])
def test_collectives_bring_everything_to_its_place(transport):
    world = 3
    results = run(world, "collective_programs:talk", transport=transport)
    for rank, result in enumerate(results):
        assert result["sum"].tolist() == [6.0, 30.0]
        assert result["kept"].tolist() == [rank + 1.0, 10.0]
        assert result["gather"] == [b"\x00", b"x\x01", b"xx\x02"]
        assert result["nothing"] == [b"", b"", b""]
        assert result["json"] == [{"rank": r} for r in range(world)]
        assert result["swap"].tolist() == [[100 * r + 2 * rank, 100 * r + 2 * rank + 1] for r in range(world)]
        assert result["exchange"].tolist() == [10 * r + rank for r in range(world) for _ in range(rank)]
        assert result["operations"] == results[0]["operations"]
    assert len(results[0]["left"]) == 2
    assert all("left channel 'evaluate'" in message for message in results[0]["left"])


def test_one_who_is_alone_hears_herself():
    channel = distributed.Connection().main
    assert (channel.rank, channel.world_size) == (0, 1)
    numbers = torch.tensor([[1, 2]])
    assert channel.gather_json([1, "a"]) == [[1, "a"]]
    assert torch.equal(channel.swap(numbers), numbers)
    assert torch.equal(channel.sum(numbers), numbers)
    assert torch.equal(channel.exchange(numbers[0], [2], [2]), numbers[0])
    channel.barrier()


@pytest.mark.parametrize(
    ("how", "transport", "victim"),
    [
        pytest.param("killed", "memory", 1, marks=pytest.mark.slow),
        ("killed", "memory", 0),
        pytest.param("stopped", "memory", 1, marks=pytest.mark.slow),
        pytest.param("busy elsewhere", "network", 1, marks=pytest.mark.slow),
        pytest.param("killed", "network", 1, marks=pytest.mark.slow),
        pytest.param("stopped", "network", 1, marks=pytest.mark.slow),
        pytest.param("busy elsewhere", "memory", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_is_named_to_all_others_in_time(how, transport, victim):
    timeout = 2.0
    with tempfile.TemporaryDirectory() as folder:
        processes = start(
            3,
            "collective_programs:lose",
            folder,
            ForkedProgram,
            how=how,
            timeout=timeout,
            transport=transport,
            victim=victim,
        )
        try:
            for rank in {0, 1, 2} - {victim}:
                log = Path(folder) / f"{rank}.log"
                assert processes[rank].wait(60) == 0, log.read_text()
                message, seconds = torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
                # With rank 0 goes the store, in which the processes stand.
                who = f"Rank {victim} (process {processes[victim].pid}" if victim else "Rank 0 has died"
                assert message.startswith(who), message
                assert seconds < 3 * timeout + 5
        finally:
            for process in processes:
                process.kill()
                process.wait()


def test_wrong_settings_are_told():
    with pytest.raises(ValueError, match="one of memory, cuda, sharded, remote, got 'shared'"):
        distributed.connect("shared")
    with pytest.raises(ValueError, match="wire must be one of"):
        distributed.connect("sharded", wire="int8")
    with pytest.raises(ValueError, match="grad_reduce must be one of"):
        distributed.connect("sharded", grad_reduce="max")
    with pytest.raises(ValueError, match="transport must be one of"):
        distributed.connect("sharded", transport="pigeons")
    with pytest.raises(ValueError, match=r'are for connect\("sharded"\), got "memory"'):
        distributed.connect("memory", wire="bfloat16")
    with pytest.raises(ValueError, match="timeout must be above 0"):
        distributed.connect("sharded", timeout=0)


def test_sharded_needs_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node"):
        distributed.connect("sharded")
    assert distributed.current().world_size == 1


def test_a_thread_talks_on_the_lane_it_was_put_on():
    connection = distributed.Connection()
    assert connection.here is connection.channels["main"]
    with connection.on("fit") as channel:
        assert connection.here is channel is connection.channels["fit"]
        with connection.on("evaluate"):
            assert connection.here.name == "evaluate"
    assert connection.here is connection.main


@pytest.mark.parametrize(
    ("grad_reduce", "elastic", "divisor"),
    [("mean", False, 3), ("key", False, 1), ("sum", False, 1), ("mean", True, 1), ("sum", True, 1)],
)
def test_gradients_of_rows_are_divided_by_the_trainers_if_their_mean_is_wanted(grad_reduce, elastic, divisor):
    connection = Connection(ConnectionSettings(grad_reduce=grad_reduce, elastic=elastic))
    connection.world_size = 3
    assert connection.divisor == divisor
