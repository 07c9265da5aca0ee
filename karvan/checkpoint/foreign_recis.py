"""Checkpoints of RecIS: rows with their optimizer state, dense tensors, optimizer and step.

Files: those of its tables, and `model.pt` with the dense state dict, `extra.pt` with the step and the dense
optimizer. Positions of data (`io_state_*.pt`) have no meaning here.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.checkpoint.checkpoint import TABLE_STEPS
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError, quoted
from karvan.checkpoint.foreign_writing import (
    PIECE_BYTES,
    PIECE_ROWS,
    Advance,
    CodeInFileError,
    Contents,
    ForeignTable,
    ImportReport,
    Progress,
    check_new,
    check_step,
    make_rows,
    no_progress,
    read_dense,
    read_torch,
    state_floats,
    write,
)
from karvan.checkpoint.safetensors_file import FilePosition, read_header, unread_error
from karvan.job.checkpoint_url import plain_path
from karvan.store import Rows

# The files of a RecIS checkpoint: which tensors they hold, and where.
#
#     index                        JSON: "file_index", files by number; "block_index", the file of each tensor
#     tensorkey.json               JSON: a tensor's name in its file → the name that RecIS gives it
#     model-000000-of-000008.safetensors, …     the tensors, in files of the safetensors layout
#
# RecIS names a tensor of a table `TABLE@SLOT^BEGIN@END@SIZE`: the slot `id` has the ids, `embedding` the
# vectors, others the state of optimizers and filters, row by row in the same order. A rank saves the ids of
# its slice of SIZE, and in the file the name is `TABLE.SLOT/part_RANK_RANKS`. Tables that RecIS has merged
# are saved apart, under their own names and with their own ids. Tensors of sparse optimizers that belong to
# no row are named `NAME^ `.
#
# `index` appears last: without it the checkpoint is incomplete.


INDEX, NAMES, RUN = "index", "tensorkey.json", "checkpoint"
ID, VECTORS = "id", "embedding"
_TENSOR = re.compile(r"^(?P<table>[^@^]+)@(?P<slot>[^@^]+)\^(?P<begin>\d+)@(?P<end>\d+)@(?P<size>\d+)$")
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    position: FilePosition

    @property
    def rows(self) -> int:
        """Its first dimension."""
        return self.position.shape[0] if self.position.shape else 1

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Some rows, as they are stored; bfloat16 as uint16."""
        width = self.position.size // self.rows if self.rows else 0
        try:
            with self.path.open("rb") as file:
                file.seek(self.position.begin + begin * width)
                data = file.read((end - begin) * width)
        except OSError as error:
            raise unread_error(self.path, error) from error
        if len(data) != (end - begin) * width:
            raise DamagedCheckpointError.mismatch(self.path, f"{(end - begin) * width} bytes", len(data))
        array = np.frombuffer(data, _NUMPY[self.position.dtype])
        return array.reshape(end - begin, *self.position.shape[1:])


@dataclass
class RankPart:
    """The part of a table that one rank has saved: its slice, and the tensors of its slots."""

    begin: int
    end: int
    size: int
    slots: dict[str, StoredTensor] = field(default_factory=dict)


def find_folder(source: Path) -> Path:
    """The folder of a checkpoint: `source`, or the newest of an output_dir, which its `checkpoint` lists."""
    if (source / INDEX).is_file() or not (source / RUN).is_file():
        return source
    listed = [line.strip() for line in (source / RUN).read_text().splitlines() if line.strip()]
    if not listed:
        raise CheckpointError.mismatch(source / RUN, "the names of checkpoints", "none")
    if Path(listed[-1]).name != listed[-1]:
        raise CheckpointError.mismatch(source / RUN, "names of folders beside it", repr(listed[-1]))
    return source / listed[-1]


