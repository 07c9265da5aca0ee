"""Kafka, against the cluster that librdkafka keeps inside of its own process for tests."""

import json
import signal
import sys
import threading
from subprocess import PIPE

import pyarrow as pa
import pytest
import torch
from forked_programs import ForkedProgram
from support_paths import support_path

from karvan.data.errors import DataError
from karvan.data.in_memory import json_rows
from karvan.data.kafka import KafkaReader

pytest.importorskip("confluent_kafka")


@pytest.fixture(scope="module")
def cluster():
    from kafka_cluster import Cluster

    return Cluster()


def texts(batches):
    return [x.decode() for batch in batches for x in batch["record"].to_pylist()]


def test_every_message_comes_once_until_the_end_that_was_there(cluster):
    sent = [f"m{i}".encode() for i in range(500)]
    cluster.send("once", sent)
    batches = list(KafkaReader("once", cluster.config, size=64, until_end=True))
    assert max(batch.num_rows for batch in batches) == 64
    assert sorted(texts(batches)) == sorted(x.decode() for x in sent)


def test_a_reader_resumes_where_another_stopped(cluster):
    sent = [f"m{i}" for i in range(200)]
    cluster.send("resume", [x.encode() for x in sent])
    first = KafkaReader("resume", cluster.config, size=30, until_end=True)
    batches = iter(first)
    seen = texts([next(batches), next(batches)])
    state = json.loads(json.dumps(first.state_dict()))
    batches.close()
    second = KafkaReader("resume", cluster.config, size=77, until_end=True)
    second.load_state_dict(state)
    assert sorted(seen + texts(second)) == sorted(sent)
    assert sum(second.state_dict()["offsets"].values()) == 200


def test_ranks_share_the_partitions(cluster):
    sent = [f"m{i}" for i in range(100)]
    cluster.send("ranks", [x.encode() for x in sent])
    shares = [
        texts(KafkaReader("ranks", cluster.config, until_end=True, rank=rank, world_size=3))
        for rank in range(3)
    ]
    assert sorted(x for share in shares for x in share) == sorted(sent)


def test_json_messages_become_columns(cluster):
    schema = pa.schema([("user", pa.int64()), ("tags", pa.list_(pa.string()))])
    rows = [{"user": i, "tags": ["a\nb"] * (i % 3)} for i in range(20)]
    cluster.send("json", [json.dumps(row, indent=1).encode() for row in rows], partitions=1)
    (batch,) = KafkaReader("json", cluster.config, json_rows(schema), until_end=True)
    assert batch.to_pylist() == rows
    for bad in (b"{", b"[]", b'{"other": 1}', b'{"user": 1}{"user": 2}', b'{"user": "x"}', b""):
        with pytest.raises(DataError, match="Expected"):
            json_rows(schema)([bad])


def test_an_endless_reader_waits_for_messages_and_ends_when_closed(cluster):
    cluster.send("endless", [b"one"])
    reader = KafkaReader("endless", cluster.config, size=2, wait=0.05)
    batches = iter(reader)
    assert texts([next(batches)]) == ["one"]
    cluster.send("endless", [b"two"])
    assert texts([next(batches)]) == ["two"]
    reader.close()
    assert list(batches) == []


def test_messages_without_a_value_are_passed_over_but_counted(cluster):
    cluster.send("deletions", [None, b"x", None], partitions=1)
    reader = KafkaReader("deletions", cluster.config, until_end=True)
    assert texts(reader) == ["x"]
    assert reader.state_dict()["offsets"]["deletions/0"] == 3


def test_a_position_that_kafka_does_not_have_is_an_error(cluster):
    cluster.send("beyond", [b"x"], partitions=1)
    reader = KafkaReader("beyond", cluster.config, until_end=True)
    reader.load_state_dict({"offsets": {"beyond/0": 50}})
    with pytest.raises(DataError, match="beyond/0: The position is 50, but Kafka only has offsets 0 to 1"):
        list(reader)


def test_options_and_brokers_are_checked(cluster):
    with pytest.raises(ValueError, match="earliest"):
        KafkaReader("x", cluster.config, start="middle")
    with pytest.raises(ValueError, match="rank < world"):
        KafkaReader("x", cluster.config, rank=1)
    with pytest.raises(DataError, match="x: The topics cannot be listed"):
        list(
            KafkaReader(
                "x", {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, timeout=0.2, retry_seconds=0
            )
        )


@pytest.fixture
def broker():
    """A broker in another process, and what is needed to reach it."""
    command = [sys.executable, support_path("data/kafka_cluster.py")]
    process = ForkedProgram(command, stdin=PIPE, stdout=PIPE)
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.wait()


def test_a_broker_that_is_away_is_an_error_that_says_temporary(broker, caplog):
    process, config = broker
    reader = KafkaReader("away", config, size=10, retry_seconds=1)
    batches = iter(reader)
    seen = texts([next(batches)])
    process.kill()
    with pytest.raises(DataError, match="Kafka was unreachable for 1 seconds") as caught:
        seen.extend(text for batch in batches for text in texts([batch]))
    assert caught.value.temporary
    assert len(seen) == len(set(seen)) == sum(reader.state_dict()["offsets"].values())
    assert "Retrying for up to 1 seconds." in caplog.text


def test_a_broker_that_is_away_when_reading_begins_is_asked_again(broker):
    process, config = broker
    process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, process.send_signal, [signal.SIGCONT]).start()
    reader = KafkaReader("away", config, size=64, until_end=True, timeout=0.3)
    assert sorted(texts(reader)) == sorted(f"m{i}" for i in range(200))


def test_a_reader_of_batches_trains_and_its_position_is_in_the_checkpoint(cluster, tmp_path, caplog):
    import karvan as kv

    rows = json_rows(pa.schema([("id", pa.int64()), ("label", pa.float32())]))
    decoder = kv.data.Decoder(kv.data.infer(rows([]).schema))

    def fit(count):
        cluster.send("trained", [b'{"id": %d, "label": %d}' % (i, i % 2) for i in range(count)], partitions=1)
        reader = KafkaReader("trained", cluster.config, lambda x: decoder(rows(x)), size=50, until_end=True)
        trainer = kv.Trainer(
            kv.models.DCN([], ["id"], 4, hidden=(4,)),
            kv.losses.BinaryCrossEntropy(),
            dense_optimizer=torch.optim.Adam,
            sparse_optimizer=kv.optim.Adagrad(lr=0.1),
            checkpoints=tmp_path / "run",
            progress="none",
        )
        return trainer.fit(kv.data.Stream(reader)).trained

    assert [fit(100), fit(150), fit(50)] == [2, 3, 1]
    assert (fit(0), fit(50)) == (0, 1)
    assert "Kafka topics trained: no new messages" in caplog.text
