"""`Op`: a transform, and how equal transforms of many features run as one call.

A chain consists of `ChainStep`s: frozen records of settings. Most are an `Op`, which can run; others consist
of several. The engine passes all ops of a stage to `run`, which groups those that can run together and passes
each group to its class: element ops get the values of all entries as one tensor, row ops one entry with the
rows of all.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from karvan import kernels
from karvan.ragged import (
    Entry,
    NestedRagged,
    OptionalRagged,
    OptionalText,
    Ragged,
    as_offsets,
    join_rows,
    offsets_from,
    rows_of,
    split_rows,
    values_of,
)

# The layout of entries, and operations along their samples.
#
# Every transform works on each row separately, so one call over all rows of many features returns the same as
# many calls. Nothing here changes its inputs; results may share memory with them.


def flat_values(entry: Entry) -> Tensor:
    """All values in one dimension."""
    values = values_of(entry)
    return values if values.dim() == 1 else values.reshape(-1)


def with_values(entry: Entry, values: Tensor) -> Entry:
    """The same rows and weights with other values."""
    shape = values_of(entry).shape
    if values.shape != shape:
        values = values.reshape(shape)
    if isinstance(entry, Ragged):
        return type(entry)(values, entry.offsets, entry.weights)
    if isinstance(entry, NestedRagged):
        return type(entry)(values, entry.inner, entry.outer)
    return values


def is_text(entry: Entry) -> bool:
    """Whether the entry holds strings: a Ragged of bytes is one a row, a NestedRagged a list of them."""
    return not isinstance(entry, Tensor) and entry.values.dtype == torch.uint8


def as_text(entry: Entry) -> Entry:
    """Strings of int8, as other systems have them, as those of uint8 that steps of strings take."""
    if isinstance(entry, Tensor) or entry.values.dtype != torch.int8:
        return entry
    return with_values(entry, entry.values.view(torch.uint8))


def strings_of(entry: Entry) -> Ragged:
    """One row of bytes for each string of an entry of strings."""
    assert not isinstance(entry, Tensor)
    return entry.lists() if isinstance(entry, NestedRagged) else entry


def describe(entry: Entry) -> str:
    """The entry as errors describe it."""
    if isinstance(entry, Tensor):
        return f"a Tensor of {entry.dtype} and shape {tuple(entry.shape)}"
    kind = type(entry).__name__
    if isinstance(entry, OptionalText):
        return 'strings with missing values (Raw(…, default="") makes them empty)'
    if is_text(entry):
        return f"a {kind} of bytes (strings)"
    weighted = " with weights" if isinstance(entry, Ragged) and entry.weights is not None else ""
    return f"a {kind} of {entry.values.dtype}{weighted}"


def describe_for_lists(entry: Entry) -> str:
    """The entry as errors of steps that need lists describe it, with how to make lists."""
    if isinstance(entry, Tensor) and entry.dim() == 1:
        return (
            f"{describe(entry)}, one value per sample. fill_missing(…) fills samples without a value, and "
            "to_ragged() before this step makes lists of at most one value"
        )
    return describe(entry)


def describe_for_ids(entry: Entry) -> str:
    """The entry as errors of steps that need ids describe it, with how floats become ids."""
    if not values_of(entry).is_floating_point():
        return describe(entry)
    return (
        f"{describe(entry)}; ids are floats where some are missing, as pandas writes them, or all are: read "
        "them with columns=[kv.data.Fixed(…, dtype=torch.int64), …]"
    )


def kind_of(entry: Entry) -> Hashable:
    """What two entries must have in common to be joined."""
    values = values_of(entry)
    common = (type(entry).__name__, values.dtype, values.device, tuple(values.shape[1:]))
    if isinstance(entry, Ragged):
        weights = None if entry.weights is None else entry.weights.dtype
        return (*common, weights, entry.offsets is None)
    return common


def check_rows(entry: Entry) -> None:
    """Refuse offsets that do not tile the values; reading along them would mix rows up silently.

    On a GPU wrong offsets stop the device instead, so that right ones do not wait for it.
    """
    levels: list[tuple[Tensor, int]] = []
    if isinstance(entry, NestedRagged):
        levels = [(entry.inner, entry.values.shape[0]), (entry.outer, entry.inner.shape[0] - 1)]
    elif isinstance(entry, Ragged) and entry.offsets is not None:
        levels = [(entry.offsets, entry.values.shape[0])]
    for offsets, count in levels:
        if kernels.on_gpu(values_of(entry)):
            from karvan.kernels.rows import check_offsets

            check_offsets(offsets, count, whole=True)
        elif bool((offsets.diff() < 0).any() | (offsets[0] != 0) | (offsets[-1] != count)):
            Ragged(offsets.new_empty(count), offsets).validate()


def as_ragged(entry: Ragged | Tensor) -> Ragged:
    """A tensor's rows as a Ragged: one value a row of a 1-D tensor, all columns of a 2-D one."""
    if isinstance(entry, Ragged):
        return entry
    if entry.dim() == 1:
        return Ragged(entry)
    rows, columns = entry.shape[:2]
    return Ragged(entry.flatten(0, 1), torch.arange(rows + 1, device=entry.device) * columns)


