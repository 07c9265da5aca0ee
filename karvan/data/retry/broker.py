"""Outages of Kafka brokers, asked of librdkafka, which reconnects by itself.

It reports a lost broker to a callback and then tries for ever, in silence. `BrokerOutage` warns at the first
report, and ends the waiting after `retry_seconds`, unless a message has come or the brokers answer a
question.
Positions are those of messages that were handed out, so nothing is lost or comes twice.
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
    """Whether the brokers of a consumer are away, and for how long."""

    def __init__(self, kafka: Any, topics: str, seconds: float) -> None:
        self._kafka = kafka
        self._topics = topics
        self._patience = Patience(seconds)
        self._codes = {getattr(kafka.KafkaError, name) for name in _CODES if hasattr(kafka.KafkaError, name)}
        self._since: float | None = None
        self._error = ""

    def is_away(self, error: Any) -> bool:
        """Whether an error of Kafka is about brokers that cannot be reached."""
        return error.code() in self._codes or bool(error.retriable())

    def note(self, error: Any) -> None:
        """A broker was lost; called by librdkafka, or for an error that came as a message."""
        if self._since is None and self.is_away(error):
            self._error = str(error.str())
            self._since = time.monotonic()
            _log.warning(
                "Kafka topics %s: %s. It is tried again for up to %g seconds.",
                self._topics,
                self._error,
                self._patience.seconds,
            )

    def heard(self) -> None:
        """A message has come."""
        since, self._since = self._since, None
        if since is not None:
            _log.warning("Kafka answers again, after %.0f seconds.", time.monotonic() - since)

    def check(self, ask: Callable[[], object]) -> None:
        """After `retry_seconds` without a message: raise, unless the brokers answer a question."""
        if self._since is None or time.monotonic() < self._since + self._patience.seconds:
            return
        try:
            ask()
        except self._kafka.KafkaException as error:
            raise DataError(
                f"Kafka was away for {self._patience.seconds:g} seconds: {self._error}",
                path=self._topics,
                temporary=True,
            ) from error
        self.heard()

    def ask(self, question: Callable[[], T], path: str, what: str) -> T:
        """The answer to a question; while brokers are away it is asked again."""

        def asked() -> T:
            try:
                return question()
            except self._kafka.KafkaException as error:
                away = self.is_away(error.args[0])
                raise DataError(f"{what}: {error}", path=path, temporary=away) from error

        return retrying(asked, self._patience)
