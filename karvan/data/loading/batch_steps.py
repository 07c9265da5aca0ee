"""From records to batches: steps that run once for many batches, and steps that run for each.

A function is *row-wise* if every row of its result depends only on the same row of its argument, and if it
has an attribute `row_wise` that is true. It is then called with large pieces, from which batches are cut
afterwards: a call for a hundred thousand rows costs little more than one for a thousand. Functions without
the attribute are called once for each batch, with exactly its rows.

A column that is known to lack values has the kind for missing values in every batch (`OptionalRagged` or
`OptionalText`), so that code that expects tensors fails at the first batch, and not hours later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

import pyarrow as pa

from karvan.ragged import Batch, Entry, join_batches, split_batch, with_optional_values

Rows: TypeAlias = "pa.RecordBatch | Batch"
Decode = Callable[[pa.RecordBatch], Batch]
Transform = Callable[[Batch], Mapping[str, Entry] | tuple[Any, Any]]
"""The result may also be a pair of features and labels, for a Trainer, unless batches go to a GPU at once."""


class BatchSteps:
    """`decode` and then `transform`: row-wise steps run on pieces, the rest on batches."""

    def __init__(self, decode: Decode, transform: Transform | None = None) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform expects a function of a batch, but received {transform!r}.")
        self.decode = decode
        self.transform = transform
        steps: list[Callable[[Any], Any]] = [decode] if transform is None else [decode, transform]
        self._on_pieces = list(takewhile(lambda step: getattr(step, "row_wise", False), steps))
        self._on_batches = steps[len(self._on_pieces) :]
        row_wise = len(self._on_pieces) == 2  # such a transform has outputs in place of the columns
        self._nullable: Sequence[str] = () if row_wise else getattr(decode, "nullable", ())

    def require_fitted(self) -> None:
        """Raise if the transform has not been fitted yet; threads would fail one after the other."""
        getattr(self.transform, "require_fitted", lambda: None)()

    @property
    def on_pieces(self) -> bool:
        """Whether there are steps that run on pieces."""
        return bool(self._on_pieces)

    @property
    def on_batches(self) -> bool:
        """Whether there are steps that run on each batch."""
        return bool(self._on_batches)

    def prepare(self, records: pa.RecordBatch) -> Rows:
        """The row-wise steps."""
        rows_: Rows = _run(self._on_pieces, records)
        if isinstance(rows_, Batch) and len(rows_) and rows_.samples != len(records):
            raise ValueError(
                f"A row-wise step must give a row for each of {len(records)} rows, but gave {rows_.samples}."
            )
        return rows_

    def finish(self, parts: Sequence[Rows]) -> Batch:
        """The batch of these rows; those that have not been prepared are prepared now."""
        rows = join([self.prepare(part) if isinstance(part, pa.RecordBatch) else part for part in parts])
        if self._nullable and isinstance(rows, Batch):
            optional = {name: with_optional_values(rows[name]) for name in self._nullable}
            rows = rows.with_entries({**rows, **optional})
        batch: Batch = _run(self._on_batches, rows)
        return batch


def _run(steps: Iterable[Callable[[Any], Any]], rows: Rows) -> Any:
    value: Any = rows
    for step in steps:
        value = step(value)
        if isinstance(value, dict):
            value = Batch(value)
        if value is None:
            raise TypeError("transform must give a batch, or a pair of features and labels, but gave None.")
    return value


def split(rows: Rows, counts: Sequence[int]) -> Sequence[Rows]:
    """The first `counts[0]` rows, the next `counts[1]` rows, and so on; nothing is copied."""
    if isinstance(rows, Batch):
        return split_batch(rows, counts)
    first, batches = 0, []
    for count in counts:
        batches.append(rows.slice(first, count))
        first += count
    return batches


def join(parts: Sequence[Rows]) -> Rows:
    """All rows, which are either records or entries of batches; a single part is not copied."""
    batches = [part for part in parts if isinstance(part, Batch)]
    if batches:
        return join_batches(batches)
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