def row_numbers(lengths: Tensor, total: int) -> Tensor:
    """The row number of each value."""
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    return torch.repeat_interleave(rows, lengths, output_size=total)


def row_positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The row number of each value, and its position in that row."""
    row = row_numbers(offsets.diff(), total)
    return row, torch.arange(total, device=row.device) - offsets[row]


def keep(entry: Ragged, mask: Tensor) -> Ragged:
    """The values that the mask selects, in their rows."""
    offsets = as_offsets(entry)
    before = offsets_from(mask.to(torch.int64))
    weights = None if entry.weights is None else entry.weights[mask]
    return Ragged(entry.values[mask], before[offsets], weights)


# Steps on columns with missing values: they run on the present values.
#
# The result for a sample of a column with missing values (`OptionalRagged`, `OptionalText`) must not depend
# on the other samples of its batch. So steps get the same as for a complete column: a tensor, or one string
# for each row. Their results are then put back into the rows that have a value.
#
# In floats NaN is a missing value. Ids have no such value, so a step from floats to ids omits the ids of NaN.


def present(entry: Entry) -> Entry:
    """The present values, in the form of a complete column; other entries as they are."""
    if isinstance(entry, OptionalRagged):
        return entry.values
    return entry.lists() if isinstance(entry, OptionalText) else entry


def restored(output: Entry, entry: Entry) -> Entry:
    """The result for the present values, in the rows of the entry that they are from."""
    if isinstance(entry, OptionalRagged):
        rows = as_offsets(entry)
    elif isinstance(entry, OptionalText):
        rows = entry.outer
    else:
        return output
    if isinstance(output, Tensor):
        if output.dim() == 1:
            return OptionalRagged(output, rows)
        return Ragged(output.reshape(-1), rows * output.shape[1])
    if isinstance(output, NestedRagged):
        return NestedRagged(output.values, output.inner, output.outer[rows])
    if is_text(output):
        return OptionalText(output.values, as_offsets(output), rows)
    kind = OptionalRagged if isinstance(output, OptionalRagged) else Ragged
    return kind(output.values, as_offsets(output)[rows], output.weights)


def without_nan(outputs: Sequence[Entry], entries: Sequence[Entry], certain: Sequence[bool]) -> list[Entry]:
    """The results for the values of the entries, without those for NaN; `certain`: which have none."""
    results = list(outputs)
    indices = [
        i for i, entry in enumerate(entries) if values_of(entry).is_floating_point() and not certain[i]
    ]
    if not indices:
        return results
    # One pass over the values, and one synchronization with a GPU. Sums of infinities may also be NaN.
    sums = torch.stack([values_of(entries[i]).detach().sum().to(torch.float32) for i in indices])
    for i, suspect in zip(indices, sums.isnan().tolist(), strict=True):
        if suspect:
            results[i] = _without(results[i], values_of(entries[i]).isnan())
    return results


def _without(output: Entry, missing: Tensor) -> Entry:
    if not bool(missing.any()):
        return output
    if isinstance(output, NestedRagged):
        lists = keep(output.lists(), ~missing)
        return NestedRagged(lists.values, as_offsets(lists), output.outer)
    if isinstance(output, Ragged):
        return keep(output, ~missing)
    if output.dim() == 1:
        return OptionalRagged(output[~missing], offsets_from((~missing).to(torch.int64)))
    raise ValueError(
        f"expected a number in each position of {describe(output)}, but received NaN, which has no id. "
        'Put fill_missing(…) before it to replace NaN by a number, or to_ragged(pad=float("nan")) to '
        "make lists without NaN."
    )


_WORTH_JOINING = 16_384
"""From this many values per entry, separate calls cost less than copying the entries into one tensor."""

Number = int | float

_NARROW = (torch.int32, torch.int16, torch.uint32, torch.uint16, torch.bool)

DERIVED = {"derived": True}
"""Metadata of a field that follows from the steps before: it does not belong to the description of a step."""


class ChainStep(ABC):
    """A step of a chain. Subclasses are frozen dataclasses; equal settings make equal steps."""

    name: ClassVar[str]
    """What the step is called in errors and plans: the method of `Feature` that adds it."""

    joins: ClassVar[bool] = False
    """Whether the step turns all entries of its chain into one; others work on each separately."""

    row_wise: ClassVar[bool] = True
    """Whether a row of the result depends on the same row of the entries alone."""

    sized_by_shapes: ClassVar[bool] = False
    """Whether the shapes of the entries alone say how large the result is: no GPU must be asked."""

    takes_missing: ClassVar[bool] = False
    """Whether the step sees which values are missing; others run on the present values."""

    takes_text: ClassVar[bool] = False
    """Whether the step is for strings: it then reads values of int8 as their bytes."""

    @abstractmethod
    def parts(self) -> Sequence[Op]:
        """The ops that it consists of; each turns an entry into one entry."""


class Op(ChainStep):
    """The base class of steps that turn their arguments into one entry.

    Subclasses are frozen dataclasses.

    Example:
        >>> from karvan.features import Op
        >>> class Length(Op):
        ...     name = "length"
        ...     def fuse_key(self, entry):
        ...         return ()
        ...     @classmethod
        ...     def run_group(cls, ops, arguments):
        ...         return [entry.lengths() for (entry,) in arguments]
        >>> engine = kv.FeatureEngine([kv.Feature("n").select("ids").then(Length())])
        >>> engine({"ids": kv.Ragged.from_lists([[1, 2], []])})["n"]
        tensor([2, 0])
    """

    def parts(self) -> Sequence[Op]:
        """Return the ops that it consists of: itself.

        Returns:
            One op.
        """
        return (self,)

    def check(self, *entries: Entry) -> None:
        """Raise if the entries are not what the step expects.

        Args:
            *entries: The arguments of the step.

        Raises:
            TypeError: An entry is of the wrong kind.
            ValueError: An entry has wrong values or shapes.
        """

    @abstractmethod
    def fuse_key(self, *entries: Entry) -> Hashable:
        """Return what must be equal for steps of this class to run as one call.

        Args:
            *entries: The arguments of the step.

        Returns:
            The key.
        """

    @classmethod
    @abstractmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """Run steps of equal keys at once.

        Args:
            ops: The steps.
            arguments: The entries of each step.

        Returns:
            The result of each step.
        """


class OpCall(NamedTuple):
    """One step of one feature with its arguments; the feature's name is for errors."""

    feature: str
    op: Op
    arguments: tuple[Entry, ...]