def read_files(folder: Path) -> tuple[dict[str, list[RankPart]], dict[str, StoredTensor]]:
    """The tensors of tables, by the slices of ranks, and of no table; every file's header is checked."""
    if not folder.is_dir():
        raise CheckpointError.mismatch(folder, "the folder of a RecIS checkpoint", "no such folder")
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            folder,
            f"expected a RecIS checkpoint, with the file '{INDEX}', which RecIS writes last, got none: it is "
            "incomplete, or not of RecIS.",
        )
    names = _names(folder / NAMES)
    index = _json(folder / INDEX)
    files, blocks = (_numbers(folder / INDEX, key, index.get(key)) for key in ("file_index", "block_index"))
    headers = {number: _header(folder, name) for name, number in files.items()}
    by_number = {number: name for name, number in files.items()}
    tables: dict[str, dict[int, RankPart]] = {}
    scalars: dict[str, StoredTensor] = {}
    for stored_name, number in blocks.items():
        if number not in headers or stored_name not in headers[number]:
            where = by_number.get(number, f"a file of the number {number}")
            raise DamagedCheckpointError.mismatch(folder, f"tensor '{stored_name}' in {where}", "none")
        tensor = StoredTensor(folder / by_number[number], headers[number][stored_name])
        if stored_name not in names and stored_name.endswith("^ "):
            scalars[stored_name.removesuffix("^ ")] = tensor
            continue
        name = names.get(stored_name) or stored_name
        match = _TENSOR.match(name)
        if match is None:
            raise CheckpointError.mismatch(
                folder / NAMES, "names like TABLE@SLOT^BEGIN@END@SIZE", f"'{name}' for '{stored_name}'"
            )
        begin, end, size = (int(match[part]) for part in ("begin", "end", "size"))
        part = tables.setdefault(match["table"], {}).setdefault(begin, RankPart(begin, end, size))
        if (part.end, part.size) != (end, size) or match["slot"] in part.slots:
            raise DamagedCheckpointError.mismatch(folder / NAMES, "one tensor of each slice", f"two '{name}'")
        part.slots[match["slot"]] = tensor
    ordered = {table: [parts[begin] for begin in sorted(parts)] for table, parts in sorted(tables.items())}
    for table, parts in ordered.items():
        _check_slices(folder, table, parts)
    return ordered, scalars


def _check_slices(folder: Path, table: str, parts: list[RankPart]) -> None:
    at = 0
    for part in parts:
        if part.begin != at or part.size != parts[0].size:
            break
        at = part.end
    if at != parts[0].size:
        raise DamagedCheckpointError.mismatch(
            folder,
            f"the parts of all ranks of table '{table}', up to slice {parts[0].size}",
            f"none that begins at slice {at}",
        )


def _numbers(path: Path, key: str, value: Any) -> dict[str, int]:
    """A part of the index: files, or tensors, and the numbers of files."""
    if not isinstance(value, dict) or not all(type(number) is int for number in value.values()):
        raise DamagedCheckpointError.mismatch(path, f"the numbers of files in '{key}'", repr(value)[:60])
    return value


def _names(path: Path) -> dict[str, str]:
    names = _json(path)
    for key, value in names.items():
        if not isinstance(value, str):
            raise DamagedCheckpointError.mismatch(path, "names as text", f"{value!r} for '{key}'")
    return names


def _header(folder: Path, name: str) -> Mapping[str, FilePosition]:
    if Path(name).name != name:
        raise DamagedCheckpointError.mismatch(
            folder / INDEX, "names of files in its folder", repr(name)
        )  # it may have been written by anyone
    if not (folder / name).is_file():
        raise DamagedCheckpointError.mismatch(folder, f"the file '{name}', which its index lists", "none")
    return read_header(folder / name)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise unread_error(path, error) from error
    except ValueError as error:
        raise DamagedCheckpointError.mismatch(path, "JSON", f"'{error}'") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError.mismatch(path, "an object of JSON", type(content).__name__)
    return content


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ADAMS = ("sparse_adam_", "sparse_adamw_", "sparse_adamw_tf_")
_BY_ROW = ("sparse_row_wise_adagrad_", "sparse_row_wise_adagrad_sum_")
# The slots of an optimizer in the order of Karvan's state, and the kind of that state.
_OPTIMIZERS: dict[tuple[str, ...], str] = {
    **{(f"{prefix}exp_avg", f"{prefix}exp_avg_sq"): "Adam" for prefix in _ADAMS},
    ("sparse_adagrad_state_sum",): "Adagrad",
    **{(f"{prefix}state_sum",): "Adagrad by row" for prefix in _BY_ROW},
}
_FILTER_STEPS = ("@filter_global_step", "._filter_hook_impl._global_step")  # buffers of filters of tables
_DENSE_OPTIMIZER = ("recis.dense.optim.", "dense_optimizer")  # the second is its former name
_MERGED_BITS = 52  # of an id that RecIS keeps in a table that it merges with others
_LEAST_POWER = 1e-30  # smaller powers of beta are too inexact to count steps


