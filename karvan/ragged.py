"""Batches of variable-length data: `Ragged`, `NestedRagged`, `Padded`, `IndexedRows` and `Batch`.

Also `IdsReference`, for ids that an embedding worker holds, and how batches are split and joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from karvan.display import html_table


class Padded(NamedTuple):
    """Rows truncated or padded to one length.

    Attributes:
        values: The vectors, (B, L, dim); zeros where a row is shorter.
        mask: (B, L), True on real entries.

    Example:
        >>> engine = kv.EmbeddingEngine(
        ...     {"history": kv.Table(dim=4, combiner="sequence")}
        ... )
        >>> history = kv.Ragged.from_lists([[1, 2], [3]])
        >>> values, mask = engine({"history": history})["history"]
        >>> mask
        tensor([[ True,  True],
                [ True, False]])
    """

    values: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class IndexedRows:
    """Vectors of distinct ids, and which of them each sample has: what the combiner "index" gives.

    Attributes:
        vectors: (U + 1, dim): row 0 is zeros and stands for padding; then come the U distinct ids of the
            batch in ascending order. They are without weights.
        index: (B, L), int64: for each sample the rows of `vectors` in the order of its ids, then 0.
        weights: (B, L): the weights of the ids, then 0; None if the ids have none.

    Example:
        >>> engine = kv.EmbeddingEngine({"history": kv.Table(4, combiner="index")})
        >>> history = kv.Ragged.from_lists([[7, 9, 7], [9]])
        >>> rows = engine({"history": history})["history"]
        >>> rows.vectors.shape, rows.index
        (torch.Size([3, 4]), tensor([[1, 2, 1],
                [2, 0, 0]]))
    """

    vectors: Tensor
    index: Tensor
    weights: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """(B, L), True on real entries."""
        return self.index > 0

    def lengths(self) -> Tensor:
        """Count the ids of each sample.

        Returns:
            The counts, int64.
        """
        return self.mask.sum(1)

    def to_sequence(self) -> Padded:
        """Return every vector in place, as the combiner "sequence" gives them, with weights applied.

        Returns:
            The padded vectors.
        """
        values = embedding(self.index, self.vectors, padding_idx=0)
        return Padded(values if self.weights is None else values * self.weights.unsqueeze(2), self.mask)

    def to_ragged(self) -> Ragged:
        """Return every vector, as the combiner "ragged" gives them, but at most L of a sample.

        Returns:
            The vectors.
        """
        mask = self.mask
        values = embedding(self.index[mask], self.vectors)
        if self.weights is not None:
            values = values * self.weights[mask].unsqueeze(1)
        return Ragged(values, pad(mask.sum(1).cumsum(0), (1, 0)))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> IndexedRows:
        """Move it to a device.

        Args:
            device: The device.
            non_blocking: Whether to copy without waiting, from page-locked memory.

        Returns:
            A copy, or the same tensors if they are there already.
        """
        weights = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        vectors, index = (
            tensor.to(device, non_blocking=non_blocking) for tensor in (self.vectors, self.index)
        )
        return IndexedRows(vectors, index, weights)

    def __repr__(self) -> str:
        weighted = "" if self.weights is None else ", weighted"
        return f"IndexedRows(vectors={list(self.vectors.shape)}, index={list(self.index.shape)}{weighted})"


class _NotComparable:
    """Rows that are no tensor: comparing and computing with them are errors.

    Python's own `==` would be False for every text and every number, and `tensor * False` are zeros.
    """

    __slots__ = ()

    def _problem(self) -> str:
        return (
            f"A {type(self).__name__} is not a tensor. Compute with its values, or compare rows with "
            "equal(). Text becomes numbers by kv.Feature(…).vocabulary([…])."
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(self._problem())

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __invert__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = _refuse
    __hash__ = object.__hash__


class Ragged(_NotComparable):
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    Construction checks types and shapes only; `validate()` also reads the offsets.

    Args:
        values: The values of all rows, one after the other: (n,) or (n, d).
        offsets: Where rows begin, int64, rows + 1 entries. None means exactly one value per row.
        weights: A weight for each value, (n,).

    Raises:
        ValueError: A shape does not fit.
        TypeError: The offsets are not int64, or the weights not floating point.

    Example:
        >>> ragged = kv.Ragged.from_lists([[1, 2], [], [3]])
        >>> ragged.values, ragged.offsets
        (tensor([1, 2, 3]), tensor([0, 2, 2, 3]))
        >>> ragged.lengths()
        tensor([2, 0, 1])
    """

    __slots__ = ("offsets", "values", "weights")

    def __init__(self, values: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> None:
        _require_tensor("values", values)
        if values.dim() not in (1, 2):
            raise ValueError(f"Ragged values must be 1-D or 2-D, but have shape {tuple(values.shape)}.")
        if offsets is not None:
            _require_tensor("offsets", offsets)
            if offsets.dtype != torch.int64:
                raise TypeError(f"Ragged offsets must be torch.int64, but are {offsets.dtype}.")
            if offsets.dim() != 1 or offsets.shape[0] == 0:
                raise ValueError(
                    "Ragged offsets must be 1-D with rows + 1 entries, "
                    f"but have shape {tuple(offsets.shape)}."
                )
            _require_device("offsets", offsets, values)
        if weights is not None:
            _require_tensor("weights", weights)
            if not weights.is_floating_point():
                raise TypeError(f"Ragged weights must be floating point, but are {weights.dtype}.")
            if weights.shape != values.shape[:1]:
                raise ValueError(
                    f"Ragged weights must have shape ({values.shape[0]},), one per value, "
                    f"but have {tuple(weights.shape)}."
                )
            _require_device("weights", weights, values)
        self.values = values
        self.offsets = offsets
        self.weights = weights

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Sequence[Any]],
        weights: Sequence[Sequence[float]] | None = None,
        dtype: torch.dtype = torch.int64,
    ) -> Ragged:
        """Build it from one list per row.

        Args:
            lists: The values of each row.
            weights: The weights of the values, in the same nesting.
            dtype: The type of the values.

        Returns:
            The rows.

        Raises:
            ValueError: The weights are nested differently.
        """
        lengths = [len(row) for row in lists]
        flat_weights = None
        if weights is not None:
            received = [len(row) for row in weights]
            if received != lengths:
                where = next(
                    (i for i, (a, b) in enumerate(zip(lengths, received, strict=False)) if a != b), None
                )
                detail = (
                    f"{len(lengths)} rows, but there are {len(received)}"
                    if where is None
                    else f"{lengths[where]} entries in row {where}, but there are {received[where]}"
                )
                raise ValueError(f"Ragged weights must have {detail}.")
            flat_weights = torch.tensor([w for row in weights for w in row], dtype=torch.float32)
        values = torch.tensor([value for row in lists for value in row], dtype=dtype)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int64), dim=0, out=offsets[1:])
        return cls(values, offsets, flat_weights).validate()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1)

    def lengths(self) -> Tensor:
        """Count the values of each row.

        Returns:
            The counts, int64.
        """
        if self.offsets is None:
            return torch.ones(self.rows, dtype=torch.int64, device=self.values.device)
        return self.offsets.diff()

    def to_lists(self) -> list[list[Any]]:
        """Return the values as one Python list per row.

        Returns:
            The lists.
        """
        flat = self.values.tolist()
        if self.offsets is None:
            return [[value] for value in flat]
        bounds = self.offsets.tolist()
        return [flat[start:end] for start, end in pairwise(bounds)]

    def validate(self) -> Ragged:
        """Check everything, including the contents of the offsets.

        Returns:
            The same object.

        Raises:
            ValueError: The offsets do not start at 0, decrease, or do not end at the number of values.
        """
        checked = Ragged(self.values, self.offsets, self.weights)
        if checked.offsets is not None:
            first, last, n = int(checked.offsets[0]), int(checked.offsets[-1]), int(checked.values.shape[0])
            if first != 0:
                raise ValueError(f"Ragged offsets must start at 0, but start at {first}.")
            falls = (checked.offsets.diff() < 0).nonzero()
            if len(falls):
                i = int(falls[0])
                a, b = checked.offsets[i : i + 2].tolist()
                raise ValueError(f"Ragged offsets must not decrease, but go from {a} to {b} at row {i}.")
            if last != n:
                raise ValueError(f"Ragged offsets must end at {n}, the number of values, but end at {last}.")
        return self

    def equal(self, other: Ragged) -> bool:
        """Compare rows and weights.

        No offsets equal the offsets 0, 1, 2, ….

        Args:
            other: What to compare with.

        Returns:
            Whether they are equal.
        """
        if (self.weights is None) != (other.weights is None) or self.values.dtype != other.values.dtype:
            return False
        same_weights = (
            self.weights is None or other.weights is None or torch.equal(self.weights, other.weights)
        )
        return (
            torch.equal(self.values, other.values)
            and torch.equal(self.lengths(), other.lengths())
            and same_weights
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Ragged:
        """Move it to a device.

        Args:
            device: The device.
            non_blocking: Whether to copy without waiting, from page-locked memory.

        Returns:
            A copy, or the same tensors if they are there already.
        """
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Ragged:
        """Copy it to page-locked memory, from which copies to a GPU can overlap with work.

        Returns:
            The copy.
        """
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, change: Callable[[Tensor], Tensor]) -> Ragged:
        """Change each of its tensors.

        Args:
            change: A function of one tensor.

        Returns:
            The same rows with the changed tensors.
        """
        offsets = None if self.offsets is None else change(self.offsets)
        weights = None if self.weights is None else change(self.weights)
        return type(self)(change(self.values), offsets, weights)

    def __repr__(self) -> str:
        weighted = "" if self.weights is None else ", weighted"
        shape = tuple(self.values.shape)
        kind = type(self).__name__
        return f"{kind}(rows={self.rows}, values={self.values.dtype}{list(shape)}{weighted})"

    def _repr_html_(self) -> str:
        return _samples_table(self)