def run(jobs: Sequence[OpCall]) -> list[Entry]:
    """The result of each job, with as few calls as their settings and kinds of entries allow."""
    groups: dict[Hashable, list[int]] = {}
    original = [_accepted(job) for job in jobs]
    jobs = [_without_missing(job) for job in original]
    for i, (feature, op, arguments) in enumerate(jobs):
        try:
            op.check(*arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Feature '{feature}', {op.name}: {error}") from None
        groups.setdefault((type(op), op.fuse_key(*arguments)), []).append(i)
    results: list[Entry | None] = [None] * len(jobs)
    for members in groups.values():
        ops = [jobs[i].op for i in members]
        try:
            entries = type(ops[0]).run_group(ops, [jobs[i].arguments for i in members])
        except ValueError:  # one at a time, to name the feature with invalid values
            entries = [_run_alone(jobs[i]) for i in members]
        for i, entry in zip(members, entries, strict=True):
            results[i] = entry if jobs[i] is original[i] else restored(entry, original[i].arguments[0])
    return [entry for entry in results if entry is not None]


def _run_alone(job: OpCall) -> Entry:
    try:
        return job.op.run_group([job.op], [job.arguments])[0]
    except ValueError as error:
        raise ValueError(f"Feature '{job.feature}', {job.op.name}: {error}") from None


def _accepted(job: OpCall) -> OpCall:
    """Integers of 16 and 32 bits and booleans become int64, which loses nothing; 8 bits may be text."""
    arguments = tuple(
        with_values(entry, values_of(entry).to(torch.int64)) if values_of(entry).dtype in _NARROW else entry
        for entry in job.arguments
    )
    return job._replace(arguments=tuple(map(as_text, arguments)) if job.op.takes_text else arguments)


def _without_missing(job: OpCall) -> OpCall:
    if len(job.arguments) > 1 or job.op.takes_missing:
        return job
    values = present(job.arguments[0])
    return job if values is job.arguments[0] else job._replace(arguments=(values,))


class GroupElementOp(Op):
    """A step that works on each value separately, and does not change rows and weights."""

    def fuse_key(self, *entries: Entry) -> Hashable:
        """Return all settings that are not parameters."""
        values = values_of(entries[0])
        return (values.dtype, values.device, self.settings())

    def settings(self) -> Hashable:
        """What must be equal for ops to run together: all settings that are not parameters."""
        return self

    @classmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """Compute the values of all entries as one tensor, and split the result."""
        entries = [entry for (entry,) in arguments]
        flat = [flat_values(entry) for entry in entries]
        counts = [int(part.shape[0]) for part in flat]
        if len(flat) == 1 or sum(counts) > len(counts) * _WORTH_JOINING:
            parts = [
                cls.compute_group([op], part, [n]) for op, part, n in zip(ops, flat, counts, strict=True)
            ]
        else:
            parts = list(torch.split(cls.compute_group(ops, torch.cat(flat), counts), counts))
        return [with_values(entry, part) for entry, part in zip(entries, parts, strict=True)]

    @classmethod
    @abstractmethod
    def compute_group(cls, ops: Sequence[Self], values: Tensor, counts: Sequence[int]) -> Tensor:
        """New values of several ops, the first `counts[0]` of them for the first op, and so on."""


class ElementOp(GroupElementOp):
    """The base class of steps that compute each value by itself, with numbers as settings.

    Features with different numbers run together. Subclasses are frozen dataclasses.

    Example:
        >>> from dataclasses import dataclass
        >>> from karvan.features import ElementOp
        >>> @dataclass(frozen=True)
        ... class Scale(ElementOp):
        ...     factor: float
        ...     name = "scale"
        ...     def parameters(self, dtype):
        ...         return (self.factor,)
        ...     def compute(self, values, factor):
        ...         return values * factor
        >>> engine = kv.FeatureEngine([kv.Feature("x").then(Scale(2.0))])
        >>> engine({"x": torch.tensor([1.5])})["x"]
        tensor([3.])
    """

    def parameters(self, dtype: torch.dtype) -> tuple[Number, ...]:
        """Return the settings in which steps that run together may differ.

        Args:
            dtype: The type of the values.

        Returns:
            The numbers.
        """
        return ()

    @abstractmethod
    def compute(self, values: Tensor, *parameters: Tensor) -> Tensor:
        """Compute new values.

        Args:
            values: The values of all entries.
            *parameters: For each parameter a tensor, with one number for all values or one for each.

        Returns:
            As many values.
        """

    @classmethod
    def compute_group(cls, ops: Sequence[Self], values: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute the values of several steps, with their parameters as tensors.

        Args:
            ops: The steps.
            values: The values of all of them, one after the other.
            counts: How many values each step has.

        Returns:
            As many values.
        """
        parameters = [op.parameters(values.dtype) for op in ops]
        return ops[0].compute(values, *spread(parameters, counts, values))


class GroupRowOp(Op):
    """A step that works on each row separately, of one entry or, where it joins, of several."""

    def fuse_key(self, *entries: Entry) -> Hashable:
        """Return the settings and the kinds of the entries."""
        return (self, *map(kind_of, entries))

    @classmethod
    def run_group(cls, ops: Sequence[Self], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """Computes the rows of all entries as one entry, and splits the result.

        To split ragged rows on a GPU is to wait for it, so ops that need not wait run one after the other.
        """
        if len(ops) > 1 and cls.sized_by_shapes and kernels.on_gpu(values_of(arguments[0][0])):
            return [
                cls.run_joined([op], list(entries), [rows_of(entries[0])])
                for op, entries in zip(ops, arguments, strict=True)
            ]
        joined = [join_rows(entries) for entries in zip(*arguments, strict=True)]
        counts = [rows_of(entries[0]) for entries in arguments]
        return split_rows(cls.run_joined(ops, joined, counts), counts)

    @classmethod
    @abstractmethod
    def run_joined(cls, ops: Sequence[Self], joined: list[Entry], counts: list[int]) -> Entry:
        """New rows of several ops whose entries have been joined."""


class RowOp(GroupRowOp):
    """The base class of steps that compute each row by itself.

    Subclasses are frozen dataclasses.

    Example:
        >>> from dataclasses import dataclass
        >>> from karvan.features import RowOp
        >>> @dataclass(frozen=True)
        ... class First(RowOp):
        ...     name = "first"
        ...     def run_rows(self, entry):
        ...         return entry[:, 0]
        >>> engine = kv.FeatureEngine([kv.Feature("x").then(First())])
        >>> engine({"x": torch.tensor([[1, 2], [3, 4]])})["x"]
        tensor([1, 3])
    """

    @abstractmethod
    def run_rows(self, *entries: Entry) -> Entry:
        """Compute new rows.

        Args:
            *entries: The arguments of the step.

        Returns:
            An entry of as many rows.
        """

    @classmethod
    def run_joined(cls, ops: Sequence[Self], joined: list[Entry], counts: list[int]) -> Entry:
        """Compute new rows of several equal steps whose entries have been joined.

        Args:
            ops: The steps.
            joined: Their entries, joined.
            counts: How many rows each step has.

        Returns:
            An entry of as many rows.
        """
        return ops[0].run_rows(*joined)


EntryKind = TypeVar("EntryKind", bound=Ragged | NestedRagged)


def sole(kind: type[EntryKind], entries: tuple[Entry, ...]) -> EntryKind:
    """The only argument of a step, which `check` has found to be of this kind."""
    (entry,) = entries
    assert isinstance(entry, kind)
    return entry


def spread(settings: Sequence[tuple[Number, ...]], counts: Sequence[int], like: Tensor) -> list[Tensor]:
    """Parameters as tensors: of one entry where all ops agree, else of one for each value.

    Never plain numbers: on a GPU, torch divides by a number in another way than by a tensor, and a feature's
    result would depend on which features it runs with.
    """
    alike = all(setting == settings[0] for setting in settings)
    tensors = []
    for column in zip(*settings, strict=True):
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        dtype = torch.int64 if all(isinstance(number, int) for number in column) else wide
        constants = _constants(column[:1] if alike else column, dtype, like.device)
        tensors.append(constants if alike else repeated(constants, counts))
    return tensors


def repeated(numbers: Tensor, counts: Sequence[int]) -> Tensor:
    """Each number as often as its count says."""
    if kernels.on_gpu(numbers):  # a copy of the counts to a GPU would wait for it
        parts = zip(torch.split(numbers, 1), counts, strict=True)
        return torch.cat([number.expand(count) for number, count in parts])
    repeats = torch.tensor(counts, device=numbers.device)
    return torch.repeat_interleave(numbers, repeats, output_size=sum(counts))


@functools.lru_cache(maxsize=1024)
def _constants(numbers: tuple[Number, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Cached, since a copy to a GPU blocks. A tensor created in inference mode could not be used with
    # autograd.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def floats(values: Tensor) -> Tensor:
    """Values as float32, or as float64 if they have this type."""
    return values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float32)


def in_type_of(values: Tensor, result: Tensor) -> Tensor:
    """The result in the type of the values, if these are floats; otherwise as it is."""
    if result.dtype == values.dtype or not values.is_floating_point():
        return result
    return result.to(values.dtype)


def expect_numbers(entry: Entry) -> None:
    """Numbers of any type, not strings."""
    if is_text(entry):
        raise TypeError(f"expected numbers, but received {describe(entry)}.")


def expect_ids(entry: Entry) -> None:
    """Ids of int64."""
    if values_of(entry).dtype != torch.int64:
        raise TypeError(f"expected ids of torch.int64, but received {describe_for_ids(entry)}.")


def expect_text(entry: Entry) -> None:
    """Strings: a Ragged or NestedRagged of bytes."""
    if not is_text(entry):
        raise TypeError(f"expected strings (a Ragged of torch.uint8), but received {describe(entry)}.")
    check_rows(entry)
