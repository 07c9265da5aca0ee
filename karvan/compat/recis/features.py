"""`Feature`, its operations, `FeatureEngine` and functions on tensors: each is a step of a `kv.Feature`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from karvan.compat.recis.ragged import RaggedTensor, to_karvan, to_recis
from karvan.compat.unsupported import UnsupportedError
from karvan.features import Feature as Chain
from karvan.features import FeatureEngine as Engine
from karvan.features.ops.base import Op, describe
from karvan.ragged import Entry, NestedRagged, Ragged


class FeatureOp(nn.Module):
    """An operation: what it adds to a chain, or, of the program's own, a `forward` on one entry."""

    suffixes: Sequence[str] = ()  # of its results, if it has several

    def __init__(self) -> None:
        super().__init__()

    @property
    def chained(self) -> bool:
        """Whether `add_to` is all that it does: not so of the program's own classes."""
        return type(self).__module__ == __name__

    def add_to(self, chain: Chain) -> Chain:
        """The chain with this operation at its end."""
        raise NotImplementedError(f"{type(self).__name__} expects a forward of its own.")

    def forward(self, data: Any) -> Any:
        """The operation on one entry."""
        chain = self.add_to(Chain("x"))
        result = Engine([chain])({"x": to_karvan(data)})
        results = [to_recis(result[name]) for name in chain.outputs()]
        return dict(zip(self.suffixes, results, strict=True)) if self.suffixes else results[0]


_OP = FeatureOp  # its name in RecIS


class SelectField(FeatureOp):
    """Starts a chain from an entry of the batch.

    dtype and dim describe the entry; as in RecIS, they change nothing.
    """

    def __init__(
        self, name: str, dtype: torch.dtype = torch.long, dim: int | None = None, from_dict: bool = True
    ) -> None:
        super().__init__()
        self.name, self.dtype, self.dim, self.from_dict = name, dtype, dim, from_dict

    @override
    def add_to(self, chain: Chain) -> Chain:
        return chain.select(self.column(), raw=True)

    def column(self) -> str:
        """The name of the entry, of batches that are mappings."""
        if not self.from_dict:
            raise UnsupportedError(
                f"SelectField('{self.name}', from_dict=False) in a FeatureEngine",
                "expected batches that are mappings of names to entries.",
            )
        return self.name

    def forward(self, data: Any) -> Any:
        """The entry of a batch."""
        return data[self.name] if self.from_dict else data


class SelectFields(FeatureOp):
    """Starts a chain from several entries of the batch."""

    def __init__(self, input_list: Sequence[SelectField]) -> None:
        super().__init__()
        self.input_list = list(input_list)

    @override
    def add_to(self, chain: Chain) -> Chain:
        return chain.select(*(feature.column() for feature in self.input_list), raw=True)

    def forward(self, data: Any) -> Any:
        """The entries of a batch."""
        return [feature(data) for feature in self.input_list]


class Mod(FeatureOp):
    """The remainder of ids, read as unsigned."""

    def __init__(self, mod_value: int) -> None:
        super().__init__()
        self.mod_value = mod_value
        self.add_to(Chain("x"))  # which checks the arguments

    @override
    def add_to(self, chain: Chain) -> Chain:
        return chain.mod(self.mod_value)


class Bucketize(FeatureOp):
    """How many boundaries are not above a number."""

    def __init__(self, boundary: Sequence[float] | Tensor) -> None:
        super().__init__()
        self.boundary = boundary
        self.add_to(Chain("x"))  # which checks the arguments

    @override
    def add_to(self, chain: Chain) -> Chain:
        boundary = self.boundary
        return chain.bucketize(boundary.tolist() if isinstance(boundary, Tensor) else boundary)


class FeatureCross(FeatureOp):
    """All pairs of the ids of two entries, hashed."""

    @override
    def add_to(self, chain: Chain) -> Chain:
        if chain.width() != 2:
            raise ValueError(
                f"FeatureCross expects two entries, as SelectFields([…, …]) gives them, got {chain.width()}."
            )
        return chain.cross()

    def forward(self, data: Any) -> Any:
        """The pairs of two entries."""
        first, second = data
        result = Engine([Chain("x").cross("a", "b")])({"a": to_karvan(first), "b": to_karvan(second)})
        return to_recis(result["x"])


