"""Layers: `Embedding`, whose rows are on the parameter servers of a job, and those of preprocessing.

`initialiser_of` has initialisers by the names that Keras gives them, and `row_optimizer` gives rows the
optimizer of a model's dense parameters. A `FeatureLayer` runs steps of a `kv.Feature` on what programs of
ElasticDL pass to layers:

| Input | Stands for |
|---|---|
| a tensor, an array, lists of one length | a dense tensor; the result has its shape |
| `kv.Ragged` | a ragged or sparse tensor of numbers |
| `kv.NestedRagged` of bytes | a ragged or sparse tensor of strings |
| lists of several lengths | the same |
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from karvan.argument_checks import listed
from karvan.compat.elasticdl.contract import ContractError, table_name
from karvan.compat.unsupported import UnsupportedError, require_default
from karvan.embedding import EmbeddingEngine, Table, init, optim
from karvan.embedding.optim.base import SparseOptimizer
from karvan.features import Feature, FeatureEngine
from karvan.features.ops.base import is_text as has_text
from karvan.features.ops.base import with_values
from karvan.features.ops.fitted import words_from_file
from karvan.ragged import Entry, NestedRagged, Ragged, values_of

_NAMES: dict[str, init.Initialiser] = {
    "uniform": init.Uniform(-0.05, 0.05),
    "random_uniform": init.Uniform(-0.05, 0.05),
    "normal": init.Normal(0.0, 0.05),
    "random_normal": init.Normal(0.0, 0.05),
    "truncated_normal": init.TruncatedNormal(0.0, 0.05),
    "zeros": init.Constant(0.0),
    "ones": init.Constant(1.0),
}


def initialiser_of(initialiser: init.Initialiser | str) -> init.Initialiser:
    """An initialiser of kv.init, as it is or by a name."""
    if isinstance(initialiser, init.Initialiser):
        return initialiser
    if initialiser not in _NAMES:
        raise ContractError(
            f"There is no initialiser {initialiser!r}. Expected one of kv.init, or a name: "
            f"{listed(str(initialiser), _NAMES)}"
        )
    return _NAMES[initialiser]


_IDS = "ids of an Embedding"  # no column of a batch, which would be looked up in advance, has this name


class Embedding(nn.Module):
    """Vectors of `output_dim` numbers for ids, a tensor (samples,) or (samples, length), or a `kv.Ragged`.

    input_dim: ids are below it; 0 or None allows any. input_length: the length of every sample, if it is
    known. combiner: "sum", "mean" or "sqrtn" of the ids of a sample; without one the result is (samples,
    output_dim) or (samples, length, output_dim). name: of the table, the same in every worker and no other
    layer's; without one, layers are numbered.
    """

    def __init__(
        self,
        output_dim: int,
        input_dim: int | None = None,
        embeddings_initializer: init.Initialiser | str = "uniform",
        mask_zero: bool = False,
        input_length: int | None = None,
        combiner: str | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if combiner not in (None, "sum", "mean", "sqrtn"):
            raise ContractError(f"Embedding expects a combiner sum, mean or sqrtn, got '{combiner}'.")
        if isinstance(input_dim, str):
            raise ContractError(f"Embedding expects a number as input_dim, got '{input_dim}': write name=….")
        instead = "layers of torch have no masks; ToRagged(ignore_value=0) drops zeros."
        require_default("mask_zero", mask_zero, False, instead)
        self.name = table_name("embedding", name)
        self._combiner = combiner
        self._limit = input_dim or None
        self._length = input_length
        first = initialiser_of(embeddings_initializer)
        table = Table(output_dim, name=self.name, combiner=combiner or "sum", init=first)
        self.engine = EmbeddingEngine({_IDS: table})

    def forward(self, ids: Tensor | Ragged) -> Tensor:
        """The vectors."""
        self._check(ids)
        if isinstance(ids, Ragged):
            return self._lookup(Ragged(ids.values.to(torch.int64), ids.offsets, ids.weights))
        flat = ids.reshape(-1).to(torch.int64)
        if self._combiner is None or ids.dim() == 1:
            return self._lookup(flat).reshape(*ids.shape, -1)
        offsets = torch.arange(len(ids) + 1, dtype=torch.int64, device=ids.device) * ids.shape[1]
        return self._lookup(Ragged(flat, offsets))

    def _lookup(self, ids: Tensor | Ragged) -> Tensor:
        vectors: Tensor = self.engine({_IDS: ids})[_IDS]
        return vectors

    def _check(self, ids: Tensor | Ragged) -> None:
        values = values_of(ids)
        plain = values.dim() == 1 if isinstance(ids, Ragged) else ids.dim() in (1, 2)
        if not plain or values.is_floating_point():
            raise ContractError(
                f"Embedding '{self.name}' expects whole numbers (samples,) or (samples, length), or a "
                f"kv.Ragged of them, got {tuple(values.shape)} {values.dtype}."
            )
        if isinstance(ids, Ragged) and self._combiner is None:
            raise ContractError(
                f"Embedding '{self.name}' expects a combiner for samples of several lengths, got none."
            )
        length = tuple(ids.shape[1:]) if isinstance(ids, Tensor) else None
        if self._length is not None and length != (self._length,):
            raise ContractError(
                f"Embedding '{self.name}' expects {self._length} ids a sample, as input_length says, got "
                f"{'several numbers' if length is None else (length[0] if length else 1)}."
            )
        if self._limit is not None and values.numel():
            low, high = (int(bound) for bound in torch.aminmax(values))
            if low < 0 or high >= self._limit:
                raise ContractError(
                    f"Embedding '{self.name}' expects ids from 0 to {self._limit - 1}, as input_dim says, "
                    f"got {low if low < 0 else high}."
                )


# The optimizer of rows, the options that both have, and the only values of options that rows do not have.
_KINDS: dict[type, tuple[type[SparseOptimizer], tuple[str, ...], dict[str, Any]]] = {
    torch.optim.SGD: (
        optim.SGD,
        ("lr", "momentum", "weight_decay", "nesterov"),
        {"dampening": 0, "maximize": False},
    ),
    torch.optim.Adam: (
        optim.Adam,
        ("lr", "betas", "eps", "weight_decay", "amsgrad"),
        {"maximize": False, "decoupled_weight_decay": False},
    ),
    torch.optim.AdamW: (optim.AdamW, ("lr", "betas", "eps", "weight_decay", "amsgrad"), {"maximize": False}),
    torch.optim.Adagrad: (
        optim.Adagrad,
        ("lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay"),
        {"maximize": False},
    ),
}


def row_optimizer(dense: torch.optim.Optimizer) -> SparseOptimizer:
    """The same optimizer for rows, with the same options; an error if rows have none like it."""
    kind = type(dense)
    if kind not in _KINDS:
        raise ContractError(
            f"Rows of embedding layers are trained by the model's optimizer, one of "
            f"{', '.join(allowed.__name__ for allowed in _KINDS)}, got {kind.__name__}."
        )
    make, shared, fixed = _KINDS[kind]
    for name, value in fixed.items():
        if dense.defaults.get(name, value) != value:
            raise ContractError(
                f"Rows of embedding layers have no {name} in {kind.__name__}: expected {value}, got "
                f"{dense.defaults[name]}."
            )
    return make(**{name: dense.defaults[name] for name in shared})


COLUMN = "x"


class LayerInput(NamedTuple):
    """An entry of a batch; shape: of the dense tensor whose flat values it has, None if it has rows."""

    entry: Entry
    shape: tuple[int, ...] | None


class FeatureLayer(nn.Module):
    """Runs a feature's steps; the result of a dense tensor is one of the same shape."""

    computes_in: torch.dtype | None = None  # to which inputs are cast; None: as they are

    def __init__(self, feature: Feature, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._engine = FeatureEngine([feature])

    def forward(self, inputs: Any) -> Any:
        """The result; see `LayerInput`."""
        entry, shape = layer_input(inputs)
        if self.computes_in is not None:
            entry = with_values(entry, values_of(entry).to(self.computes_in))
        result = self._engine({COLUMN: entry})[COLUMN]
        if shape is None:
            return result
        values = values_of(result)
        if values.numel() != torch.Size(shape).numel():
            raise ValueError(
                f"{type(self).__name__} expects a number everywhere, got NaN or an empty text: replace them "
                "before, or pass a kv.Ragged without them."
            )
        return values.reshape(shape)


def layer_input(inputs: Any) -> LayerInput:
    """What a program passes to a layer, as an entry of a batch."""
    if isinstance(inputs, Ragged | NestedRagged):
        return LayerInput(inputs, None)
    if isinstance(inputs, Tensor):
        if inputs.layout != torch.strided:
            raise UnsupportedError(f"A tensor of layout {inputs.layout}", "pass a kv.Ragged of its rows.")
        return LayerInput(inputs.reshape(-1), tuple(inputs.shape))
    try:
        array = np.asarray(inputs)
    except ValueError:  # lists of several lengths
        return LayerInput(ragged_of([list(row) for row in inputs]), None)
    if is_text(array):
        return LayerInput(text_of(array.reshape(-1).tolist()), array.shape)
    return LayerInput(torch.from_numpy(np.ascontiguousarray(array)).reshape(-1), array.shape)


def is_text(array: Any) -> bool:
    """Whether an array has strings."""
    return array.dtype.kind in "US" or (
        array.dtype.kind == "O" and all(isinstance(item, str | bytes) for item in array.reshape(-1))
    )


def text_of(words: Sequence[str | bytes]) -> Ragged:
    """Strings as rows of bytes."""
    texts = [word.encode() if isinstance(word, str) else word for word in words]
    return Ragged.from_lists(texts, dtype=torch.uint8)


def ragged_of(rows: Sequence[Sequence[Any]]) -> Entry:
    """Lists of numbers or strings as rows."""
    flat = [value for row in rows for value in row]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    if flat and isinstance(flat[0], str | bytes):
        words = text_of(flat)
        assert words.offsets is not None
        return NestedRagged(words.values, words.offsets, offsets)
    return Ragged(torch.tensor(flat) if flat else torch.empty(0, dtype=torch.int64), offsets)


class Discretization(FeatureLayer):
    """How many of the bins' boundaries are not above a number: bins [0, 1] are x < 0, 0 <= x < 1, 1 <= x."""

    def __init__(self, bins: Sequence[float], name: str | None = None) -> None:
        super().__init__(Feature(COLUMN).bucketize(bins), name)
        self.bins = list(bins)

    def num_bins(self) -> int:
        """How many intervals there are."""
        return len(self.bins) + 1


class Hashing(FeatureLayer):
    """The hash of a string modulo num_bins; an integer is hashed as its decimal text."""

    def __init__(self, num_bins: int, name: str | None = None) -> None:
        if num_bins is None or num_bins <= 0:
            raise ValueError(f"Hashing expects num_bins of at least 1, got {num_bins}.")
        super().__init__(Feature(COLUMN).to_text().hash("farm", num_bins), name)
        self.num_bins = num_bins


class IndexLookup(FeatureLayer):
    """The index of a word; others are hashed into num_oov_tokens ids after the last, or are -1 if that is 0.

    vocabulary: a list of words, or the path of a text file with one on each line.
    """

    def __init__(
        self,
        vocabulary: Sequence[str] | Sequence[int] | str | None = None,
        num_oov_tokens: int = 1,
        name: str | None = None,
    ) -> None:
        if vocabulary is None:
            raise ValueError("IndexLookup expects a vocabulary, a list of words or a file, got none.")
        words: Sequence[str | bytes] = (
            words_from_file(vocabulary) if isinstance(vocabulary, str) else [str(word) for word in vocabulary]
        )
        super().__init__(Feature(COLUMN).to_text().vocabulary(words, num_oov_tokens), name)  # type: ignore[arg-type]
        self.num_oov_tokens = num_oov_tokens
        self._words = len(words)

    def vocab_size(self) -> int:
        """How many ids there are."""
        return self._words + self.num_oov_tokens


class LogRound(FeatureLayer):
    """round(log(x)) in double precision; what is not in [0, num_bins) becomes default_value.

    base: of the logarithm, e without one.
    """

    computes_in = torch.float64

    def __init__(
        self, num_bins: int, default_value: int = 0, base: float | None = None, name: str | None = None
    ) -> None:
        steps = Feature(COLUMN).log(math.e if base is None else base).to_ids(num_bins, default_value)
        super().__init__(steps, name)
        self.num_bins = num_bins


class Normalizer(FeatureLayer):
    """(x - subtractor) / divisor, as float32."""

    computes_in = torch.float32

    def __init__(self, subtractor: float, divisor: float, name: str | None = None) -> None:
        if divisor == 0:
            raise ValueError("Normalizer expects a divisor other than 0, got 0.")
        if divisor < 0:
            raise UnsupportedError(f"Normalizer(divisor={divisor})", "expected one above 0.")
        super().__init__(Feature(COLUMN).normalise(float(subtractor), float(divisor)), name)


class RoundIdentity(FeatureLayer):
    """Numbers rounded, half to even; what is not in [0, num_buckets) becomes default_value."""

    def __init__(self, num_buckets: int, default_value: int = 0, name: str | None = None) -> None:
        super().__init__(Feature(COLUMN).to_ids(num_buckets, default_value), name)
        self.num_buckets = num_buckets


class ConcatenateWithOffset(torch.nn.Module):
    """The columns of tensors (samples, n), or the rows of `kv.Ragged`s, one after the other."""

    def __init__(self, offsets: Sequence[int], axis: int = -1, name: str | None = None) -> None:
        super().__init__()
        if axis not in (-1, 1):
            raise UnsupportedError(f"ConcatenateWithOffset(axis={axis})", "expected -1 or 1, the columns.")
        self.name = name
        self.offsets = list(offsets)
        columns = [str(number) for number in range(len(self.offsets))]
        steps = Feature("ids").concat(*columns, offsets=self.offsets) if len(columns) > 1 else None
        self._engine = None if steps is None else FeatureEngine([steps])

    def forward(self, inputs: Sequence[Entry]) -> Entry:
        """Ids as int64: a tensor if all inputs are tensors, else a `kv.Ragged`."""
        if len(inputs) != len(self.offsets):
            raise ValueError(
                f"ConcatenateWithOffset expects an input for each of {len(self.offsets)} offsets, got "
                f"{len(inputs)}."
            )
        if self._engine is None:
            raise UnsupportedError("ConcatenateWithOffset of one input", "expected two of them or more.")
        columns = {str(number): _ids(entry) for number, entry in enumerate(inputs)}
        joined: Entry = self._engine(columns)["ids"]
        return joined


def _ids(entry: Entry) -> Entry:
    values = values_of(entry)
    return entry if values.is_floating_point() else with_values(entry, values.to(torch.int64))


class ToNumber(torch.nn.Module):
    """The numbers that strings spell; an empty string is default_value.

    out_type: a dtype of torch or numpy.
    """

    def __init__(self, out_type: Any, default_value: float, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.out_type = out_type if isinstance(out_type, torch.dtype) else _dtype(out_type)
        if self.out_type.is_floating_point:
            steps = Feature(COLUMN).to_numbers(float(default_value))
        else:
            steps = Feature(COLUMN).to_ids().fill_missing(int(default_value))
        self._engine = FeatureEngine([steps])

    def forward(self, inputs: Any) -> Entry:
        """Numbers of the same shape, or in the same rows."""
        entry, shape = layer_input(inputs)
        if not has_text(entry):
            result = with_values(entry, values_of(entry).to(self.out_type))
            return result if shape is None else values_of(result).reshape(shape)
        if self.out_type == torch.float64:
            raise UnsupportedError("ToNumber(float64) of strings", "expected torch.float32.")
        assert not isinstance(entry, Tensor)
        words = entry.lists() if isinstance(entry, NestedRagged) else entry
        numbers = self._cast(values_of(self._engine({COLUMN: words})[COLUMN]))
        if isinstance(entry, NestedRagged):
            return Ragged(numbers, entry.outer)
        return numbers if shape is None else numbers.reshape(shape)

    def _cast(self, numbers: Tensor) -> Tensor:
        result = numbers.to(self.out_type)
        if not self.out_type.is_floating_point and not torch.equal(result.to(numbers.dtype), numbers):
            raise ValueError(f"ToNumber expects numbers that fit into {self.out_type}, got larger ones.")
        return result


def _dtype(dtype: Any) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, np.dtype(dtype))).dtype
    except TypeError as error:
        raise ValueError(f"ToNumber expects out_type as a dtype of numbers, got {dtype!r}.") from error


