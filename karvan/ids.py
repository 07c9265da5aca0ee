"""Ids from strings and ids from ids: the hashes and the arithmetic that other recommendation systems use.

An id is a 64-bit pattern. torch has no unsigned 64-bit arithmetic, so ids are int64 tensors, and every
function here reads them as unsigned: -1 is 2**64 - 1. The results equal those of the named systems, bit for
bit, because a trained row can only be found under the id it was trained with. Tensors on a GPU are computed
there.
"""

from __future__ import annotations

from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from karvan import kernels
from karvan.argument_checks import check_integers, is_integer, publish
from karvan.native import _native

__all__ = [
    "farm",
    "murmur",
    "hash_strings",
    "HASHES",
    "bucket",
    "mod",
    "prefix",
    "hash_stack",
]

# Not Sequence: a str is one as well, and would be hashed letter by letter.
Strings = list[bytes] | list[str] | tuple[bytes | str, ...]


class ByteRagged(Protocol):
    """Strings as one tensor of bytes, uint8 or int8, and the int64 offsets of its rows."""

    @property
    def values(self) -> Tensor:
        """All bytes, one row after the other."""

    @property
    def offsets(self) -> Tensor | None:
        """The start of each row, then the end of the last; None for one byte per row."""


@overload
def farm(data: bytes | str) -> int: ...
@overload
def farm(data: Strings | ByteRagged) -> Tensor: ...
def farm(data: bytes | str | Strings | ByteRagged) -> int | Tensor:
    """Hash strings by FarmHash Fingerprint64, as RecIS `Hash("farm")`.

    Text is hashed as UTF-8. Pass the result through `bucket` where ids must not be negative.

    Args:
        data: A string; or several as a list, a numpy array, a Series or an Arrow array of text or bytes; or
            bytes with offsets, such as a `Ragged` of uint8.

    Returns:
        An int for one string, an int64 tensor for several.

    Example:
        >>> kv.ids.farm(["user-7", "user-8"]).shape
        torch.Size([2])
        >>> kv.ids.farm("user-7") == kv.ids.farm(["user-7"]).item()
        True
    """
    if isinstance(data, bytes | str):
        return _native.farm64(_encode(data))
    return _hash_rows("farm", data, None)


@overload
def murmur(data: bytes | str) -> int: ...
@overload
def murmur(data: Strings | ByteRagged) -> Tensor: ...
def murmur(data: bytes | str | Strings | ByteRagged) -> int | Tensor:
    """Hash strings by MurmurHash64A with seed 0, as RecIS `Hash("murmur")`.

    Args:
        data: One string or several, as of `farm`.

    Returns:
        An int for one string, an int64 tensor for several.

    Example:
        >>> kv.ids.murmur(["user-7", "user-8"]).dtype
        torch.int64
    """
    if isinstance(data, bytes | str):
        return _native.murmur64a(_encode(data), 0)
    return _hash_rows("murmur", data, None)


HASHES = ("farm", "murmur", "farm63", "murmur63")
"""Names of hashes: all 64 bits, or without the sign bit, as RecIS has ids that it hashes while reading."""


def hash_strings(data: Strings | ByteRagged, kind: str, size: int | None = None) -> Tensor:
    """Hash strings by a hash of `HASHES`.

    `kv.data.Varlen` and `kv.Feature.hash` give a string the same id.

    Args:
        data: Several strings, as of `farm`.
        kind: "farm" or "murmur"; "farm63" and "murmur63" drop the sign bit.
        size: Ids are below this; 0 drops the sign bit only.

    Returns:
        The ids.

    Raises:
        ValueError: The kind is unknown, or may have no buckets.

    Example:
        >>> ids = kv.ids.hash_strings(["berlin", "rome"], "farm", size=100)
        >>> bool((ids < 100).all())
        True
    """
    check_hash(kind, size)
    if kind.endswith("63"):
        size = 0
    return _hash_rows(kind.removesuffix("63"), data, size)


def check_hash(kind: str, size: int | None) -> None:
    """Raise a ValueError unless `kind` is one of `HASHES` and may have buckets of this size."""
    if kind not in HASHES:
        raise ValueError(f"hash expects one of {', '.join(map(repr, HASHES))}, but received {kind!r}.")
    if size is not None and size < 0:
        raise ValueError(f"hash expects a bucket of 0 or more, but received {size}.")
    if size is not None and kind.endswith("63"):
        raise ValueError(f"hash expects a bucket for {kind[:-2]!r}, but received one for {kind!r}.")


