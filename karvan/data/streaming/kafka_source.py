"""`KafkaSource`: ranges of offsets of Kafka topics, as finite data (needs the extra `kafka`).

    source = KafkaSource("clicks", {"bootstrap.servers": "…"}, json_rows(schema), since=…, until=…)
    trainer.fit(kv.data.read(source, batch_size=4096))

Each partition is a part, whose records are the messages from one offset to another. So they can be read from
anywhere, again, shuffled, and divided over ranks. Trainers of a job with `sharding: dynamic` lease them: a
task is a range of offsets. For that, every process must mean the same messages, whenever it opens the source,
so both ends have to be given there (`require_fixed`).

A record needs a message at its offset. Compacted topics, and those written in transactions, have gaps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from karvan.activity import activity
from karvan.data.errors import DataError
from karvan.data.retry.broker import BrokerOutage
from karvan.data.source import Part, Split
from karvan.data.streaming.record_batches import DecodeBytes, bytes_rows

_ASK_SECONDS = 5.0  # for an answer of brokers that may be unreachable
_POLL_SECONDS = 0.1
_OUTAGE_SECONDS = 5.0  # until an outage is reported; whoever reads the source tries again
_MESSAGES = 4096  # at a time


class KafkaSource:
    """Open the messages of Kafka topics between two offsets as a source.

    Args:
        topics: The topics.
        config: The configuration of librdkafka.
        decode: A function that makes a record batch of a list of messages, as of `KafkaReader`.
        since: The first offset by "topic/partition"; by default the first message.
        until: The offset after the last by "topic/partition"; by default the end when the source is opened.
            Partitions that it does not name are skipped.
        timeout: How many seconds a broker has for an answer.

    Raises:
        ImportError: confluent-kafka is not installed: `pip install 'karvan[kafka]'`.

    Example:
        >>> source = kv.data.KafkaSource(
        ...     "clicks", {"bootstrap.servers": "broker:9092"}, until={"clicks/0": 5000}
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        topics: str | Sequence[str],
        config: Mapping[str, Any],
        decode: DecodeBytes = bytes_rows,
        *,
        since: Mapping[str, int] | None = None,
        until: Mapping[str, int] | None = None,
        timeout: float = 30.0,
    ) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise ImportError("Reading Kafka needs confluent-kafka: pip install karvan[kafka]") from error
        self._kafka = confluent_kafka
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        self._config = dict(config)
        self._decode = decode
        self._since = None if since is None else dict(since)
        self._until = None if until is None else dict(until)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[_Consumer] = []  # each is used by one thread at a time
        self._ranges: dict[str, tuple[int, int]] | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows."""
        return self._decode([]).schema

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Return the first offset of each partition, and the one after its last.

        Returns:
            Pairs by "topic/partition".

        Raises:
            DataError: `since` or `until` names a partition that does not exist.
        """
        if self._ranges is None:
            consumer = self._take()
            try:
                self._ranges = {
                    name: self._range(name, *watermarks)
                    for topic in self._topics
                    for name, watermarks in consumer.watermarks(topic, self._timeout).items()
                    if self._until is None or name in self._until
                }
            finally:
                self._give(consumer)
            for name in {**(self._since or {}), **(self._until or {})}:
                if name not in self._ranges:
                    found = ", ".join(self._ranges) or "none"
                    raise DataError(
                        f"Expected a partition in since and until; there are: {found}.", path=name
                    )
        return self._ranges

    def parts(self) -> list[Part]:
        """List the partitions, each named with its first offset.

        Returns:
            The parts.
        """
        return [Part(f"{name}@{first}", end - first) for name, (first, end) in self.ranges().items()]

    def require_fixed(self) -> None:
        """Check that every process that opens the source gets the same messages.

        Raises:
            ValueError: `until` is missing, or does not name all partitions.
        """
        if self._since is None or self._until is None:
            ranges = self.ranges()
            given = [{name: each[end] for name, each in ranges.items()} for end in range(2)]
            raise ValueError(
                "A job with sharding: dynamic leases ranges of offsets, which must be the same for every "
                "process, whenever it starts: expected since= and until= of KafkaSource. Those of now are "
                f"since={given[0]}, until={given[1]}."
            )

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """Read the messages of a split.

        Args:
            split: The split.

        Returns:
            An iterator of record batches.

        Raises:
            DataError: `decode` gives another number of rows, or a broker cannot be reached.
        """
        name, _, first = split.path.rpartition("@")
        at = int(first) + split.first
        consumer = self._take()
        try:
            for values in consumer.messages(name, at, at + split.count):
                batch = self._decode(values)
                if batch.num_rows != len(values):
                    raise DataError(f"decode returned {batch.num_rows} rows for {len(values)} messages.")
                yield batch
        finally:
            self._give(consumer)

    def close(self) -> None:
        """Disconnect; reading connects again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for consumer in idle:
            consumer.close()

    def _range(self, name: str, low: int, high: int) -> tuple[int, int]:
        first = (self._since or {}).get(name, low)
        end = high if self._until is None else self._until[name]
        if not low <= first <= end <= high:
            raise DataError(
                f"Expected offsets {first} to {end}, but Kafka only has {low} to {high}.", path=name
            )
        return first, end

    def _take(self) -> _Consumer:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Consumer(self._kafka, self._config, ", ".join(self._topics))

    def _give(self, consumer: _Consumer) -> None:
        with self._lock:
            self._idle.append(consumer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": [], "_lock": None, "_kafka": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import confluent_kafka

        self.__dict__.update(state, _lock=threading.Lock(), _kafka=confluent_kafka)


class _Consumer:
    """A connection to the brokers, for one range after the other."""

    def __init__(self, kafka: Any, config: Mapping[str, Any], topics: str) -> None:
        self._kafka = kafka
        self._outage = BrokerOutage(kafka, topics, _OUTAGE_SECONDS)
        user_callback = config.get("error_cb")

        def note(error: Any) -> None:
            self._outage.note(error)
            if user_callback is not None:
                user_callback(error)

        # The library requires a group id, which is never used: partitions are assigned, nothing is committed.
        self._consumer = kafka.Consumer(
            {
                "group.id": "karvan",
                **config,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "error_cb": note,
            }
        )

    def watermarks(self, topic: str, timeout: float) -> dict[str, tuple[int, int]]:
        """The first offset of each partition of a topic, and the one after its last."""
        found = self._outage.ask(
            lambda: self._consumer.list_topics(topic, timeout=timeout).topics[topic],
            topic,
            "The topics cannot be listed",
        )
        if found.error is not None or not found.partitions:
            raise DataError(f"There is no such topic: {found.error}.", path=topic)
        made = {}
        for number in sorted(found.partitions):
            name, partition = f"{topic}/{number}", self._kafka.TopicPartition(topic, number)
            made[name] = self._outage.ask(
                partial(self._consumer.get_watermark_offsets, partition, timeout=timeout),
                name,
                "The offsets cannot be read",
            )
        return made

    def messages(self, name: str, at: int, end: int) -> Iterator[list[bytes]]:
        """The values of the messages from offset `at` to `end`."""
        topic, _, number = name.rpartition("/")
        self._consumer.assign([self._kafka.TopicPartition(topic, int(number), at)])
        try:
            while at < end:
                activity.advance()
                self._outage.check(lambda: self._consumer.list_topics(topic, timeout=_ASK_SECONDS))
                values = []
                for message in self._consumer.consume(min(_MESSAGES, end - at), timeout=_POLL_SECONDS):
                    value = self._value(message, name, at)
                    if value is not None:
                        values.append(value)
                        at += 1
                if values:
                    self._outage.clear()
                    yield values
        finally:
            self._consumer.unassign()

    def _value(self, message: Any, name: str, expected: int) -> bytes | None:
        """The message's value; None for a message that only says that brokers cannot be reached."""
        error = message.error()
        if error is not None:
            if self._outage.is_outage(error):
                self._outage.note(error)
                return None
            raise DataError(str(error.str()), path=name, place=f"offset {expected}")
        value: bytes | None = message.value()
        if message.offset() != expected or value is None:
            what = "The message has no value" if message.offset() == expected else "There is no message"
            raise DataError(
                f"{what}. A range of offsets must have a message with a value at each of them, which topics "
                "that are compacted, or written in transactions, do not have: read them with KafkaReader, in "
                "a job with sharding: static.",
                path=name,
                place=f"offset {expected}",
            )
        return value

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()