class ToRagged(torch.nn.Module):
    """Rows without ignore_value: numbers as a `kv.Ragged`, strings as a `kv.NestedRagged`.

    ignore_value: -1 for integers and "" for strings, if it is None. Without one, strings are split at sep.
    """

    def __init__(
        self, sep: str = ",", ignore_value: float | str | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.ignore_value = ignore_value
        self._split = FeatureEngine([Feature(COLUMN).split(sep, skip_empty=True)])

    def forward(self, inputs: Any) -> Entry:
        """The rows."""
        entry, shape = layer_input(inputs)
        if isinstance(entry, NestedRagged) or (shape is not None and len(shape) > 2):
            raise UnsupportedError(
                "ToRagged of more than two dimensions",
                "expected a tensor (samples, n), or strings (samples,).",
            )
        if not (isinstance(entry, Ragged) and entry.values.dtype == torch.uint8):
            return rows_without(
                entry if shape is None else values_of(entry).reshape(shape), self.ignore_value
            )
        if self.ignore_value is not None:
            return words_without(inputs, self.ignore_value)
        if shape is not None and shape[1:] not in ((), (1,)):
            raise UnsupportedError(f"ToRagged of strings {shape}", "expected one string for each sample.")
        parts: Entry = self._split({COLUMN: entry})[COLUMN]
        return parts


def rows_without(entry: Entry, ignored: float | str | None) -> Entry:
    """Rows of numbers without one of them, -1 if it is None."""
    if ignored is None and values_of(entry).is_floating_point():
        raise ValueError("Rows of floats need ignore_value, the number to leave out, got None.")
    if isinstance(ignored, str):
        raise TypeError(f"Rows of numbers expect a number as ignore_value, got {ignored!r}.")
    pad = -1 if ignored is None else ignored
    rows: Entry = FeatureEngine([Feature(COLUMN).to_ragged(pad)])({COLUMN: entry})[COLUMN]
    return rows


def words_without(inputs: Any, ignored: float | str) -> Entry:
    """Rows of strings, in an array or lists, without one of them."""
    array = np.asarray(inputs)
    if not is_text(array) or array.ndim > 2 or not isinstance(ignored, str):
        raise UnsupportedError(
            f"ignore_value={ignored!r} of {type(inputs).__name__}",
            "expected strings in an array or in lists.",
        )
    rows = array.reshape(len(array), -1).tolist()
    return ragged_of([[word for word in row if word not in (ignored, ignored.encode())] for row in rows])


class ToSparse(torch.nn.Module):
    """A `kv.Ragged`, or a `kv.NestedRagged` of strings, of each row's values other than ignore_value.

    ignore_value: -1 for integers and "" for strings, if it is None. Rows stay as they are. A sparse tensor's
    columns, which embeddings do not need, are not there.
    """

    def __init__(self, ignore_value: float | str | None = None, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.ignore_value = ignore_value

    def forward(self, inputs: Any) -> Entry:
        """The rows."""
        entry, shape = layer_input(inputs)
        if shape is None:
            return entry
        if isinstance(entry, Ragged):
            return words_without(inputs, "" if self.ignore_value is None else self.ignore_value)
        return rows_without(values_of(entry).reshape(shape), self.ignore_value)


class SparseEmbedding(torch.nn.Module):
    """Vectors of `output_dim` numbers for rows of ids, a `kv.Ragged`; a row without ids gets zeros.

    input_dim: ids are below it; 0 or None allows any. combiner: "sum", "mean" or "sqrtn". In a dense tensor
    0 is no id. name: of the table, the same in every worker.
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: init.Initialiser | str = "uniform",
        combiner: str = "mean",
        *,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if combiner not in ("sum", "mean", "sqrtn"):
            raise ValueError(f"SparseEmbedding expects a combiner sum, mean or sqrtn, got {combiner!r}.")
        self.name = table_name("sparse_embedding", name)
        self.embedding = Embedding(
            output_dim, input_dim, embeddings_initializer, combiner=combiner, name=self.name
        )

    def forward(self, inputs: Any) -> Tensor:
        """The vectors, (samples, output_dim)."""
        entry, shape = layer_input(inputs)
        if shape is not None:
            assert isinstance(entry, Tensor)
            entry = rows_without(entry.reshape(shape), 0)
        vectors: Tensor = self.embedding(entry)
        return vectors


class AnalysisEnvTemplate:
    """A name for each statistic, with a place for the name of the feature."""

    MIN_ENV = "_{}_min"
    MAX_ENV = "_{}_max"
    AVG_ENV = "_{}_avg"
    STDDEV_ENV = "_{}_stddev"
    BUCKET_BOUNDARIES_ENV = "_{}_boundaries"
    DISTINCT_COUNT_ENV = "_{}_distinct_count"
    VOCABULARY_ENV = "_{}_vocab"


T = TypeVar("T")


def _read(template: str, parse: Callable[[str], T], feature_name: str, default_value: T) -> T:
    """A statistic of a feature, in the environment; without one the default."""
    name = template.format(feature_name)
    if name not in os.environ:
        return default_value
    try:
        return parse(os.environ[name])
    except ValueError as error:
        raise ValueError(f"The environment variable {name} has a wrong value: {error}.") from error


def _boundaries(text: str) -> list[float]:
    return sorted(set(map(float, text.split(","))))


get_min = partial(_read, AnalysisEnvTemplate.MIN_ENV, float)
get_max = partial(_read, AnalysisEnvTemplate.MAX_ENV, float)
get_avg = partial(_read, AnalysisEnvTemplate.AVG_ENV, float)
get_stddev = partial(_read, AnalysisEnvTemplate.STDDEV_ENV, float)
get_bucket_boundaries = partial(_read, AnalysisEnvTemplate.BUCKET_BOUNDARIES_ENV, _boundaries)  # in order
get_distinct_count = partial(_read, AnalysisEnvTemplate.DISTINCT_COUNT_ENV, int)
get_vocabulary = partial(_read, AnalysisEnvTemplate.VOCABULARY_ENV, str)  # a file, as `IndexLookup` takes it
