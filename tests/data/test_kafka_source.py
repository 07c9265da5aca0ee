"""Ranges of offsets of Kafka topics as finite data, whose records can be leased."""

import itertools
import json
import pickle
import sys
import threading
from subprocess import PIPE

import pyarrow as pa
import pytest
from forked_programs import ForkedProgram
from support_paths import support_path

from karvan.data import KafkaReader, KafkaSource, Split, Stream, json_rows, read
from karvan.data.errors import DataError
from karvan.data.task_records import records_done
from karvan.data.work_client import WorkClient
from karvan.train.choice import require_leased
from karvan.wire import Server
from karvan.work.service import WorkService

pytest.importorskip("confluent_kafka")

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture(scope="module")
def cluster():
    from kafka_cluster import Cluster

    made = Cluster()
    made.config["log_level"] = 0  # consumers may outlive the brokers, and write about it into other tests
    return made


def send(cluster, topic, numbers, partitions=3):
    cluster.send(topic, [b'{"id": %d}' % number for number in numbers], partitions)


def ids(batches):
    return [number for batch in batches for number in batch["id"].to_pylist()]


def fixed(cluster, topic):
    """A source of what a topic has now."""
    ranges = KafkaSource(topic, cluster.config).ranges()
    since, until = ({name: each[end] for name, each in ranges.items()} for end in range(2))
    return KafkaSource(topic, cluster.config, json_rows(SCHEMA), since=since, until=until)


def test_every_range_of_offsets_is_read_again_the_same(cluster):
    send(cluster, "ranges", range(200))
    source = KafkaSource("ranges", cluster.config, json_rows(SCHEMA))
    parts = [part for part in source.parts() if part.records]
    whole = {part.path: ids(source.read(Split(part.path, 0, part.records))) for part in parts}
    assert sorted(itertools.chain(*whole.values())) == list(range(200))
    for part in parts:
        for first, end in itertools.combinations(range(0, part.records, 25), 2):
            split = Split(part.path, first, end - first)
            assert ids(source.read(split)) == whole[part.path][first:end]
    source.close()
    copy = pickle.loads(pickle.dumps(source))  # for the workers of a DataLoader
    assert copy.ranges() == source.ranges()
    assert [ids(copy.read(Split(part.path, 0, part.records))) for part in parts] == [*whole.values()]


def test_since_and_until_bound_the_messages_and_others_do_not_count(cluster):
    send(cluster, "bounds", range(50), partitions=1)
    source = KafkaSource(
        "bounds", cluster.config, json_rows(SCHEMA), since={"bounds/0": 10}, until={"bounds/0": 30}
    )
    send(cluster, "bounds", range(50, 60), partitions=1)
    (part,) = source.parts()
    assert (part.path, part.records) == ("bounds/0@10", 20)
    assert sorted(batch_ids(read(source, 8, rank=0, world_size=1))) == list(range(10, 30))
    for wrong in ({"bounds/0": 61}, {"bounds/9": 1}, {"other/0": 1}):
        with pytest.raises(DataError, match=r"but Kafka only has 0 to 60|Expected a partition"):
            KafkaSource("bounds", cluster.config, until=wrong).parts()


def batch_ids(batches):
    return [number for batch in batches for number in batch["id"].tolist()]


@pytest.fixture
def dynamic(monkeypatch):
    """This process is one of a job with sharding: dynamic."""
    monkeypatch.setenv("KARVAN_ROLE", "loader")
    monkeypatch.setenv("KARVAN_SHARDING", "dynamic")


def test_messages_are_leased_and_each_is_trained_once(cluster, dynamic, tmp_path):
    send(cluster, "leased", range(300))
    data = read(fixed(cluster, "leased"), 8, shuffle=1, split_records=20)
    work, seen = WorkService(tmp_path / "ledger.db"), [[], []]
    with Server(work) as server:

        def train(number):
            client = WorkClient(server.address, f"holder {number}")
            client.open(data.spec())
            loader = data.lease(client, 0)
            for batch in loader:
                seen[number] += batch["id"].tolist()
                assert client.acknowledge(records_done(loader.hand_over())) == []
            loader.stop()
            client.close()

        threads = [threading.Thread(target=train, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    work.close()
    assert sorted(seen[0] + seen[1]) == list(range(300))
    assert data.identity() == read(fixed(cluster, "leased"), 8).identity()
    send(cluster, "leased", [300])
    assert data.identity() != read(fixed(cluster, "leased"), 8).identity()


def test_a_range_that_grows_is_not_leased_and_the_error_says_what_to_give(cluster, dynamic):
    send(cluster, "grows", range(5), partitions=1)
    with pytest.raises(ValueError, match="expected since= and until= of KafkaSource") as caught:
        read(KafkaSource("grows", cluster.config, json_rows(SCHEMA)), 4)
    assert "since={'grows/0': 0" in str(caught.value)
    assert "until={'grows/0': 5" in str(caught.value)


def test_a_stream_without_end_is_not_leased(cluster):
    for endless in (KafkaReader("x", cluster.config), Stream(iter([]))):
        with pytest.raises(TypeError, match=r"A stream has no end.* Lease ranges of offsets"):
            require_leased(endless)
    with pytest.raises(
        TypeError,
        match=r"lease their data: expected kv.data.read\(…\) or kv.data.from_loaders\(\).*, got list\.$",
    ):
        require_leased([])


def test_an_offset_without_a_value_is_an_error_that_names_it(cluster):
    cluster.send("deleted", [b"x", None, b"y"], partitions=1)
    source = KafkaSource("deleted", cluster.config)
    (part,) = (part for part in source.parts() if part.records)
    with pytest.raises(DataError, match="deleted/0, offset 1: The message has no value"):
        list(source.read(Split(part.path, 0, 3)))
    assert [len(batch) for batch in source.read(Split(part.path, 2, 1))] == [1]


def test_brokers_that_are_away_are_a_temporary_error(monkeypatch):
    monkeypatch.setattr("karvan.data.kafka._OUTAGE_SECONDS", 0.5)
    command = [sys.executable, support_path("data/kafka_cluster.py")]
    with ForkedProgram(command, stdin=PIPE, stdout=PIPE) as process:
        source = KafkaSource("away", {**json.loads(process.stdout.readline()), "log_level": 0})
        part = source.parts()[0]
        process.kill()
        with pytest.raises(DataError, match="Kafka was unreachable") as caught:
            list(source.read(Split(part.path, 0, part.records)))
        assert caught.value.temporary
        source.close()  # otherwise it goes on looking for brokers
