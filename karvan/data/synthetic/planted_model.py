"""The model that synthetic click logs are drawn from.

The logit of a click is the sum of a user and an item effect, the affinity of a user vector to an item vector,
effects of device and hour, of log price and log recency, and the share of the history that is of the item's
category.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
