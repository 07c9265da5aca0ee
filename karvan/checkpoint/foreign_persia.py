"""Checkpoints of PERSIA: rows with their optimizer state, and the dense net.

    embedding_dump_done          YAML: num_shards, num_internal_shards; written last
    s0/embedding_dump_done       the same for each embedding parameter server
    s0/replica_0_shard_0.emb, …  its rows
    dense.pt                     the state dict of the net, if `dump_checkpoint` has saved it

PERSIA saves neither a step nor the number of Adam's steps nor the state of the dense optimizer.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from typing_extensions import override

from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.foreign_writing import (
    PIECE_BYTES,
    Advance,
    Contents,
    ForeignTable,
    ImportReport,
    Progress,
    check_new,
    check_step,
    make_rows,
    no_progress,
    read_dense,
    state_floats,
    write,
)
from karvan.checkpoint.safetensors_file import unread_error
from karvan.job.checkpoint_url import plain_path
from karvan.settings import SettingsError, read_tree
from karvan.store import Rows

# `embedding_config.yml` of PERSIA: which table an id in a checkpoint belongs to, and its id there.
#
# PERSIA has one space of ids for all features. An id is taken modulo 2^(64 - bits) - 1, and the number of its
# feature group, counted from 1, is put into its upper `feature_index_prefix_bit` bits. Groups are numbered in
# the order of `feature_groups`, then come the slots without a group, each a group of its own.


_SLOTS = ("slots_config", "slot_configs", "slot_config")  # by the age of the file


@dataclass(frozen=True)
class Groups:
    """The groups in the order of their numbers, each with the dim of its rows."""

    path: Path
    bits: int
    dims: dict[str, int]

    def numbers_of(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The index of each id's group; below 0 or too large if it belongs to none."""
        return (ids >> np.uint64(64 - self.bits)).astype(np.int64) - 1

    def keys_of(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The ids without their groups."""
        return (ids & np.uint64((1 << (64 - self.bits)) - 1)).view(np.int64)


def read_groups(path: Path) -> Groups:
    """The groups of an embedding configuration; a SettingsError says what is wrong with it."""
    if not path.is_file():
        raise SettingsError(f"Expected PERSIA's embedding_config.yml at {path}, which does not exist.")
    content = read_tree(path)
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must be a mapping with slots_config, got {content!r}.")
    slots = next((content[name] for name in _SLOTS if name in content), None)
    if not isinstance(slots, dict) or not slots:
        raise SettingsError(f"{path}: expected slots_config with slots, got {slots!r}.")
    bits = content.get("feature_index_prefix_bit", 8)
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 63:
        raise SettingsError(f"{path}: expected feature_index_prefix_bit from 1 to 63, got {bits!r}.")
    groups = content.get("feature_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, list) for group in groups.values()):
        raise SettingsError(f"{path}: expected feature_groups as lists of slots by group, got {groups!r}.")
    members = {str(group): [str(slot) for slot in slots_] for group, slots_ in groups.items() if slots_}
    grouped = {slot for slots_ in members.values() for slot in slots_}
    for slot in slots:
        if str(slot) not in grouped:
            if str(slot) in members:
                raise SettingsError(f"{path}: '{slot}' is both a slot and a feature group.")
            members[str(slot)] = [str(slot)]
    if len(members) >= 1 << bits:
        raise SettingsError(
            f"{path} has {len(members)} feature groups, but feature_index_prefix_bit {bits} tells only "
            f"{(1 << bits) - 1} apart: PERSIA has mixed their ids."
        )
    entries = {str(slot): entry for slot, entry in slots.items()}
    return Groups(
        path, bits, {group: _dim(path, entries, group, slots_) for group, slots_ in members.items()}
    )


def _dim(path: Path, slots: dict[str, Any], group: str, members: list[str]) -> int:
    dims = set()
    for slot in members:
        entry = slots.get(slot)
        dim = entry.get("dim") if isinstance(entry, dict) else None
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise SettingsError(f"{path}: expected slot '{slot}' with a dim of at least 1, got {entry!r}.")
        dims.add(dim)
    if len(dims) > 1:
        raise SettingsError(f"{path}: the slots of group '{group}' share rows, but have dims {sorted(dims)}.")
    return int(dims.pop())


# The rows in a file of PERSIA, `replica_0_shard_0.emb`: a linked list in an array.
#
# All numbers are little-endian. The list:
#
#  count u64, first u32, last u32, free u32, end u32      how many entries, and links
#  nodes u32                                              how many nodes follow, as many as may ever be used
#
# A node, of 9 bytes if it is free:
#
#     next u32, previous u32, used u8
#     floats u32, floats x f32, dim u64, id u64              if used is 1
#
# The first `dim` floats are the vector, the others optimizer state. The links are the order of use, which has
# no meaning here: nodes are read in the order of the file.


_LIST = struct.Struct("<QIIIII")
_FREE = 9  # bytes of a free node
_MOST_FLOATS = 1 << 20  # of an entry; more is a sign of damage
_RUN = 16  # nodes of one kind in a row, from which on they are found together

Entries = NDArray[Any]  # with the fields of `_entry`


def read_entries(path: Path, advance: Advance, piece: int = PIECE_BYTES) -> Iterator[Entries]:
    """The entries of a file in pieces; those of a piece have equally many floats."""
    remaining = _head(path)[-1]
    advance(_LIST.size)
    try:
        with path.open("rb") as file:
            file.seek(_LIST.size)
            rest = b""
            while remaining:
                data = file.read(piece)
                if not data:
                    raise DamagedCheckpointError.mismatch(
                        path, f"{remaining:,} more nodes", "the end of the file"
                    )
                advance(len(data))
                rest += data
                offsets, used, nodes = _scan(path, rest, remaining)
                remaining -= nodes
                buffer = np.frombuffer(rest, np.uint8)
                for floats, at in offsets.items():
                    yield _take(buffer, np.array(at, np.int64), floats)
                rest = rest[used:]
            if rest or file.read(1):
                raise DamagedCheckpointError.mismatch(
                    path, "the end of the file after its nodes", "more bytes"
                )
    except OSError as error:
        raise unread_error(path, error) from error


def _head(path: Path) -> tuple[int, ...]:
    """How many entries the list says that it has, its links, and how many nodes follow."""
    try:
        with path.open("rb") as file:
            head = file.read(_LIST.size)
    except OSError as error:
        raise unread_error(path, error) from error
    if len(head) < _LIST.size:
        raise DamagedCheckpointError.mismatch(path, "the head of a list", "the end of the file")
    return _LIST.unpack(head)


def _scan(path: Path, data: bytes, remaining: int) -> tuple[dict[int, list[int]], int, int]:
    """The offsets of whole used nodes by their number of floats, the bytes of all whole nodes, their number.

    Lengths vary, so that a node's place depends on all before it. Nodes mostly come in runs of one length:
    after a run, as many of the same length are tried at once.
    """
    offsets: dict[int, list[int]] = {}
    at = nodes = run = 0
    last = -1  # the number of floats of the last node; -1 for a free one
    size = len(data)
    while nodes < remaining and at + _FREE <= size:
        used = data[at + 8]
        if used > 1:
            raise DamagedCheckpointError.mismatch(path, "a node that is used or free (1 or 0)", used)
        floats = -1
        if used:
            if at + _FREE + 4 > size:
                break
            floats = int.from_bytes(data[at + 9 : at + 13], "little")
            if not 0 < floats <= _MOST_FLOATS:
                raise DamagedCheckpointError.mismatch(path, "an entry with floats", f"{floats:,} of them")
        length = _FREE if floats < 0 else 29 + 4 * floats
        if at + length > size:
            break
        run = run + 1 if floats == last else 1
        last = floats
        count = 1
        if run >= _RUN:
            most = min(remaining - nodes, (size - at) // length, 4 * run)
            count = _same(data, at, length, most, floats)
            run += count - 1
        if floats > 0:
            offsets.setdefault(floats, []).extend(range(at, at + count * length, length))
        at += count * length
        nodes += count
    return offsets, at, nodes


def _same(data: bytes, at: int, length: int, most: int, floats: int) -> int:
    """How many nodes from `at` on have this length, at most so many; at least one."""
    used = np.ndarray((most,), np.uint8, data, at + 8, (length,))
    same = used == (floats > 0)
    if floats > 0:
        counts = np.ndarray((most, 4), np.uint8, data, at + 9, (length, 1))
        same &= (counts == np.frombuffer(struct.pack("<I", floats), np.uint8)).all(axis=1)
    return most if same.all() else int(same.argmin())


def _take(buffer: NDArray[np.uint8], offsets: NDArray[np.int64], floats: int) -> Entries:
    layout = _entry(floats)
    return sliding_window_view(buffer, layout.itemsize)[offsets].view(layout).reshape(-1)


def _entry(floats: int) -> np.dtype[np.void]:
    """A used node."""
    head = [("next", "<u4"), ("previous", "<u4"), ("used", "u1"), ("floats", "<u4")]
    return np.dtype([*head, ("values", "<f4", (floats,)), ("dim", "<u8"), ("id", "<u8")])


DONE = "embedding_dump_done"
OPTIMIZERS = {"adam": "Adam", "adagrad": "Adagrad", "adagrad_by_row": "Adagrad by row"}
_OLD_FILE = re.compile(r"^\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d_\d+_\d+\.emb$")


def import_persia(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    embedding_config: str | os.PathLike[str],
    *,
    optimizer: str | None = None,
    optimizer_state: bool = True,
    dense_prefix: str = "net.",
    step: int = 0,
    progress: Progress = no_progress,
) -> ImportReport:
    """Write a checkpoint of PERSIA as a checkpoint of Karvan, with a table for each feature group.

    Rows are read twice: once to count and to check them, before anything is written.

    Args:
        source: The folder of `dump_checkpoint` or `dump_embedding`.
        target: A folder that does not exist yet, or a URL.
        embedding_config: The embedding_config.yml of the job, without which ids have no meaning.
        optimizer: "adam", "adagrad" or "adagrad_by_row" (vectorwise_shared); by default the one with state of
            the size of the rows'.
        optimizer_state: Whether to import it. Otherwise it starts from its initial values.
        dense_prefix: Comes before the names of dense tensors; the adapter's model has the net as `net`.
        step: The step of the checkpoint, which PERSIA does not save.
        progress: Called with the bytes that were read since the last call, and with how many will be in all.

    Returns:
        What was imported.

    Raises:
        ValueError: The optimizer is unknown.
        CheckpointError: The source cannot be read, or the target exists.

    Example:
        >>> def convert(source):
        ...     kv.checkpoint.import_persia(
        ...         source, "imported", "config/embedding_config.yml"
        ...     )
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer expects one of {', '.join(OPTIMIZERS)}, got '{optimizer}'.")
    path = check_new(target)
    folder = plain_path(source)
    contents = PersiaContents(
        "PERSIA", folder, check_step(step), groups=read_groups(plain_path(embedding_config))
    )
    contents.files = _files(folder)
    total = 2 * contents.bytes
    kind = OPTIMIZERS[optimizer] if optimizer else None
    contents.check(kind, optimizer_state, lambda size: progress(size, total))
    if read_dense(contents, "dense.pt", dense_prefix):
        contents.notes.append("PERSIA does not save the state of the dense optimizer.")
    return write(contents, path, lambda done, _: progress(done, total))


@dataclass
class PersiaContents(Contents):
    """The contents of a checkpoint of PERSIA."""

    groups: Groups = field(kw_only=True)
    files: list[Path] = field(default_factory=list)

    @property
    @override
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def check(self, optimizer: str | None, optimizer_state: bool, advance: Advance) -> None:
        """Read all rows, and find out what the tables are: their numbers of rows, and the optimizer."""
        counts = dict.fromkeys(self.groups.dims, 0)
        sizes: dict[str, int] = {}
        for path in self.files:
            count = 0
            for name, entries in self._by_table(path, advance):
                size = entries["values"].shape[1] - self.groups.dims[name]
                if sizes.setdefault(name, size) != size and optimizer_state:
                    raise CheckpointError.mismatch(
                        path,
                        f"rows of '{name}' with {sizes[name]} floats of optimizer state",
                        f"{size}; import them without optimizer state",
                    )
                counts[name] += len(entries)
                count += len(entries)
            if count != (expected := _head(path)[0]):
                self.notes.append(
                    f"{path.name} says that it has {expected:,} rows, and has {count:,}: all of them were "
                    "imported. PERSIA also counts rows that its evictions have overwritten."
                )
        kind = self._kind(optimizer, sizes) if optimizer_state else None
        for name, dim in self.groups.dims.items():
            state = state_floats(kind, dim)
            self.tables[name] = ForeignTable(name, dim, "float32", kind, state, counts[name])
        if kind is None and any(sizes.values()):
            self.notes.append(
                "The optimizer state of rows was not imported: it starts from its initial values."
            )
        if kind == "Adam":
            self.notes.append("PERSIA does not save the number of Adam's steps: it starts from 0, as there.")
        most = (1 << (64 - self.groups.bits)) - 1
        self.notes.append(
            f"PERSIA takes ids modulo {most}: the row of an id of at least that is under the remainder here."
        )

    def _kind(self, requested: str | None, sizes: dict[str, int]) -> str | None:
        """The kind of optimizer whose state has these sizes in all tables; None if there is no state."""
        if requested is None and not any(sizes.values()):
            return None
        fits = [
            kind
            for kind in OPTIMIZERS.values()
            if all(size == state_floats(kind, self.groups.dims[name]) for name, size in sizes.items())
        ]
        shown = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
        if requested is not None:
            if requested not in fits:
                raise CheckpointError.mismatch(
                    self.source, f"rows with the state of {requested}", f"floats of state by table: {shown}"
                )
            return requested
        if not fits:
            raise CheckpointError(
                self.source,
                "expected rows with the state of Adam (2 dim floats), Adagrad (dim) or Adagrad by row (1), "
                f"got floats of state by table: {shown}. Import them without optimizer state.",
            )
        if len(fits) > 1:
            raise CheckpointError(
                self.source,
                f"the state of its rows fits {' and '.join(fits)} equally well where the dim is 1: say "
                "which optimizer it is.",
            )
        return fits[0]

    @override
    def rows(self, advance: Advance) -> Iterator[tuple[str, Rows]]:
        for path in self.files:
            for name, entries in self._by_table(path, advance):
                table, values = self.tables[name], entries["values"]
                state = values[:, table.dim : table.dim + table.state]
                steps = np.full(len(entries), self.step, np.uint32)
                yield (
                    name,
                    make_rows(self.groups.keys_of(entries["id"]), values[:, : table.dim], state, steps),
                )

    def _by_table(self, path: Path, advance: Advance) -> Iterator[tuple[str, Entries]]:
        """The entries of a file, each piece of one table."""
        names = list(self.groups.dims)
        for entries in read_entries(path, advance):
            numbers = self.groups.numbers_of(entries["id"])
            for number in np.unique(numbers).tolist():
                mine = entries[numbers == number]
                if not 0 <= number < len(names):
                    raise CheckpointError(
                        path,
                        f"expected ids of the {len(names)} feature groups of {self.groups.path}, got the "
                        f"id {mine['id'][0]} with the prefix {number + 1}: is it the embedding_config.yml "
                        "of this checkpoint?",
                    )
                dim = self.groups.dims[names[number]]
                if (wrong := mine["dim"] != dim).any() or mine["values"].shape[1] < dim:
                    received = mine["dim"][wrong][0] if wrong.any() else mine["values"].shape[1]
                    raise CheckpointError.mismatch(
                        path, f"rows of '{names[number]}' of dim {dim}, as {self.groups.path} says", received
                    )
                yield names[number], mine


def _files(folder: Path) -> list[Path]:
    """The files with rows of all servers, after a check that all are there."""
    if not folder.is_dir():
        raise CheckpointError.mismatch(folder, "the folder of a PERSIA checkpoint", "no such folder")
    servers, _ = _done(folder)
    dumps: list[Path] = []
    for server in range(servers):
        place = folder / f"s{server}"
        if not place.is_dir():
            raise DamagedCheckpointError.mismatch(
                folder, f"the folders of {servers} servers, s0 to s{servers - 1}", f"no {place.name}"
            )
        count, shards = _done(place)
        if count != servers:
            raise DamagedCheckpointError.mismatch(place / DONE, f"num_shards {servers}", count)
        files = [place / f"replica_{server}_shard_{shard}.emb" for shard in range(shards)]
        if missing := [path for path in files if not path.is_file()]:
            raise DamagedCheckpointError.mismatch(
                place, f"{shards} files replica_{server}_shard_*.emb", f"no {missing[0].name}"
            )
        if others := sorted(set(place.glob("*.emb")) - set(files)):
            raise CheckpointError.mismatch(place, f"{shards} files of rows", f"also {others[0].name}")
        dumps += files
    return dumps


def _done(folder: Path) -> tuple[int, int]:
    """The numbers of servers and of files of each, which PERSIA writes when all is saved."""
    path = folder / DONE
    if not path.is_file():
        raise CheckpointError(
            folder,
            f"expected a PERSIA checkpoint, with the file '{DONE}', which PERSIA writes last, got none: it "
            "is incomplete, or not of PERSIA.",
        )
    try:
        content: Any = read_tree(path)
    except SettingsError as error:
        raise DamagedCheckpointError(path, str(error)) from error
    if content is None:
        old = next((file.name for file in folder.glob("**/*.emb") if _OLD_FILE.match(file.name)), None)
        raise CheckpointError(
            path,
            "expected num_shards and num_internal_shards, got an empty file: an early version of PERSIA "
            f"wrote it{f', and {old}' if old else ''}. Karvan does not read files of that version. Load "
            "them with a version of PERSIA that writes these numbers, and save again.",
        )
    keys = ("num_shards", "num_internal_shards")
    counts: list[Any] = [content.get(key) if isinstance(content, dict) else None for key in keys]
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise DamagedCheckpointError.mismatch(
            path, "num_shards and num_internal_shards of at least 1", repr(content)
        )
    return int(counts[0]), int(counts[1])