class LengthError(AssertionError, ValueError):
    """A row is longer than `SequenceTruncate` allows: in RecIS an AssertionError."""


@dataclass(frozen=True)
class _ExpectDims(Op):
    """Lists, or lists of lists, as n_dims says; for n_dims=2 rows with one list each are lists, too."""

    n_dims: int
    name: ClassVar[str] = "SequenceTruncate"
    sized_by_shapes: ClassVar[bool] = True

    @override
    def check(self, *entries: Entry) -> None:
        (entry,) = entries
        if self.n_dims == 2 and isinstance(entry, NestedRagged) and bool((entry.outer.diff() == 1).all()):
            return
        if isinstance(entry, Ragged | NestedRagged) and isinstance(entry, NestedRagged) != (self.n_dims == 3):
            expected = "lists of lists" if self.n_dims == 3 else "lists, or rows that have one list each,"
            raise TypeError(f"expected {expected} for n_dims={self.n_dims}, but received {describe(entry)}.")

    @override
    def fuse_key(self, *entries: Entry) -> Hashable:
        return self

    @classmethod
    def run_group(cls, ops: Sequence[Op], arguments: Sequence[tuple[Entry, ...]]) -> list[Entry]:
        """The entries as they are, or the lists that are alone in their rows."""
        lists = [isinstance(op, _ExpectDims) and op.n_dims == 2 for op in ops]
        return [
            Ragged(entry.values, entry.inner) if alone and isinstance(entry, NestedRagged) else entry
            for alone, (entry,) in zip(lists, arguments, strict=True)
        ]


class SequenceTruncate(FeatureOp):
    """Rows cut to a length: on the "left", so that the last values stay, or on the "right".

    check_length: a longer row is an error, a `LengthError` where the operation is called by itself. In a
    FeatureEngine that is so without truncate only: rows that are cut need no check. dtype, as in RecIS,
    changes nothing. n_dims=2 is for lists, and for lists of lists with one in each row; n_dims=3 is for lists
    of lists: it cuts the lists of a row, and fills shorter rows up with empty lists.
    """

    def __init__(
        self,
        seq_len: int = 64,
        check_length: bool = True,
        truncate: bool = True,
        truncate_side: str = "left",
        n_dims: int = 2,
        dtype: torch.dtype = torch.long,
    ) -> None:
        super().__init__()
        if n_dims not in (2, 3):
            raise ValueError(f"SequenceTruncate expects n_dims 2 or 3, got {n_dims}.")
        if truncate_side not in ("left", "right"):
            raise ValueError(
                f"SequenceTruncate expects truncate_side 'left' or 'right', got {truncate_side!r}."
            )
        self.seq_len, self.check_length, self.truncate = seq_len, check_length, truncate
        self.truncate_side, self.n_dims, self.dtype = truncate_side, n_dims, dtype
        self.add_to(Chain("x"))  # which checks the arguments

    @override
    def add_to(self, chain: Chain) -> Chain:
        chain = chain.then(_ExpectDims(self.n_dims))
        if not self.truncate and not self.check_length:
            return chain
        chain = chain.truncate(self.seq_len, self.truncate_side, check=not self.truncate)
        return chain.fill_lists(self.seq_len) if self.truncate and self.n_dims == 3 else chain

    def forward(self, data: Any) -> Any:
        """The rows of one entry, cut."""
        if self.check_length and isinstance(data, RaggedTensor) and len(data.offsets()) >= self.n_dims - 1:
            lengths = data.offsets()[0 if self.n_dims == 3 else -1].diff()
            if lengths.numel() and (longest := int(lengths.max())) > self.seq_len:
                raise LengthError(
                    f"SequenceTruncate, check_length: expected at most {self.seq_len} values, but received a "
                    f"row of {longest}; check_length=False cuts it."
                )
        return super().forward(data)


class Hash(FeatureOp):
    """Strings as ids of 64 bits, by "farm" or "murmur"."""

    def __init__(self, hash_type: str) -> None:
        super().__init__()
        if hash_type not in ("farm", "murmur"):
            raise ValueError(f"Hash expects hash_type 'farm' or 'murmur', got {hash_type!r}.")
        self.hash_type = hash_type

    @override
    def add_to(self, chain: Chain) -> Chain:
        return chain.hash(self.hash_type)