def import_recis(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    optimizer_state: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    dense_prefix: str = "",
    step: int | None = None,
    progress: Progress = no_progress,
) -> ImportReport:
    """Write a checkpoint of RecIS as a checkpoint of Karvan.

    Args:
        source: Its folder, or RecIS's output_dir for its newest one.
        target: A folder that does not exist yet, or a URL.
        optimizer_state: Whether to import that of rows, too. Otherwise it starts from its initial values.
        betas: The betas of the sparse Adam, by which its number of steps is found.
        dense_prefix: Comes before the names of dense tensors.
        step: The step of the checkpoint, if it is not the one that RecIS has saved.
        progress: Called with the bytes that were read since the last call, and with how many will be in all.

    Returns:
        What was imported.

    Raises:
        CheckpointError: The source cannot be read, or the target exists.

    Example:
        >>> def convert(source):
        ...     kv.checkpoint.import_recis(source, "imported", betas=(0.9, 0.99))
    """
    path = check_new(target)
    contents = read_recis(
        plain_path(source), optimizer_state=optimizer_state, betas=betas, dense_prefix=dense_prefix
    )
    if step is not None:
        contents.step = check_step(step)
    return write(contents, path, progress)


def read_recis(
    source: Path, *, optimizer_state: bool, betas: tuple[float, float], dense_prefix: str
) -> Contents:
    """The contents of a checkpoint of RecIS."""
    folder = find_folder(source)
    tables, scalars = read_files(folder)
    contents = RecisContents("RecIS", folder, 0)
    for name, parts in tables.items():
        contents.plans[name] = _plan(folder, name, parts, optimizer_state, contents.notes)
        contents.tables[name] = contents.plans[name].table
    _read_extra(folder, contents)
    read_dense(contents, "model.pt", dense_prefix, _FILTER_STEPS)
    if optimizer_state:
        _read_steps(scalars, contents, betas)
    return contents


@dataclass(frozen=True)
class _Plan:
    """How the rows of a table are made of its slots."""

    table: ForeignTable
    parts: Sequence[RankPart]
    state: tuple[str, ...]  # slots
    last_use: str | None  # the slot of a filter, which has the step of a row's last use

    @property
    def slots(self) -> list[str]:
        """All slots that are read."""
        return [ID, VECTORS, *self.state, *([self.last_use] if self.last_use else [])]


