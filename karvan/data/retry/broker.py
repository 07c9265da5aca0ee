"""Outages of Kafka brokers, as librdkafka reports them, which reconnects by itself.

librdkafka reports a lost broker to a callback and then retries forever without logging. `BrokerOutage` warns
at the first report, and stops waiting after `retry_seconds`, unless a message has arrived or the brokers
answer a request. Positions are those of messages that were handed out, so no message is lost or delivered
twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from karvan.data.errors import DataError
from karvan.data.retry.patience import Patience
from karvan.data.retry.source import retrying

_log = logging.getLogger("karvan.data")

_CODES = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_MSG_TIMED_OUT", "_NODE_UPDATE")

T = TypeVar("T")


class BrokerOutage:
    """Whether the brokers of a consumer are unreachable, and for how long."""

    def __init__(self, kafka: Any, topics: str, seconds: float) -> None:
        self._kafka = kafka
        self._topics = topics
        self._patience = Patience(seconds)
        self._codes = {getattr(kafka.KafkaError, name) for name in _CODES if hasattr(kafka.KafkaError, name)}
        self._since: float | None = None
        self._error = ""

    def is_outage(self, error: Any) -> bool:
        """Whether a Kafka error means that brokers cannot be reached."""
        return error.code() in self._codes or bool(error.retriable())

    def note(self, error: Any) -> None:
        """Record that a broker was lost; called by librdkafka, or for an error that arrived as a message."""
        if self._since is None and self.is_outage(error):
            self._error = str(error.str())
            self._since = time.monotonic()
            _log.warning(
                "Kafka topics %s: %s. Retrying for up to %g seconds.",
                self._topics,
                self._error,
                self._patience.seconds,
            )

    def clear(self) -> None:
        """The brokers answer: the outage, if there was one, is over."""
        since, self._since = self._since, None
        if since is not None:
            _log.warning("Kafka answers again, after %.0f seconds.", time.monotonic() - since)

    def check(self, ask: Callable[[], object]) -> None:
        """After `retry_seconds` without a message: raise, unless the brokers answer a request."""
        if self._since is None or time.monotonic() < self._since + self._patience.seconds:
            return
        try:
            ask()
        except self._kafka.KafkaException as error:
            raise DataError(
                f"Kafka was unreachable for {self._patience.seconds:g} seconds: {self._error}",
                path=self._topics,
                temporary=True,
            ) from error
        self.clear()

    def ask(self, request: Callable[[], T], path: str, failure: str) -> T:
        """The answer to a request, which is repeated during an outage; `failure` begins the error's text."""

        def send() -> T:
            try:
                return request()
            except self._kafka.KafkaException as error:
                temporary = self.is_outage(error.args[0])
                raise DataError(f"{failure}: {error}", path=path, temporary=temporary) from error

        return retrying(send, self._patience)