class OptionalRagged(Ragged):
    """One number per sample, or none where it is missing: what a column of integers with nulls becomes.

    All batches of a column that is known to lack numbers have this kind, from the first one on; see
    `kv.data.read`. Where nothing was known of missing numbers, a batch without one has a plain tensor. What
    code for tensors raises says how to read the column.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Ragged.__slots__:  # of an object that is being made
            raise AttributeError(name)
        raise AttributeError(f"{self._problem()} It is not a tensor, and has no '{name}'.")

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        """Torch's functions expect tensors."""
        values = [*arguments, *(options or {}).values()]
        entries = [
            *values,
            *(inner for value in values if isinstance(value, list | tuple) for inner in value),
        ]
        missing = next(entry for entry in entries if isinstance(entry, OptionalRagged))
        raise TypeError(f"{missing._problem()} torch.{function.__name__} expects tensors.")

    def _problem(self) -> str:
        return (
            f"Samples may have no value in this column, as {self.rows - self.values.shape[0]} of {self.rows} "
            "here. For a tensor in all batches, declare a value for null, kv.data.Fixed(…, default=0), or "
            "kv.Feature(…).fill_missing(0); for lists in all batches, kv.data.Varlen(…)."
        )


class NestedRagged(_NotComparable):
    """Rows of different numbers of lists of different lengths.

    Row i is lists `outer[i]` to `outer[i + 1]`; list j is `values[inner[j]:inner[j + 1]]`. Strings are lists
    of bytes: a column of lists of strings has uint8 values. Both offsets are int64.
    """

    __slots__ = ("inner", "outer", "values")

    def __init__(self, values: Tensor, inner: Tensor, outer: Tensor) -> None:
        for name, offsets in (("inner", inner), ("outer", outer)):
            if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.shape[0] == 0:
                raise ValueError(
                    f"NestedRagged {name} offsets must be 1-D int64 with at least one entry, "
                    f"but are {offsets.dtype} of shape {tuple(offsets.shape)}."
                )
        self.values = values
        self.inner = inner
        self.outer = outer

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.outer.shape[0]) - 1

    def lengths(self) -> Tensor:
        """The number of lists in each row, int64."""
        return self.outer.diff()

    def lists(self) -> Ragged:
        """All lists, one row each, without the outer nesting."""
        return Ragged(self.values, self.inner)

    def to_lists(self) -> list[list[list[Any]]]:
        """The values as nested Python lists."""
        lists = self.lists().to_lists()
        bounds = self.outer.tolist()
        return [lists[start:end] for start, end in pairwise(bounds)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> NestedRagged:
        """The same on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> NestedRagged:
        """The same in page-locked memory, for fast copies to a GPU."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, change: Callable[[Tensor], Tensor]) -> NestedRagged:
        """The same rows, with each of the tensors changed."""
        return type(self)(change(self.values), change(self.inner), change(self.outer))

    def __repr__(self) -> str:
        lists = int(self.inner.shape[0]) - 1
        return f"{type(self).__name__}(rows={self.rows}, lists={lists}, values={self.values.dtype})"

    def _repr_html_(self) -> str:
        return _samples_table(self)


class OptionalText(NestedRagged):
    """One string per sample, or none where it is missing: what a column of strings with nulls becomes.

    As for `OptionalRagged`, a batch without a missing one has a `Ragged` of bytes if none was expected.
    """

    __slots__ = ()


def is_text(entry: object) -> TypeGuard[Ragged | NestedRagged]:
    """Whether a column of a batch has strings."""
    return isinstance(entry, Ragged | NestedRagged) and entry.values.dtype == torch.uint8


class IdsReference:
    """Refers to the id features of a batch that an embedding worker holds: which worker, under which name.

    A batch has it as its entry `REFERENCE`. The worker holds the ids for as long as the object exists.
    """

    __slots__ = ("__weakref__", "name", "rows", "worker")

    def __init__(self, worker: int, name: str, rows: int) -> None:
        if worker < 0 or rows < 0:
            raise ValueError(f"IdsReference expects a worker and rows of 0 or more, got {worker} and {rows}.")
        self.worker = worker
        self.name = name
        self.rows = rows

    def to(self, device: torch.device | str, non_blocking: bool = False) -> IdsReference:
        """The same: there is nothing to move."""
        return self

    def pin_memory(self) -> IdsReference:
        """The same."""
        return self

    def __repr__(self) -> str:
        return f"IdsReference(worker={self.worker}, name={self.name!r}, rows={self.rows})"


REFERENCE = "karvan.reference"
Entry: TypeAlias = Ragged | NestedRagged | Tensor


class Batch(Mapping[str, Entry]):
    """Named features of the same samples: a mapping of names to tensors, `Ragged`s and the like.

    Args:
        entries: The features by name, each with one row per sample.

    Raises:
        ValueError: Features have different numbers of rows.

    Example:
        >>> batch = kv.Batch(
        ...     {
        ...         "user": torch.tensor([7, 8]),
        ...         "history": kv.Ragged.from_lists([[1, 2], [3]]),
        ...     }
        ... )
        >>> batch.samples, list(batch)
        (2, ['user', 'history'])
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)
        self._samples = 0
        first = None
        for name, entry in self._entries.items():
            rows = _rows_of(name, entry)
            if first is None:
                first, self._samples = name, rows
            elif rows != self._samples:
                raise ValueError(
                    f"A batch needs equal rows, but feature '{first}' has {self._samples} "
                    f"and feature '{name}' has {rows}."
                )

    @classmethod
    def trusted(cls, entries: dict[str, Entry], samples: int) -> Self:
        """Make a batch of entries that are known to fit: nothing is copied or checked.

        Args:
            entries: The features by name.
            samples: The number of rows that each of them has.

        Returns:
            The batch.
        """
        batch = cls.__new__(cls)
        batch._entries = entries
        batch._samples = samples
        return batch

    @property
    def samples(self) -> int:
        """The number of samples; 0 for a batch without entries."""
        return self._samples

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move every entry to a device.

        Args:
            device: The device.
            non_blocking: Whether to copy without waiting, from page-locked memory.

        Returns:
            The batch there.
        """
        return self.with_entries(
            {name: entry.to(device, non_blocking=non_blocking) for name, entry in self.items()}
        )

    def pin_memory(self) -> Batch:
        """Copy every entry to page-locked memory.

        Returns:
            The copy.
        """
        return self.with_entries({name: entry.pin_memory() for name, entry in self.items()})

    def with_entries(self, entries: Mapping[str, Any]) -> Batch:
        """Replace the entries, and keep what else the batch has, such as its `meta`.

        Args:
            entries: The new features by name.

        Returns:
            The new batch.
        """
        return Batch(entries)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Batch(samples={self.samples}, {', '.join(self._entries)})"

    def _repr_html_(self) -> str:
        def row(item: tuple[str, Entry]) -> list[str]:
            name, entry = item
            return [name, _kind_of(entry), ", ".join(_first_samples(entry, _FEW))]

        head = ("feature", "type", "first samples")
        return html_table(f"Batch of {self.samples:,} samples", head, self.items(), row)


_FEW = 4  # samples, and values of a sample, that are shown


def _samples_table(entry: Ragged | NestedRagged) -> str:
    """The first samples, a row each."""
    first = _first_samples(entry, 2 * _FEW)
    return html_table(repr(entry), ("sample", "values"), list(enumerate(first)))


def _kind_of(entry: Entry | IdsReference) -> str:
    if isinstance(entry, IdsReference):
        return "on an embedding worker"
    values = entry if isinstance(entry, Tensor) else entry.values
    dtype = str(values.dtype).removeprefix("torch.")
    where = "" if values.device.type == "cpu" else f", {values.device}"
    if isinstance(entry, Tensor):
        return f"{dtype} {list(entry.shape)}{where}"
    return f"{type(entry).__name__} {dtype}{where}"


def _first_samples(entry: Entry | IdsReference, count: int) -> list[str]:
    """The first samples as text, and "…" for the others."""
    if isinstance(entry, IdsReference):
        return []
    rows = _rows_of("", entry)
    first = [_sample_text(entry, index) for index in range(min(count, rows))]
    return first + ["…"] * (rows > count)


def _sample_text(entry: Entry, index: int) -> str:
    if isinstance(entry, Tensor):
        return _values_text(entry[index])
    if isinstance(entry, NestedRagged):
        start, end = entry.outer[index : index + 2].tolist()
        lists = [_sample_text(entry.lists(), sample) for sample in range(start, min(end, start + _FEW))]
        return f"[{', '.join(lists + ['…'] * (end - start > _FEW))}]"
    start, end = (index, index + 1) if entry.offsets is None else entry.offsets[index : index + 2].tolist()
    values = entry.values[start:end]
    if values.dtype == torch.uint8 and values.dim() == 1:  # text
        return repr(bytes(values[: 10 * _FEW].tolist()).decode(errors="replace"))
    return _values_text(values)


def _values_text(values: Tensor) -> str:
    flat = [
        f"{value:.4g}" if isinstance(value, float) else str(value)
        for value in values.flatten()[:_FEW].tolist()
    ]
    return f"[{', '.join(flat + ['…'] * (values.numel() > _FEW))}]" if values.dim() else flat[0]


def _rows_of(name: str, entry: Entry | IdsReference) -> int:
    if isinstance(entry, Tensor):
        if entry.dim() == 0:
            raise ValueError(f"Feature '{name}' must have a first dimension of rows, but is a 0-D tensor.")
        return entry.shape[0]
    if not isinstance(entry, Ragged | NestedRagged | IdsReference):
        raise TypeError(f"Feature '{name}' must be a Ragged or a Tensor, but is {type(entry).__name__}.")
    return entry.rows


def _require_tensor(what: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"Ragged {what} must be a Tensor, but are {type(value).__name__}.")


def _require_device(what: str, tensor: Tensor, values: Tensor) -> None:
    if tensor.device != values.device:
        raise ValueError(
            f"Ragged {what} must be on {values.device} like the values, but are on {tensor.device}."
        )


# Batches are split into runs of consecutive samples, and joined. The parts of a split share memory with the
# batch. No input tensor is changed.


def values_of(entry: Entry) -> Tensor:
    """The values without the offsets."""
    return entry if isinstance(entry, Tensor) else entry.values


def rows_of(entry: Entry) -> int:
    """The number of rows."""
    return int(entry.shape[0]) if isinstance(entry, Tensor) else entry.rows


def as_offsets(entry: Ragged) -> Tensor:
    """The offsets, created where None means one value per row."""
    if entry.offsets is not None:
        return entry.offsets
    return torch.arange(entry.rows + 1, device=entry.values.device)


def offsets_from(lengths: Tensor) -> Tensor:
    """The offsets of rows of these lengths."""
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def join_batches(batches: Sequence[Batch]) -> Batch:
    """One batch with the samples of all, which have the same entries; see `join_rows` for their kinds."""
    if len(batches) == 1:
        return batches[0]
    return Batch({name: join_rows([batch[name] for batch in batches]) for name in batches[0]})


def join_rows(entries: Sequence[Entry]) -> Entry:
    """One entry with the rows of all, which are of one kind, except that values may be missing in some."""
    first = entries[0]
    if len(entries) == 1:
        return first
    kinds = {Tensor if isinstance(entry, Tensor) else type(entry) for entry in entries}
    if len(kinds) > 1:
        entries = _one_kind(entries)
        first = entries[0]
    values = torch.cat([values_of(entry) for entry in entries])
    raggeds = [entry for entry in entries if isinstance(entry, Ragged)]
    if isinstance(first, Ragged):
        weights = [entry.weights for entry in raggeds if entry.weights is not None]
        plain = all(entry.offsets is None for entry in raggeds)
        offsets = None if plain else join_offsets([as_offsets(entry) for entry in raggeds])
        return type(first)(values, offsets, torch.cat(weights) if weights else None)
    nested = [entry for entry in entries if isinstance(entry, NestedRagged)]
    if isinstance(first, NestedRagged):
        inner = join_offsets([entry.inner for entry in nested])
        return type(first)(values, inner, join_offsets([entry.outer for entry in nested]))
    return values


def _one_kind(entries: Sequence[Entry]) -> list[Entry]:
    """The same entries in the kind that holds all of them: complete ones beside those with missing values."""
    if any(isinstance(entry, NestedRagged) for entry in entries):
        text = all(isinstance(entry, Ragged | OptionalText) for entry in entries)
        nested: type[NestedRagged] = OptionalText if text else NestedRagged
        return [
            nested(entry.values, as_offsets(entry), torch.arange(entry.rows + 1, device=entry.values.device))
            if isinstance(entry, Ragged)
            else entry
            for entry in entries
        ]
    one_value = all(isinstance(entry, Tensor | OptionalRagged) for entry in entries)
    kind = OptionalRagged if one_value else Ragged
    return [
        _ragged_of(kind, entry)
        if isinstance(entry, Tensor)
        else kind(entry.values, as_offsets(entry), entry.weights)
        for entry in entries
        if isinstance(entry, Tensor | Ragged)
    ]


def _ragged_of(kind: type[Ragged], entry: Tensor) -> Ragged:
    """A tensor's rows, of one value or of one for each column."""
    count = entry.shape[1] if entry.dim() == 2 else 1
    return kind(entry.reshape(-1), torch.arange(entry.shape[0] + 1, device=entry.device) * count)


def join_offsets(offsets: Sequence[Tensor]) -> Tensor:
    """The offsets of the rows of all, one part after the other."""
    return offsets_from(torch.cat([part.diff() for part in offsets]))


def split_batch(batch: Batch, counts: Sequence[int]) -> list[Batch]:
    """The first `counts[0]` samples, the next `counts[1]`, and so on; the counts add up to all samples."""
    if not len(batch):
        return [batch] * len(counts)
    columns = [split_rows(entry, counts) for entry in batch.values()]
    return [
        Batch.trusted(dict(zip(batch, entries, strict=True)), count)
        for count, *entries in zip(counts, *columns, strict=True)
    ]


def split_rows(entry: Entry, counts: Sequence[int]) -> list[Entry]:
    """The first `counts[0]` rows, the next `counts[1]` rows, and so on."""
    if len(counts) == 1:
        return [entry]
    if isinstance(entry, Tensor):
        return list(torch.unsafe_split_with_sizes(entry, counts))
    rows = list(accumulate(counts, initial=0))
    if isinstance(entry, NestedRagged):
        lists, outer = _cut(entry.outer, rows)
        bounds, inner = _cut(entry.inner, lists)
        nested = [
            type(entry)(entry.values[a:b], *offsets)
            for (a, b), *offsets in zip(pairwise(bounds), inner, outer, strict=True)
        ]
        return [complete(item) for item in nested] if type(entry) is OptionalText else list(nested)
    bounds = rows
    offsets: Sequence[Tensor | None] = [None] * len(counts)
    if entry.offsets is not None:
        bounds, offsets = _cut(entry.offsets, rows)
    parts = [
        type(entry)(entry.values[a:b], part, None if entry.weights is None else entry.weights[a:b])
        for (a, b), part in zip(pairwise(bounds), offsets, strict=True)
    ]
    return [complete(part) for part in parts] if type(entry) is OptionalRagged else list(parts)


def complete(entry: Entry) -> Entry:
    """An entry whose values may be missing in the kind without missing values, if none is missing."""
    if isinstance(entry, OptionalRagged) and entry.values.shape[0] == entry.rows:
        return entry.values
    if isinstance(entry, OptionalText) and entry.inner.shape[0] == entry.outer.shape[0]:
        return Ragged(entry.values, entry.inner)
    return entry


def with_optional_values(entry: Entry) -> Entry:
    """The inverse of `complete`: the kind that can hold missing values, whether or not some are missing."""
    if isinstance(entry, Tensor) and entry.dim() == 1 and not entry.is_floating_point():
        return _ragged_of(OptionalRagged, entry)
    if type(entry) is Ragged and entry.values.dtype is torch.uint8:
        return OptionalText(entry.values, as_offsets(entry), torch.arange(entry.rows + 1))
    return entry


def _cut(offsets: Tensor, rows: list[int]) -> tuple[list[int], Sequence[Tensor]]:
    """The bounds of the values of each run of rows, and the offsets within each run."""
    bounds = offsets[torch.tensor(rows, device=offsets.device)].tolist()
    parts = [offsets[a : b + 1] - start for (a, b), start in zip(pairwise(rows), bounds, strict=False)]
    return bounds, parts