def bucket(hashes: Tensor, size: int = 0) -> Tensor:
    """Make non-negative ids of hashes, as RecIS does while reading.

    Args:
        hashes: The hashes.
        size: Ids are below this. 0 drops the sign bit, which makes "farm63" of "farm".

    Returns:
        The ids.

    Raises:
        ValueError: `size` is negative.

    Example:
        >>> kv.ids.bucket(torch.tensor([-1, 12]), 10)
        tensor([5, 2])
    """
    if size < 0:
        raise ValueError(f"A bucket size must be 0 (no buckets) or positive, but is {size}.")
    return mod(hashes, size) if size else _ids(hashes) & 0x7FFF_FFFF_FFFF_FFFF


def mod(ids: Tensor, modulus: int | Tensor) -> Tensor:
    """Compute the remainder of ids, which are read as unsigned.

    Args:
        ids: The ids.
        modulus: What they are divided by; a tensor has one for each id, and is not checked.

    Returns:
        The remainders.

    Example:
        >>> kv.ids.mod(torch.tensor([-1, 12]), 10)  # -1 is 2**64 - 1
        tensor([5, 2])
    """
    if not isinstance(modulus, Tensor):
        _check_modulus(modulus)
    if kernels.on_gpu(_ids(ids)):
        from karvan.kernels.ids import remainders

        return remainders(ids, modulus)
    # Most ids are not negative. On other devices this test alone would wait for all queued work.
    if ids.is_cpu and (not ids.numel() or int(ids.amin()) >= 0):
        return ids % modulus
    # Halved, an id fits into the 63 bits of a positive int64; doubling its remainder and adding the lost bit
    # gives the remainder of the full id.
    lost = ids & 1
    half = ((ids >> 1) & 0x7FFF_FFFF_FFFF_FFFF) % modulus
    room = modulus - half
    # half - room is 2 * half - modulus, without the overflow.
    return torch.where(half + lost >= room, half - room, half + half) + lost


def prefix(ids: Tensor, group: int, bits: int) -> Tensor:
    """Put the number of a feature group into the upper bits of ids.

    This is PERSIA's `feature_index_prefix_bit`. Features of one group share rows, others never do. The upper
    bits hold group + 1, the lower ones the id modulo 2**(64 - bits) - 1.

    Args:
        ids: The ids.
        group: The number of the group, from 0.
        bits: How many bits it takes.

    Returns:
        The new ids.

    Raises:
        ValueError: The group needs more bits.

    Example:
        >>> kv.ids.prefix(torch.tensor([7]), group=0, bits=8) == 7 + (1 << 56)
        tensor([True])
    """
    if not 1 <= bits <= 63:
        raise ValueError(f"A prefix must have from 1 to 63 bits, but has {bits}.")
    if not 0 <= group < (1 << bits) - 1:
        raise ValueError(
            f"A prefix of {bits} bits has room for groups 0 to {(1 << bits) - 2}, but group is {group}."
        )
    upper = (group + 1) << (64 - bits)
    return mod(ids, (1 << (64 - bits)) - 1) + (upper - (1 << 64) if upper >> 63 else upper)


