"""Synthetic click logs whose labels come from a planted model, so the best reachable AUC is known.

A log is an endless, seeded sequence of records. Record number i is the same in any file, of any file count,
in any format: records are drawn in chunks of fixed size, each from its own generator.

| Column | Type | Drawn |
|---|---|---|
| `label` | float32 | 1 with the planted probability |
| `user`, `item` | int64 | Zipf, small ids are frequent; a quarter of the items of the favourite category |
| `category` | int64 | of the item |
| `city`, `age` | int64, float32 | of the user |
| `device`, `hour` | int64 | context, uniform |
| `price` | float32 | of the item, times log-normal noise |
| `recency` | float32 | context, exponential: hours since the last visit |
| `history` | list of int64 | items, half of them of the user's favourite category |

The planted model is below.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet

from karvan.argument_checks import publish
from karvan.data.source import Part, Split

__all__ = ["ClickLog", "ClickLogSource", "Written", "expected_auc"]

# The model that synthetic click logs are drawn from.
#
# The logit of a click is the sum of a user and an item effect, the affinity of a user vector to an item
# vector, effects of device and hour, of log price and log recency, and the share of the history that is of
# the item's category.


CHUNK = 8_192
DEVICES, HOURS, AFFINITY = 5, 24, 4

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint32]


class Planted:
    """Users, items and their effects, a pure function of the seed; draws records in chunks of `CHUNK`."""

    def __init__(
        self, seed: int, users: int, items: int, categories: int, cities: int, history: int, zipf: float
    ) -> None:
        self._seed = seed
        self._users, self._items, self._categories = users, items, min(categories, items)
        self._history, self._zipf = history, zipf
        rng = np.random.default_rng([seed, 0])
        self._user = rng.normal(0, 0.7, users).astype(np.float32)
        self._item = rng.normal(0, 0.7, items).astype(np.float32)
        self._user_vector = rng.normal(0, 0.6, (users, AFFINITY)).astype(np.float32)
        self._item_vector = rng.normal(0, 0.6, (items, AFFINITY)).astype(np.float32)
        self._device = rng.normal(0, 0.4, DEVICES).astype(np.float32)
        self._hour = (0.4 * np.sin(np.arange(HOURS) * 2 * np.pi / HOURS)).astype(np.float32)
        self._favourite = rng.integers(0, self._categories, users, np.int32)
        self._city = rng.integers(0, cities, users, np.int32)
        self._age = rng.normal(40, 12, users).clip(14, 90).astype(np.float32)
        self._price = rng.lognormal(3, 1, items).astype(np.float32)

    def draw(self, number: int) -> tuple[dict[str, Any], Floats, Floats]:
        """The columns of a chunk without its labels, the logits without the bias, and chances for labels."""
        rng = np.random.Generator(np.random.SFC64([self._seed, 1, number]))
        user, _ = _zipf_ids(rng, self._users, self._zipf, CHUNK)
        favourite = self._favourite.take(user)
        item, category = self._liked(rng, CHUNK, favourite, 0.25)
        lengths = rng.integers(0, 2 * self._history + 1, CHUNK, np.int32)
        offsets = np.zeros(CHUNK + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        values, value_category = self._liked(rng, int(offsets[-1]), np.repeat(favourite, lengths), 0.5)
        device, hour = (rng.integers(0, kinds, CHUNK, np.int32) for kinds in (DEVICES, HOURS))
        noise = rng.standard_normal(CHUNK, np.float32)
        price = self._price.take(item) * np.exp(0.1 * noise)
        recency = rng.standard_exponential(CHUNK, np.float32) * np.float32(24)
        matches = np.zeros(len(values) + 1, np.int32)
        np.cumsum(value_category == np.repeat(category, lengths), out=matches[1:])
        share = (matches[offsets[1:]] - matches[offsets[:-1]]) / np.maximum(lengths, 1).astype(np.float32)
        logits = (
            self._user.take(user)
            + self._item.take(item)
            + np.einsum(
                "nd,nd->n", self._user_vector.take(user, axis=0), self._item_vector.take(item, axis=0)
            )
            + self._device.take(device)
            + self._hour.take(hour)
            + np.float32(2.5) * share
            - np.float32(0.4) * np.log1p(price)
            - np.float32(0.3) * np.log1p(recency)
        ).astype(np.float32)
        columns = {
            "user": user,
            "item": item,
            "category": category,
            "city": self._city.take(user),
            "age": self._age.take(user),
            "device": device,
            "hour": hour,
            "price": price,
            "recency": recency,
            "history": (offsets, values),
        }
        return columns, logits, rng.random(CHUNK, np.float32)

    def _liked(self, rng: np.random.Generator, count: int, favourite: Ids, chance: float) -> tuple[Ids, Ids]:
        """Items and their categories; a part of them is moved to the nearest item of the favourite one."""
        item, bits = _zipf_ids(rng, self._items, self._zipf, count)
        category = item % self._categories
        moved = item - category + favourite
        liked = (bits < chance * 256) & (moved < self._items)
        return np.where(liked, moved, item), np.where(liked, favourite, category)


def _zipf_ids(rng: np.random.Generator, ids: int, exponent: float, count: int) -> tuple[Ids, Bits]:
    """Ids of frequency about (id + 1) ** -exponent, by the inverse of a bounded power law; and 8 bits each.

    A draw of 32 bits serves both. Where 24 bits could not reach all ids, the ids get a separate draw.
    """
    bits = rng.integers(0, 2**32, count, np.uint32)
    chance: npt.NDArray[Any] = (bits >> 8) * np.float32(2**-24) if ids <= 2**20 else rng.random(count)
    if abs(exponent - 1) < 1e-6:
        drawn = np.exp(chance * chance.dtype.type(np.log(ids + 1.0)))
    else:
        power = 1 - exponent
        scaled = np.log1p(chance * chance.dtype.type((ids + 1.0) ** power - 1))
        drawn = np.exp(scaled * chance.dtype.type(1 / power))
    return np.clip(drawn.astype(np.int32) - 1, 0, ids - 1), bits & np.uint32(255)


AUC_RECORDS = 2**18
ROW_GROUP = 2**17

SCHEMA = pa.schema(
    [
        ("label", pa.float32()),
        ("user", pa.int64()),
        ("item", pa.int64()),
        ("category", pa.int64()),
        ("city", pa.int64()),
        ("age", pa.float32()),
        ("device", pa.int64()),
        ("hour", pa.int64()),
        ("price", pa.float32()),
        ("recency", pa.float32()),
        ("history", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True, slots=True)
class Written:
    """What `ClickLog.write` has written, and what a model can reach on it.

    Attributes:
        paths: The files.
        rows: How many records they have.
        best_auc: The AUC that no model can be expected to exceed.
        click_rate: The share of clicks.

    Example:
        >>> kv.data.synthetic.ClickLog(users=10, items=10).write("clicks", 40).rows
        40
    """

    paths: list[str]
    rows: int
    best_auc: float
    click_rate: float


class ClickLog:
    """A synthetic click log with planted probabilities, so that the best possible AUC is known.

    The same arguments give the same records on every machine.

    Args:
        seed: The seed of everything.
        users: How many users there are.
        items: How many items there are.
        categories: How many categories there are.
        cities: How many cities there are.
        history: The mean length of the histories.
        zipf: The exponent by which some ids are more frequent than others; 0 for equal.
        click_rate: The share of clicks.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> log = kv.data.synthetic.ClickLog(users=100, items=100)
        >>> log.table(0, 5).num_rows
        5
        >>> data = kv.data.read(log.source(rows=1000), batch_size=100)
        >>> len(data)
        10
    """

    schema = SCHEMA

    def __init__(
        self,
        seed: int = 0,
        *,
        users: int = 100_000,
        items: int = 100_000,
        categories: int = 100,
        cities: int = 300,
        history: int = 10,
        zipf: float = 1.0,
        click_rate: float = 0.2,
    ) -> None:
        counts = {"users": users, "items": items, "categories": categories, "cities": cities}
        for name, value in counts.items():
            if not 1 <= value < 2**31:
                raise ValueError(f"{name} must be from 1 to 2 ** 31 - 1, but is {value}.")
        if history < 0 or zipf < 0 or not 0 < click_rate < 1:
            raise ValueError(
                "history and zipf must not be negative and click_rate must be between 0 and 1, "
                f"but are {history}, {zipf} and {click_rate}."
            )
        self._planted = Planted(seed, users, items, categories, cities, history, zipf)
        self._bias = _bias_for(self._planted.draw(0)[1], click_rate)

    def table(self, first: int, count: int) -> pa.Table:
        """Draw records.

        Args:
            first: The index of the first, from 0.
            count: How many.

        Returns:
            An Arrow table.
        """
        return pa.Table.from_batches(self._batches(first, count), SCHEMA)

    def probabilities(self, first: int, count: int) -> Floats:
        """Return the planted probabilities of a click.

        Args:
            first: The index of the first record, from 0.
            count: How many.

        Returns:
            An array.
        """
        pieces = [
            _sigmoid(self._planted.draw(number)[1][start:stop] + self._bias)
            for number, start, stop in _chunks(first, count)
        ]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)

    @cached_property
    def best_auc(self) -> float:
        """The expected AUC of the planted probabilities, over the log's first 262,144 records.

        No model can be expected to exceed it.
        """
        return expected_auc(self.probabilities(0, AUC_RECORDS))

    def source(self, rows: int, parts: int = 1) -> ClickLogSource:
        """Return the first records as a source, without writing files.

        Args:
            rows: How many records.
            parts: How many parts they are divided into.

        Returns:
            The source.
        """
        return ClickLogSource(self, rows, parts)

    def write(
        self, path: str | os.PathLike[str], rows: int, format: str = "parquet", files: int = 1
    ) -> Written:
        """Write the first records to files.

        Args:
            path: The folder.
            rows: How many records.
            format: "parquet" or "orc".
            files: How many files.

        Returns:
            What was written, and the best possible AUC.

        Raises:
            ValueError: The format is unknown.
        """
        if format not in ("parquet", "orc"):
            raise ValueError(f"format must be 'parquet' or 'orc', but is {format!r}.")
        os.makedirs(path, exist_ok=True)
        shares = _shares(rows, files)
        paths = [os.path.join(path, f"part-{number:05d}.{format}") for number in range(files)]
        with ThreadPoolExecutor(2, thread_name_prefix="karvan-synthetic") as pool:
            writing = [pool.submit(self._write_file, *job, format) for job in zip(paths, shares, strict=True)]
            best_auc = pool.submit(lambda: self.best_auc)
            clicks = sum(future.result() for future in writing)
        return Written(paths, rows, best_auc.result(), clicks / rows if rows else 0.0)

    def _write_file(self, path: str, share: tuple[int, int], format: str) -> float:
        """Write a share of the records, and return how many clicks are among them."""
        clicks = 0.0
        with _writer(path, format) as writer:
            for table in self._drawn_in_background(*share):
                writer.write(table)
                clicks += float(np.sum(table.column("label").to_numpy(), dtype=np.float64))
        return clicks

    def _drawn_in_background(self, first: int, count: int) -> Iterator[pa.Table]:
        """The records in row groups, at least one, drawn on a second thread while the caller writes."""
        with ThreadPoolExecutor(1, thread_name_prefix="karvan-synthetic") as pool:
            pending: deque[Future[pa.Table]] = deque()
            for start in range(0, max(count, 1), ROW_GROUP):
                pending.append(pool.submit(self.table, first + start, min(ROW_GROUP, count - start)))
                if len(pending) > 2:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _batches(self, first: int, count: int) -> Iterator[pa.RecordBatch]:
        return (self._batch(*chunk) for chunk in _chunks(first, count))

    def _batch(self, number: int, start: int, stop: int) -> pa.RecordBatch:
        columns, logits, chance = self._planted.draw(number)
        columns["label"] = (chance < _sigmoid(logits + self._bias)).astype(np.float32)
        offsets, values = columns["history"]
        columns["history"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        arrays = {name: pa.array(column).cast(SCHEMA.field(name).type) for name, column in columns.items()}
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)
        return batch.slice(start, stop - start)


class ClickLogSource:
    """The start of a click log as a source of several parts; `ClickLog.source` makes it.

    Args:
        log: The log.
        rows: How many records.
        parts: How many parts they are divided into.

    Example:
        >>> log = kv.data.synthetic.ClickLog(users=100, items=100)
        >>> [part.records for part in log.source(rows=10, parts=2).parts()]
        [5, 5]
    """

    schema = SCHEMA

    def __init__(self, log: ClickLog, rows: int, parts: int) -> None:
        self._log = log
        self._parts = {
            f"synthetic-{number:05d}": (first, count)
            for number, (first, count) in enumerate(_shares(rows, parts))
        }

    def parts(self) -> list[Part]:
        """Return parts of nearly equal sizes.

        Returns:
            The parts.
        """
        return [Part(path, count) for path, (_, count) in self._parts.items()]

    def fingerprint(self) -> str:
        """Return what differs between logs.

        Returns:
            A text.
        """
        return repr(float(self._log._bias))

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """Draw the records of a split.

        Args:
            split: The split.

        Returns:
            An iterator of record batches.
        """
        return self._log._batches(self._parts[split.path][0] + split.first, split.count)


def expected_auc(probabilities: npt.ArrayLike) -> float:
    """Compute the AUC that scoring records by their true probabilities is expected to have.

    Args:
        probabilities: The probability of each record.

    Returns:
        The AUC.

    Example:
        >>> round(kv.data.synthetic.expected_auc([0.5, 0.5]), 3)
        0.5
    """
    scores = np.asarray(probabilities, np.float64)
    _, group = np.unique(scores, return_inverse=True)
    clicks, others = np.bincount(group, scores), np.bincount(group, 1 - scores)
    below = np.cumsum(others) - others / 2
    return float((clicks * below).sum() / (clicks.sum() * others.sum()))


def _sigmoid(logits: Floats) -> Floats:
    unit = np.float32(1)
    result: Floats = unit / (unit + np.exp(-logits))
    return result


def _bias_for(logits: Floats, rate: float) -> np.float32:
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        below = _sigmoid(logits + np.float32(middle)).mean() < rate
        low, high = (middle, high) if below else (low, middle)
    return np.float32(low)


def _chunks(first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """The chunks that hold these records: number, and start and stop inside the chunk."""
    end = first + count
    for number in range(first // CHUNK, -(-end // CHUNK) if count else 0):
        yield number, max(first - number * CHUNK, 0), min(end - number * CHUNK, CHUNK)


def _shares(rows: int, files: int) -> list[tuple[int, int]]:
    if rows < 0 or files < 1:
        raise ValueError(f"rows must not be negative and files at least 1, but are {rows} and {files}.")
    bounds = [number * rows // files for number in range(files + 1)]
    return [(first, stop - first) for first, stop in pairwise(bounds)]


def _writer(path: str, format: str) -> Any:
    if format == "orc":
        return pyarrow.orc.ORCWriter(path, compression="zstd")
    few_values = ["label", "category", "city", "device", "hour"]
    return pyarrow.parquet.ParquetWriter(path, SCHEMA, compression="snappy", use_dictionary=few_values)


publish("karvan.data.synthetic")
