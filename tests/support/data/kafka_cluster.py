"""Kafka brokers inside of a process. As a program: with 200 messages, until its input ends."""

import json
import sys
import zlib

import confluent_kafka


class Cluster:
    """The brokers that librdkafka has for tests, inside of a producer, which sends to them."""

    def __init__(self):
        self.producer = confluent_kafka.Producer({"bootstrap.servers": "x", "test.mock.num.brokers": 1})
        brokers = self.producer.list_topics(timeout=20).brokers.values()
        self.config = {"bootstrap.servers": ",".join(f"{b.host}:{b.port}" for b in brokers)}

    def send(self, topic, values, partitions=4):
        for value in values:
            self.producer.produce(topic, value, partition=zlib.crc32(value or b"") % partitions)
        assert self.producer.flush(20) == 0


if __name__ == "__main__":
    cluster = Cluster()
    cluster.send("away", [f"m{i}".encode() for i in range(200)])
    print(json.dumps(cluster.config), flush=True)
    sys.stdin.read()