def check_hash_stack(rounds: int, size: int) -> None:
    """Raise a ValueError unless ids can be hashed in so many rounds to so many rows each."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, but is {rounds}.")
    if not 1 <= size <= ((1 << 63) - 1) // rounds:
        raise ValueError(
            f"size must be at least 1 and rounds * size below 2^63, "
            f"but size is {size} and rounds is {rounds}."
        )


def hash_stack(ids: Tensor, rounds: int, size: int) -> Tensor:
    """Compute the rows that together represent each id in a table of rounds * size rows.

    Hashing in rounds, PERSIA's `hash_stack_config`, bounds a table's size. Ids that collide in one round
    seldom collide in all.

    Args:
        ids: The ids.
        rounds: How many rows an id has.
        size: How many rows there are for each round.

    Returns:
        The rows, with the ids' shape and one more dimension, of `rounds`.

    Raises:
        ValueError: `rounds` or `size` is out of range.

    Example:
        >>> kv.ids.hash_stack(torch.tensor([12, 23]), rounds=2, size=10)
        tensor([[ 2, 18],
                [ 5, 10]])
    """
    check_hash_stack(rounds, size)
    if kernels.on_gpu(_ids(ids)):
        from karvan.kernels.ids import hash_stacks

        return hash_stacks(ids, rounds, size)
    flat = ids.reshape(-1).cpu().contiguous()
    out = torch.empty(flat.numel() * rounds, dtype=torch.int64)
    _native.hash_stack(flat.numpy(), rounds, size, out.numpy())
    return out.reshape(*ids.shape, rounds).to(ids.device)


def _check_modulus(modulus: int) -> None:
    check_integers(modulus=modulus)
    if not 1 <= modulus < 1 << 63:
        raise ValueError(f"A modulus must be from 1 to 2**63 - 1, but is {modulus}.")


def _encode(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _strings(data: Any) -> Strings | ByteRagged:
    """The strings of a list, of a numpy array, a Series or an Arrow array, or of bytes with offsets."""
    shape = getattr(data, "shape", None)
    if isinstance(data, Tensor) or (shape is not None and len(shape) != 1):
        what = f"a tensor of {data.dtype}" if isinstance(data, Tensor) else f"an array of shape {shape}"
        raise TypeError(
            f"A hash expects text, bytes or a list of them, got {what}: "
            "kv.ids.mod, prefix and hash_stack take ids that are numbers."
        )
    if not isinstance(data, list | tuple) and not hasattr(data, "offsets"):
        for convert in ("tolist", "to_list", "to_pylist"):
            if hasattr(data, convert):
                data = getattr(data, convert)()
                break
    if isinstance(data, list | tuple):
        wrong = next((at for at, row in enumerate(data) if not isinstance(row, str | bytes)), None)
        if wrong is not None:
            advice = "kv.ids.mod, prefix and hash_stack take ids that are numbers"
            if not is_integer(data[wrong]):
                advice = "drop such values, or give them a text of their own"
            raise TypeError(
                f"A hash expects text or bytes, got {data[wrong]!r} at position {wrong}: {advice}."
            )
    elif not hasattr(data, "offsets") or not hasattr(data, "values"):
        raise TypeError(f"A hash expects text, bytes or a list of them, got {type(data).__name__}.")
    return data  # type: ignore[no-any-return]


def _ids(ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"Ids must be an int64 tensor, but are {type(ids).__name__}: give it torch.tensor(ids), or "
            "kv.ids.farm(ids) of text."
        )
    if ids.dtype != torch.int64:
        raise TypeError(f"Ids must be an int64 tensor, but are {ids.dtype}: give it ids.long().")
    return ids


def _hash_rows(kind: str, data: Strings | ByteRagged, size: int | None) -> Tensor:
    """The hashes of strings; with a size, `bucket` of them."""
    data = _strings(data)
    if isinstance(data, list | tuple):
        rows = [_encode(row) for row in data]
        values = np.frombuffer(b"".join(rows), np.uint8)
        bounds = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=bounds[1:])
        device = torch.device("cpu")
    else:
        text = data.values
        if text.dtype not in (torch.uint8, torch.int8) or text.dim() != 1:
            received = f"{text.dtype} of shape {tuple(text.shape)}"
            raise TypeError(f"Strings to hash must be 1-D torch.uint8 or int8 values, but are {received}.")
        text = text.view(torch.uint8)
        if kernels.on_gpu(text):
            return _hash_on_gpu(kind, text, data.offsets, size)
        values = text.cpu().contiguous().numpy()
        starts = torch.arange(len(values) + 1) if data.offsets is None else data.offsets
        bounds = starts.cpu().contiguous().numpy()
        device = data.values.device
    out = torch.empty(max(len(bounds) - 1, 0), dtype=torch.int64)
    _native.hash_bytes(kind, values, bounds, out.numpy())
    hashes = out.to(device)
    return hashes if size is None else bucket(hashes, size)


def _hash_on_gpu(kind: str, values: Tensor, offsets: Tensor | None, size: int | None) -> Tensor:
    from karvan.kernels.ids import farm_rows, murmur_rows
    from karvan.kernels.rows import check_offsets

    if size:
        _check_modulus(size)
    if offsets is not None:
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.shape[0]:
            received = f"{offsets.dtype} of shape {tuple(offsets.shape)}"
            raise TypeError(f"Offsets must be 1-D torch.int64 with rows + 1 entries, but are {received}.")
        if offsets.device != values.device:
            raise ValueError(
                f"Offsets must be on {values.device} like the values, but are on {offsets.device}."
            )
        check_offsets(offsets, values.shape[0], whole=False)
    hash_rows = farm_rows if kind == "farm" else murmur_rows
    return hash_rows(values, offsets, size=-1 if size is None else size)


publish("karvan.ids")