class IDMultiHash(FeatureOp):
    """Up to four small ids for each id, as entries `name_multi_hash_0`, `name_multi_hash_1`, …."""

    def __init__(self, num_buckets: Sequence[int], prefix: str = "multi_hash") -> None:
        super().__init__()
        self.num_buckets = list(num_buckets)
        self.suffixes = [f"{prefix}_{i}" for i in range(len(self.num_buckets))]
        self.add_to(Chain("x"))  # which checks the arguments

    @override
    def add_to(self, chain: Chain) -> Chain:
        return chain.multi_hash(self.num_buckets)


class StringMultiHash(FeatureOp):
    """Not supported: two of its four hashes are not in Karvan."""

    def __init__(self, num_buckets: Sequence[int], prefix: str = "str_multi_hash") -> None:
        raise UnsupportedError(
            "StringMultiHash, with sdbm and djb2,",
            'use IDMultiHash, or kv.Feature.to_text().hash(kind, bucket) with "farm" and "murmur".',
        )


class Feature(nn.Module):
    """A feature of RecIS: `Feature("user").add_op(SelectField("user")).add_op(Mod(1000))`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.ops = nn.ModuleList()

    def add_op(self, op: FeatureOp) -> Feature:
        """Add an operation; returns the feature itself."""
        if not isinstance(op, FeatureOp):
            raise TypeError(
                f"Feature '{self.name}' expects operations of recis.features.op, got {type(op).__name__}."
            )
        self.ops.append(op)
        return self

    def operations(self) -> list[FeatureOp]:
        """The operations."""
        return cast(list[FeatureOp], list(self.ops))

    def chain(self) -> Chain:
        """The same as a feature of Karvan."""
        chain = Chain(self.name)
        for op in self.operations():
            chain = op.add_to(chain)
        return chain

    def renamed(self) -> dict[str, str]:
        """Karvan's names of its results → RecIS's, where they differ."""
        suffixes = next((op.suffixes for op in self.operations() if op.suffixes), ())
        names = [f"{self.name}_{suffix}" for suffix in suffixes]
        return dict(zip(self.chain().outputs(), names, strict=False))

    def forward(self, data: Any) -> Any:
        """The feature of a batch, one operation after the other; several results are a dict."""
        for op in self.ops:
            data = op(data)
        return data


class FeatureEngine(nn.Module):
    """Runs the operations of all features, equal ones of many features together.

    A feature with an operation of the program's own is computed by itself.
    """

    def __init__(self, feature_list: Sequence[Feature]) -> None:
        super().__init__()
        self.feature_list = nn.ModuleList(feature_list)
        chained = [feature for feature in feature_list if all(op.chained for op in feature.operations())]
        self._alone = [feature for feature in feature_list if feature not in chained]
        self.engine = Engine([feature.chain() for feature in chained])
        self._renamed = {old: new for feature in chained for old, new in feature.renamed().items()}

    def forward(self, data: Mapping[str, Any], remain_no_use_data: bool = True) -> dict[str, Any]:
        """The features, and unless told otherwise also the entries whose names no feature has."""
        if not isinstance(data, Mapping):
            raise TypeError(f"FeatureEngine expects a mapping of names, got {type(data).__name__}.")
        computed = self.engine({name: to_karvan(entry) for name, entry in data.items()})
        features = {output for feature in self.engine.features for output in feature.outputs()}
        outputs = {
            self._renamed.get(name, name): to_recis(entry)
            for name, entry in computed.items()
            if remain_no_use_data or name in features
        }
        for feature in self._alone:
            result = feature(data)
            if isinstance(result, Mapping):
                outputs |= {f"{feature.name}_{name}": item for name, item in result.items()}
            else:
                outputs[feature.name] = result
        return outputs


# Functions on tensors, each by the operation that does the same. "gpu" in a name says what RecIS needs; here
# any device will do. Strings are bytes of int8 and their offsets.


def bucketize(input: Tensor, boundaries: Tensor | Sequence[float]) -> Tensor:
    """How many boundaries are not above each number."""
    return cast(Tensor, Bucketize(boundaries)(input))


def bucketize_mod(input: Tensor, bucket: int) -> Tensor:
    """The remainder of ids, read as unsigned."""
    return cast(Tensor, Mod(bucket)(input))


def multi_hash(
    input: Tensor, muls: Tensor | Sequence[int], primes: Tensor | Sequence[int], bucket_num: int
) -> list[Tensor]:
    """For each of the factors and primes the remainders `input * mul % prime % bucket_num`, from 0 on."""
    pairs = zip(torch.as_tensor(muls).tolist(), torch.as_tensor(primes).tolist(), strict=True)
    return [(input * mul).remainder(prime).remainder(bucket_num) for mul, prime in pairs]


def fused_bucketize_gpu(values: Sequence[Tensor], boundaries: Sequence[Tensor]) -> list[Tensor]:
    """Give each tensor the positions of its values among its boundaries."""
    return [bucketize(value, bounds) for value, bounds in zip(values, boundaries, strict=True)]


def fused_uint64_mod_gpu(values: Sequence[Tensor], mods: Sequence[int] | Tensor) -> list[Tensor]:
    """Give each tensor the remainders of its values by its modulus."""
    moduli = torch.as_tensor(mods).tolist()
    return [bucketize_mod(value, modulus) for value, modulus in zip(values, moduli, strict=True)]


def fused_multi_hash(
    inputs: Sequence[Tensor], muls: Sequence[Tensor], primes: Sequence[Tensor], bucket_nums: Sequence[Tensor]
) -> list[Tensor]:
    """For each input, one after the other, its remainders by all of its factors, primes and buckets."""
    return [
        (value * mul).remainder(prime).remainder(bucket)
        for value, *settings in zip(inputs, muls, primes, bucket_nums, strict=True)
        for mul, prime, bucket in zip(*(setting.tolist() for setting in settings), strict=True)
    ]


def fused_int64_to_string_int8(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Integers as text: the bytes, and the length of each text."""
    engine = Engine([Chain("x").to_text()])
    texts = [engine({"x": value})["x"] for value in inputs]
    rows = [text for text in texts if isinstance(text, Ragged)]
    return [text.values.view(torch.int8) for text in rows], [text.lengths() for text in rows]


def farmhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """The ids of the strings of each tensor."""
    return _hashed("farm", inputs, splits)


def murmurhash(inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    """The ids of the strings of each tensor."""
    return _hashed("murmur", inputs, splits)


def _hashed(kind: str, inputs: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    texts = [
        RaggedTensor(values, [torch.arange(offsets.numel()), offsets])
        for values, offsets in zip(inputs, splits, strict=True)
    ]
    return [Hash(kind)(text).values() for text in texts]


def dense_to_ragged(
    tensor: Tensor, check_invalid: bool = False, invalid_value: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Values and offsets of a tensor; with check_invalid without an `invalid_value` at the end of a row."""
    ragged = RaggedTensor.from_dense(tensor, check_invalid, invalid_value)
    return ragged.values(), ragged.offsets()


def ragged_to_dense(values: Tensor, offsets: Sequence[Tensor], default_value: float = 0.0) -> Tensor:
    """A tensor of the rows, filled up with a value."""
    return RaggedTensor(values, offsets).to_dense(default_value)


def ragged_to_sparse(values: Tensor, row_splits: Sequence[Tensor]) -> Tensor:
    """A sparse tensor of the rows."""
    return RaggedTensor(values, row_splits).to_sparse()


def feature_cross_ragged(
    x_val: Tensor,
    x_offsets: Tensor,
    y_val: Tensor,
    y_offsets: Tensor,
    x_weight: Tensor | None = None,
    y_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All pairs of ids of two entries, hashed: values, offsets and weights, which are 1 if not given."""
    x = RaggedTensor(x_val, x_offsets, torch.ones(len(x_val)) if x_weight is None else x_weight)
    y = RaggedTensor(y_val, y_offsets, torch.ones(len(y_val)) if y_weight is None else y_weight)
    result = FeatureCross()([x, y])
    return result.values(), result.offsets()[0], result.weight()
