"""Kafka topics as a stream of record batches (needs the extra `kafka`).

Messages become rows by `decode`: by default their bytes, with `json_rows(schema)` the columns of JSON
objects, or by your own function. A stream has no parts, so a reader is not a `Source` but an iterator:

    rows, decoder = json_rows(schema), Decoder(infer(schema))
    trainer.fit(KafkaReader("clicks", {"bootstrap.servers": "…"}, lambda m: decoder(rows(m)), size=4096))

The position of a reader is the next offset of every partition: `state_dict()` counts exactly what has been
handed out, and is saved in the same checkpoint as the model. Nothing is committed to Kafka, since committed
offsets would disagree with the model after a crash. If the messages at the position have been deleted, that
is an error; they are not silently skipped. Partitions are divided among ranks by their index in sorted order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any, TypeVar

import pyarrow as pa

from karvan.activity import activity
from karvan.data.errors import DataError
from karvan.data.identity import Identity
from karvan.data.in_memory import DecodeBytes, bytes_rows
from karvan.data.retry import RETRY_SECONDS, Patience, retrying
from karvan.data.source import Part, Split
from karvan.ragged import Batch

# `KafkaSource`: ranges of offsets of Kafka topics, as finite data (needs the extra `kafka`).
#
#     source = KafkaSource("clicks", {"bootstrap.servers": "…"}, json_rows(schema), since=…, until=…)
#     trainer.fit(kv.data.read(source, batch_size=4096))
#
# Each partition is a part, whose records are the messages from one offset to another. So they can be read
# from anywhere, again, shuffled, and divided over ranks. Trainers of a job with `sharding: dynamic` lease
# them: a task is a range of offsets. For that, every process must mean the same messages, whenever it opens
# the source, so both ends have to be given there (`require_fixed`).
#
# A record needs a message at its offset. Compacted topics, and those written in transactions, have gaps.


_log = logging.getLogger("karvan.data")
T = TypeVar("T")

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
        _library()
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
            with self._connected() as consumer:
                self._ranges = {
                    name: self._range(name, *consumer.range(name, self._timeout))
                    for topic in self._topics
                    for name in consumer.partitions(topic, self._timeout)
                    if self._until is None or name in self._until
                }
            for name in {**(self._since or {}), **(self._until or {})}:
                if name not in self._ranges:
                    names = ", ".join(self._ranges) or "none"
                    raise DataError(
                        f"Expected a partition in since and until; there are: {names}.", path=name
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
            bounds = [{name: range_[end] for name, range_ in ranges.items()} for end in range(2)]
            raise ValueError(
                "With sharding: dynamic, trainers lease ranges of offsets, and every process must see "
                "the same ranges, whenever it starts: expected since= and until= of KafkaSource. The "
                f"present ones are since={bounds[0]}, until={bounds[1]}."
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
        end = at + split.count
        with self._connected() as consumer, consumer.assigned({name: at}):
            while at < end:
                messages = consumer.consume(name.rpartition("/")[0], min(_MESSAGES, end - at))
                if messages:
                    values = [_value(message, name, offset) for offset, message in enumerate(messages, at)]
                    at += len(values)
                    yield _decoded(self._decode, values)

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

    @contextmanager
    def _connected(self) -> Iterator[_Consumer]:
        """A consumer that no other thread uses meanwhile."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        consumer = idle or _Consumer(self._config, self._topics, _OUTAGE_SECONDS)
        try:
            yield consumer
        finally:
            with self._lock:
                self._idle.append(consumer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": [], "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _library() -> Any:
    try:
        import confluent_kafka
    except ImportError as error:
        raise ImportError("Reading Kafka needs confluent-kafka: pip install karvan[kafka]") from error
    return confluent_kafka


def _decoded(decode: Callable[[list[bytes]], Any], messages: list[bytes]) -> Any:
    batch = decode(messages)
    rows = batch.samples if isinstance(batch, Batch) else batch.num_rows
    if rows != len(messages):
        raise DataError(f"decode returned {rows} rows for {len(messages)} messages.")
    return batch


def _value(message: Any, name: str, expected: int) -> bytes:
    """The value of the message that is expected at an offset."""
    if (error := message.error()) is not None:
        raise DataError(str(error.str()), path=name, place=f"offset {expected}")
    value: bytes | None = message.value()
    if message.offset() == expected and value is not None:
        return value
    what = "The message has no value" if message.offset() == expected else "There is no message"
    raise DataError(
        f"{what}. Each offset of a range must have a message with a value. Compacted topics and "
        "topics written in transactions have gaps: read them with KafkaReader, in a job with "
        "sharding: static.",
        path=name,
        place=f"offset {expected}",
    )


_CODES = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_MSG_TIMED_OUT", "_NODE_UPDATE")


class _Consumer:
    """A connection to the brokers of some topics, which knows their outages.

    librdkafka reports a lost broker to a callback and then retries forever without logging. This warns at the
    first report, and stops waiting after some seconds, unless a message has arrived or the brokers answer a
    request. Positions are those of messages that were handed out, so no message is lost or delivered twice.
    """

    def __init__(self, config: Mapping[str, Any], topics: Sequence[str], seconds: float) -> None:
        self.kafka = _library()
        self._topics = ", ".join(topics)
        self._patience = Patience(seconds)
        self._codes = {
            getattr(self.kafka.KafkaError, name) for name in _CODES if hasattr(self.kafka.KafkaError, name)
        }
        self._since: float | None = None  # when the outage began, if there is one
        self._error = ""
        user_callback = config.get("error_cb")

        def note(error: Any) -> None:
            self._note(error)
            if user_callback is not None:
                user_callback(error)

        # The library requires a group id, which is never used: partitions are assigned, nothing is committed.
        self._consumer = self.kafka.Consumer(
            {
                "group.id": "karvan",
                **config,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "error_cb": note,
            }
        )

    def partitions(self, topic: str, timeout: float) -> list[str]:
        """The partitions of a topic as "topic/number", in the order of their numbers."""
        answer = self._ask(
            lambda: self._consumer.list_topics(topic, timeout=timeout).topics[topic],
            topic,
            "The topics cannot be listed",
        )
        if answer.error is not None or not answer.partitions:
            raise DataError(f"There is no such topic: {answer.error}.", path=topic)
        return [f"{topic}/{number}" for number in sorted(answer.partitions)]

    def range(self, name: str, timeout: float) -> tuple[int, int]:
        """The first offset of the partition "topic/number", and the one after its last."""
        ask = partial(self._consumer.get_watermark_offsets, self._partition(name), timeout=timeout)
        low, high = self._ask(ask, name, "The offsets cannot be read")
        return low, high

    @contextmanager
    def assigned(self, offsets: Mapping[str, int]) -> Iterator[None]:
        """Within it, the messages of partitions are received from these offsets on."""
        self._consumer.assign([self._partition(name, offset) for name, offset in offsets.items()])
        try:
            yield
        finally:
            self._consumer.unassign()

    def consume(self, topic: str, most: int) -> list[Any]:
        """The messages that have come; an error if the brokers have not answered for too long."""
        activity.advance()  # waiting for messages is not a stall
        if self._since is not None and time.monotonic() >= self._since + self._patience.seconds:
            self._require_answer(topic)
        messages = []
        for message in self._consumer.consume(most, timeout=_POLL_SECONDS):
            error = message.error()
            if error is not None and self._is_outage(error):
                self._note(error)
            else:
                self._clear()
                messages.append(message)
        return messages

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def _partition(self, name: str, *offset: int) -> Any:
        topic, _, number = name.rpartition("/")
        return self.kafka.TopicPartition(topic, int(number), *offset)

    def _is_outage(self, error: Any) -> bool:
        """Whether an error means that brokers cannot be reached."""
        return error.code() in self._codes or bool(error.retriable())

    def _note(self, error: Any) -> None:
        """Record that a broker was lost; called by librdkafka, or for an error that arrived as a message."""
        if self._since is None and self._is_outage(error):
            self._error = str(error.str())
            self._since = time.monotonic()
            _log.warning(
                "Kafka topics %s: %s. Retrying for up to %g seconds.",
                self._topics,
                self._error,
                self._patience.seconds,
            )

    def _clear(self) -> None:
        """The brokers answer: the outage, if there was one, is over."""
        since, self._since = self._since, None
        if since is not None:
            _log.warning("Kafka answers again, after %.0f seconds.", time.monotonic() - since)

    def _require_answer(self, topic: str) -> None:
        """Raise, unless the brokers answer a request."""
        try:
            self._consumer.list_topics(topic, timeout=_ASK_SECONDS)
        except self.kafka.KafkaException as error:
            raise DataError(
                f"Kafka was unreachable for {self._patience.seconds:g} seconds: {self._error}",
                path=self._topics,
                temporary=True,
            ) from error
        self._clear()

    def _ask(self, request: Callable[[], T], path: str, failure: str) -> T:
        """The answer to a request, which is repeated during an outage; `failure` begins the error's text."""

        def send() -> T:
            try:
                return request()
            except self.kafka.KafkaException as error:
                temporary = self._is_outage(error.args[0])
                raise DataError(f"{failure}: {error}", path=path, temporary=temporary) from error

        return retrying(send, self._patience)


class KafkaReader:
    """Read the messages of Kafka topics in batches.

    Each iteration step gives a record batch; `kv.data.Stream` and a `Decoder` turn them into batches for
    training. If brokers cannot be reached, it logs a warning and waits. Messages without a value are skipped.

    Args:
        topics: The topics.
        config: The configuration of librdkafka, such as `{"bootstrap.servers": "broker:9092"}`.
        decode: A function that makes a record batch of a list of messages, such as
            `kv.data.json_rows(schema)`, or the `kv.Batch` that a Trainer takes. By default the bytes of
            messages are the column `record`.
        size: How many messages make a batch.
        wait: After how many seconds since its first message a smaller batch is given.
        start: Where reading starts without a position: "earliest" or "latest".
        until_end: Whether it ends with the last message that existed when it started. Otherwise it ends at
            `close()`.
        timeout: How many seconds a broker has for an answer.
        retry_seconds: How long brokers that cannot be reached are tried again before a DataError is raised.
        rank: Which share of the partitions is read.
        world_size: How many shares there are.

    Raises:
        ValueError: An argument is out of range.
        ImportError: confluent-kafka is not installed: `pip install 'karvan[kafka]'`.

    Example:
        >>> import pyarrow as pa
        >>> schema = pa.schema({"user": pa.int64(), "label": pa.float32()})
        >>> reader = kv.data.KafkaReader(
        ...     "clicks",
        ...     {"bootstrap.servers": "broker:9092"},
        ...     kv.data.json_rows(schema),
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        topics: str | Sequence[str],
        config: Mapping[str, Any],
        decode: DecodeBytes | Callable[[list[bytes]], Batch] = bytes_rows,
        *,
        size: int = 1024,
        wait: float = 1.0,
        start: str = "earliest",
        until_end: bool = False,
        timeout: float = 30.0,
        retry_seconds: float = RETRY_SECONDS,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _library()
        if start not in ("earliest", "latest"):
            raise ValueError(f'A start must be "earliest" or "latest", but is {start!r}.')
        if size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"Expected size >= 1 and 0 <= rank < world_size, but have {size}, {rank} and {world_size}."
            )
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        self._decode = decode
        self._size, self._wait, self._start, self._timeout = size, wait, start, timeout
        self._until_end, self._rank, self._world_size = until_end, rank, world_size
        self._offsets: dict[str, int] = {}
        self._closed = Event()
        config = {**config, "enable.partition.eof": True}
        self._consumer = _Consumer(config, self._topics, retry_seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the next offset of every partition that has been read from, by "topic/partition".

        Returns:
            The position.
        """
        return {"offsets": dict(self._offsets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, before iterating.

        Partitions that it does not name start at `start`.

        Args:
            state: The position.
        """
        self._offsets = {str(name): int(offset) for name, offset in state["offsets"].items()}

    def identity(self) -> Identity:
        """Return the identity of the topics: the same data tomorrow, with more messages.

        Returns:
            The identity.
        """
        topics = ", ".join(self._topics)
        return Identity(f"kafka {topics}", f"Kafka topics {topics}", grows=True)

    @staticmethod
    def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the positions of all ranks into one that any number of ranks can start from.

        Args:
            states: The positions.

        Returns:
            The joint position.
        """
        offsets: dict[str, int] = {}
        for state in states:  # for the partitions of others, a rank has the offsets that it started from
            for name, offset in state["offsets"].items():
                offsets[name] = max(offset, offsets.get(name, 0))
        return {"offsets": offsets}

    def close(self) -> None:
        """End the iteration, from any thread.

        The batch being collected is dropped, and not counted as read.
        """
        self._closed.set()

    def __iter__(self) -> Iterator[pa.RecordBatch | Batch]:
        ends = self._ends()
        open_ends = {name for name, end in ends.items() if self._offsets[name] < end}
        reached = dict(self._offsets)
        with self._consumer.assigned({name: self._offsets[name] for name in ends}):
            while not self._closed.is_set() and (open_ends or not self._until_end):
                messages = self._collect(ends, open_ends, reached)
                if self._closed.is_set():
                    return
                if messages:
                    batch = _decoded(self._decode, messages)
                    self._offsets = dict(reached)
                    yield batch
            self._offsets = dict(reached)

    def _ends(self) -> dict[str, int]:
        """The offset after the last message of each of this rank's partitions; their positions are set."""
        topics = sorted(self._topics)
        names = [name for topic in topics for name in self._consumer.partitions(topic, self._timeout)]
        ends = {}
        for name in names[self._rank :: self._world_size]:
            low, high = self._consumer.range(name, self._timeout)
            offset = self._offsets.setdefault(name, low if self._start == "earliest" else high)
            if not low <= offset <= high:
                raise DataError(
                    f"The position is {offset}, but Kafka only has offsets {low} to {high}.", path=name
                )
            ends[name] = high
        return ends

    def _collect(self, ends: dict[str, int], open_ends: set[str], reached: dict[str, int]) -> list[bytes]:
        """Up to `size` messages; fewer when time is up, all ends are reached, or the reader is closed."""
        values: list[bytes] = []
        deadline: float | None = None
        while len(values) < self._size and not self._closed.is_set():
            if (self._until_end and not open_ends) or (deadline is not None and time.monotonic() >= deadline):
                break
            for message in self._consumer.consume(self._topics[0], self._size - len(values)):
                name = f"{message.topic()}/{message.partition()}"
                error, value, offset = message.error(), message.value(), message.offset()
                assert offset is not None
                if error is None:
                    if self._until_end and offset >= ends[name]:
                        open_ends.discard(name)
                        continue
                    reached[name] = offset + 1
                    if value is not None:
                        values.append(value)
                elif error.code() == self._consumer.kafka.KafkaError._PARTITION_EOF:
                    reached[name] = max(reached[name], offset)
                else:
                    raise DataError(str(error.str()), path=name, place=f"offset {offset}")
                if reached[name] >= ends[name]:
                    open_ends.discard(name)
            if values and deadline is None:
                deadline = time.monotonic() + self._wait
        return values