@dataclass
class RecisContents(Contents):
    """The contents of a checkpoint of RecIS."""

    plans: dict[str, _Plan] = field(default_factory=dict)

    @property
    @override
    def bytes(self) -> int:
        return sum(
            part.slots[slot].position.size
            for plan in self.plans.values()
            for part in plan.parts
            for slot in plan.slots
        )

    @override
    def rows(self, advance: Advance) -> Iterator[tuple[str, Rows]]:
        cut = []
        for name, plan in self.plans.items():
            largest = 0
            for part in plan.parts:
                for rows in self._rows(plan, part, advance):
                    largest = max(largest, int(rows.keys.view(np.uint64).max(initial=0)))
                    yield name, rows
            # Smaller ids were not cut: of many that were, some have one of the highest bits that are left.
            if 1 << (_MERGED_BITS - 4) <= largest < 1 << _MERGED_BITS:
                cut.append(name)
        if cut:
            self.notes.append(
                f"Ids of {quoted(cut)} seem to be cut to {_MERGED_BITS} bits, as RecIS does to merge "
                f"tables. Take the ids of data modulo 2^{_MERGED_BITS} before the model, or their rows "
                f"are not found: kv.Feature(…).mod(2**{_MERGED_BITS}), or RecIS's Mod(2**{_MERGED_BITS})."
            )

    def _rows(self, plan: _Plan, part: RankPart, advance: Advance) -> Iterator[Rows]:
        slots = {slot: part.slots[slot] for slot in plan.slots}
        count = slots[ID].rows
        width = sum(tensor.position.size for tensor in slots.values()) // max(1, count)
        piece = max(1, min(PIECE_ROWS, PIECE_BYTES // max(1, width)))
        for begin in range(0, count, piece):
            end = min(count, begin + piece)
            columns = [_floats(slots[slot], begin, end) for slot in plan.state]
            state = np.concatenate(columns, axis=1) if columns else np.empty((end - begin, 0), np.float32)
            if plan.last_use:
                last_steps = slots[plan.last_use].read(begin, end).reshape(-1).clip(0, 2**32 - 1)
            else:
                last_steps = np.full(end - begin, self.step)
            yield make_rows(
                slots[ID].read(begin, end).astype(np.int64),
                _floats(slots[VECTORS], begin, end),
                state,
                last_steps.astype(np.uint32),
            )
            advance(width * (end - begin))


def _plan(
    folder: Path, name: str, parts: Sequence[RankPart], optimizer_state: bool, notes: list[str]
) -> _Plan:
    """How a table is imported, by its slots, which all ranks must have saved alike."""
    first = {slot: (t.position.dtype, t.position.shape[1:]) for slot, t in parts[0].slots.items()}
    for part in parts:
        its = {slot: (t.position.dtype, t.position.shape[1:]) for slot, t in part.slots.items()}
        if its != first:
            raise DamagedCheckpointError.mismatch(
                folder,
                f"table '{name}' with the slots {quoted(first)} on all ranks",
                f"{quoted(its)} of the slice from {part.begin} on",
            )
        counts = {slot: tensor.rows for slot, tensor in part.slots.items()}
        if len(set(counts.values())) > 1:
            raise DamagedCheckpointError.mismatch(folder, f"equally many rows of table '{name}'", counts)
    for slot in (ID, VECTORS):
        if slot not in first:
            raise CheckpointError.mismatch(folder, f"table '{name}' with a slot '{slot}'", quoted(first))
    if first[ID] != ("I64", ()):
        raise CheckpointError.mismatch(folder, f"ids of int64 in table '{name}'", first[ID])
    dtype, shape = first[VECTORS]
    if dtype not in _DTYPES or len(shape) != 1 or shape[0] < 1:
        raise CheckpointError.mismatch(
            folder,
            f"table '{name}' with vectors of float32, float16 or bfloat16",
            f"{dtype} of shape {list(shape)} for each row",
        )
    dim = shape[0]
    rest = {slot: form for slot, form in first.items() if slot not in (ID, VECTORS)}
    filters = [slot for slot, form in rest.items() if form == ("I64", (1,))]
    last_use = filters[0] if len(filters) == 1 else None
    optimizers = [slots for slots in _OPTIMIZERS if set(slots) <= rest.keys()] if optimizer_state else []
    if len(optimizers) > 1:
        several = quoted(slot for optimizer in optimizers for slot in optimizer)
        raise CheckpointError(
            folder,
            f"table '{name}' has the state of several optimizers, {several}: expected the state of one. "
            "Import it without optimizer state.",
        )
    slots = optimizers[0] if optimizers else ()
    kind = _OPTIMIZERS[slots] if slots else None
    width = 1 if kind == "Adagrad by row" else dim
    for slot in slots:
        if rest[slot][0] not in _DTYPES or rest[slot][1] != (width,):
            raise CheckpointError.mismatch(
                folder, f"slot '{slot}' of table '{name}' with {width} floats a row", rest[slot]
            )
    if others := [slot for slot in rest if slot not in slots and slot != last_use]:
        notes.append(f"Table '{name}': {quoted(others)} not imported; it starts from its initial values.")
    rows = sum(part.slots[ID].rows for part in parts)
    table = ForeignTable(name, dim, _DTYPES[dtype], kind, state_floats(kind, dim), rows)
    return _Plan(table, parts, slots, last_use)


def _floats(tensor: StoredTensor, begin: int, end: int) -> NDArray[np.float32]:
    """Rows of floats as float32, which has all values of shorter types."""
    array = tensor.read(begin, end)
    if tensor.position.dtype == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def _read_extra(folder: Path, contents: Contents) -> None:
    """The step, and the state of the dense optimizer."""
    path = folder / "extra.pt"
    if not path.is_file():
        contents.notes.append(
            "There is no extra.pt: the step is 0, the dense optimizer's state is not imported."
        )
        return
    try:
        extra = read_torch(path)
    except CodeInFileError:
        contents.notes.append(
            "extra.pt has objects of RecIS's code, which does not run here, and was not read: the step is 0 "
            "unless it is given, and the dense optimizer's state is not imported."
        )
        return
    contents.step = _whole(path, extra.get("global_step", 0))
    saved = next((extra[name] for name in _DENSE_OPTIMIZER if name in extra), None)
    if saved is None:
        contents.notes.append("extra.pt has no dense optimizer: its state is not imported.")
    else:
        contents.state["dense_optimizer"] = _by_index(path, saved)


def _whole(path: Path, value: Any) -> int:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**32:
        raise CheckpointError.mismatch(path, "a global_step of at least 0", repr(value))
    return number


def _by_index(path: Path, saved: Any) -> dict[str, Any]:
    """The state dict of an optimizer, whose parameters are numbered as torch does; RecIS may name them."""
    match saved:
        case {"state": Mapping() as state, "param_groups": [*groups]} if all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
        ):
            order = [param for group in groups for param in group["params"]]
            number = {param: index for index, param in enumerate(order)}
            if set(state) <= set(number):
                return {
                    "state": {number[param]: dict(entry) for param, entry in state.items()},
                    "param_groups": [
                        {**group, "params": [number[param] for param in group["params"]]} for group in groups
                    ],
                }
    raise CheckpointError.mismatch(path, "the state dict of a torch optimizer", type(saved).__name__)


def _read_steps(scalars: Mapping[str, StoredTensor], contents: Contents, betas: tuple[float, float]) -> None:
    """How many steps the sparse Adam has made, by the powers of its betas.

    RecIS saves those of one table. The step that it saves beside them is not counted.
    """
    adams = [name for name, table in contents.tables.items() if table.optimizer == "Adam"]
    if not adams:
        return
    for prefix in _ADAMS:
        powers = [scalars[name] for number in (1, 2) if (name := f"{prefix}beta{number}") in scalars]
        if len(powers) < 2:
            continue
        values = [_scalar(contents.source, tensor) for tensor in powers]
        steps = _steps(values, betas)
        if steps is None:
            raise CheckpointError(
                contents.source,
                f"expected the powers of Adam's betas {betas[0]:g} and {betas[1]:g} after some steps, got "
                f"{values[0]:g} and {values[1]:g}: give the betas of the optimizer, or import without "
                "optimizer state.",
            )
        contents.state[TABLE_STEPS] = dict.fromkeys(adams, steps)
        return
    contents.notes.append(
        "The number of Adam's steps is not saved: it starts from 0, beside the saved moments."
    )


def _scalar(folder: Path, tensor: StoredTensor) -> float:
    shape, dtype = tensor.position.shape, tensor.position.dtype
    if math.prod(shape) != 1 or dtype not in ("F64", "F32"):
        raise CheckpointError.mismatch(folder, "a number of the optimizer", f"{dtype} of shape {list(shape)}")
    return float(tensor.read(0, 1).reshape(-1)[0])


def _steps(powers: Sequence[float], betas: tuple[float, float]) -> int | None:
    """How many steps have these powers; None if there is no such number."""
    counts = [
        math.log(power) / math.log(beta)
        for power, beta in zip(powers, betas, strict=True)
        if _LEAST_POWER < power <= 1 and 0 < beta < 1
    ]
    if not counts:
        tiny = all(0 <= power <= _LEAST_POWER for power in powers)
        return 10**6 if tiny else None  # from here on nothing is corrected any more
    steps = round(counts[0])
    # Products of many float32 drift from the power.
    if any(abs(count - steps) > 0.01 + 0.001 * count for count in counts):
        return None
    return steps
