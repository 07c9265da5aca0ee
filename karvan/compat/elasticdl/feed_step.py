"""`FeedStep`: the records of a batch as a model's `feed` prepares them, as a transform of `kv.data.read`.

`feed(records, mode, metadata)` gets a list of records, with a `map` as data sets of TensorFlow have it. It
gives features and labels: tensors, `kv.Ragged`s, arrays, lists of one entry for each sample, or mappings of
names to these; or a list or a torch data set of samples. In mode PREDICTION it gives features alone.

`dataset_fn` of the design for PyTorch gets numbers instead, where all records are text of numbers: one array
of all numbers of all records, in their order.

Batches are pairs of features and labels, which a `kv.Trainer` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from karvan.compat.elasticdl.constants import Mode
from karvan.compat.elasticdl.contract import ContractError
from karvan.ragged import Batch, Entry, NestedRagged, Ragged
from karvan.train.pair import as_batch


class Records(list[Any]):
    """The records of a batch."""

    def map(self, function: Callable[[Any], Any]) -> Records:
        """The result for each record."""
        return Records(function(record) for record in self)

    def shuffle(self, *arguments: Any, **options: Any) -> NoReturn:
        """An error: it says who shuffles."""
        raise ContractError(
            "feed gets the records of one batch, and records for training are shuffled before: leave "
            "dataset.shuffle(…) out."
        )

    def batch(self, *arguments: Any, **options: Any) -> NoReturn:
        """An error: it says who makes batches."""
        raise ContractError(
            "feed gets the records of one batch, of --minibatch_size records: leave dataset.batch(…) out."
        )


class FeedStep:
    """A transform of batches; records_of gives the records of a batch."""

    def __init__(
        self,
        feed: Callable[..., Any],
        mode: str,
        metadata: Any,
        records_of: Callable[[Batch], list[Any]],
        *,
        numbers: bool = False,
    ) -> None:
        self._feed = feed
        self._mode = mode
        self._metadata = metadata
        self._records_of = records_of
        self._numbers = numbers

    def __call__(self, batch: Batch) -> Any:
        """Features and labels."""
        records: Any = Records(self._records_of(batch))
        if self._numbers and (found := numbers_of(records)) is not None:
            records = found
        made = self._feed(records, self._mode, self._metadata)
        features, labels = self._parts(made)
        parts = [_part("features", features)] + ([] if labels is None else [_part("labels", labels)])
        try:
            return as_batch(parts)
        except ValueError as error:
            raise ContractError(f"feed must give one of each for every sample: {error}") from error

    def _parts(self, made: Any) -> tuple[Any, Any]:
        if isinstance(made, Records | torch.utils.data.Dataset):
            samples = [made[index] for index in range(len(made))]  # type: ignore[arg-type]
            if samples and isinstance(samples[0], tuple):
                made = tuple(_joined([sample[part] for sample in samples]) for part in range(len(samples[0])))
            else:
                made = _joined(samples)
        if isinstance(made, tuple) and len(made) == 2:
            return made[0], None if self._mode == Mode.PREDICTION else made[1]
        if self._mode == Mode.PREDICTION and made is not None and not isinstance(made, tuple):
            return made, None
        expected = "features" if self._mode == Mode.PREDICTION else "a pair of features and labels"
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise ContractError(f"feed must give {expected} in mode {self._mode}, got {got}.")


def numbers_of(records: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """All numbers of records that are text of numbers, or cells of a CSV file; None if they are not."""
    words: list[Any] = []
    for record in records:
        if isinstance(record, bytes | str):
            text = record.decode("latin-1") if isinstance(record, bytes) else record
            words += text.replace(",", " ").split()
        elif isinstance(record, list):
            words += record
        else:
            return None
    try:
        return np.array(words, np.float32)
    except ValueError:
        return None


def _joined(entries: list[Any]) -> Any:
    """Entries of samples, which may be mappings, as one list, or lists by name."""
    if entries and isinstance(entries[0], Mapping):
        return {name: [entry[name] for entry in entries] for name in entries[0]}
    return entries


def _part(name: str, part: Any) -> Entry | dict[str, Entry]:
    if isinstance(part, Mapping):
        return {str(inner): _entry(f"{name} '{inner}'", value) for inner, value in part.items()}
    return _entry(name, part)


def _entry(name: str, value: Any) -> Entry:
    """A tensor or rows as they are; anything else as a tensor, with floats in torch's usual dtype."""
    if isinstance(value, Tensor | Ragged | NestedRagged):
        return value
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return torch.stack(list(value))
    try:
        array = np.asarray(value)
        made = torch.tensor(array)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"feed must give {name} as a tensor, an array, or a list of one for each sample, all of one "
            f"shape: {error}"
        ) from error
    return made.to(torch.get_default_dtype()) if made.is_floating_point() else made
