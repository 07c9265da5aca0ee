"""Karvan's native core: tables of rows, batch operations, hashes."""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

def count_lines(text: NDArray[numpy.uint8]) -> int:
    """How many lines are not empty."""

def parse_lines(
    text: NDArray[numpy.uint8],
    delimiter: str,
    bases: Sequence[int],
    values: NDArray[numpy.int64],
    present: NDArray[numpy.uint8],
) -> list[int] | None:
    """
    Read a table of integers: a base for each column (0: not read), and for each that is read a row of values and one of bits, all set, of which those of empty cells are cleared. Returns how many those are in each, or None if the text is anything else than such a table.
    """

def log1p(
    values: Sequence[NDArray[numpy.float32]],
    out: Sequence[NDArray[numpy.float32]],
    low: Sequence[float],
    high: Sequence[float],
) -> None:
    """
    For each array of values, out[i] becomes log(1 + values[i]), after values outside of low and high are moved to the nearest.
    """

def farm64(data: bytes) -> int:
    """FarmHash Fingerprint64, as a signed number."""

def murmur64a(data: bytes, seed: int = 0) -> int:
    """MurmurHash64A, as a signed number."""

def hash_bytes(
    kind: str, data: NDArray[numpy.uint8], offsets: NDArray[numpy.int64], out: NDArray[numpy.int64]
) -> None:
    """
    out[i] becomes the hash (farm, or murmur with seed 0) of data[offsets[i]:offsets[i + 1]].
    """

def hash_stack(values: NDArray[numpy.int64], rounds: int, size: int, out: NDArray[numpy.int64]) -> None:
    """
    out[i * rounds + r] becomes the row of id i in round r, within [r * size, (r + 1) * size).
    """

def crc32(data: NDArray[numpy.uint8] | memoryview | bytes, before: int = 0) -> int:
    """CRC-32 as in gzip, of data after bytes whose checksum is `before`."""

def mix(keys: NDArray[numpy.int64], out: NDArray[numpy.uint64]) -> None:
    """out[i] becomes the hash of keys[i]; see hash/mix.h."""

def initialise(
    kind: str,
    a: float,
    b: float,
    lo: float,
    hi: float,
    seed: int,
    table: str,
    keys: NDArray[numpy.int64],
    out: NDArray[numpy.float32],
) -> None:
    """
    out[i] becomes the initial vector of keys[i] in the table; see table/init.h.
    """

def interact(
    addresses: Sequence[int], strides: Sequence[int], samples: int, dim: int, out: int, out_stride: int
) -> None:
    """
    Dot products of all pairs of a sample's vectors, each given by address and stride, to rows of out.
    """

def interact_backward(
    addresses: Sequence[int],
    strides: Sequence[int],
    samples: int,
    dim: int,
    out_gradient: int,
    out_stride: int,
    gradient: int,
) -> None:
    """
    From the gradient of out to those of the vectors, (samples, vectors, dim).
    """

def all_finite(addresses: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether arrays of float32 have neither infinities nor NaNs."""

def count_scores(
    scores: int, labels: int, weights: int, samples: int, limit: float, bins: int, counts: int
) -> None:
    """
    Adds samples to a histogram (3, bins + 2) of scores by their logits; all arrays are float64, weights may be 0.
    """

def masked_crc32c(data: NDArray[numpy.uint8] | bytes) -> int:
    """CRC-32C, masked as TFRecord and Snappy's frames store it."""

def find_tfrecords(
    data: NDArray[numpy.uint8] | bytes, verify: bool
) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], int, str]:
    """The starts and lengths of the records, the byte after the last, and what is wrong there."""

def find_chunk_records(
    data: NDArray[numpy.uint8] | bytes, count: int
) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], int, str]:
    """The starts and lengths of the records, the byte after the last, and what is wrong there."""

def frame_tfrecords(data: NDArray[numpy.uint8], offsets: NDArray[numpy.int64]) -> NDArray[numpy.uint8]:
    """The records data[offsets[i]:offsets[i + 1]] in their frames."""

def frame_chunk_records(data: NDArray[numpy.uint8], offsets: NDArray[numpy.int64]) -> NDArray[numpy.uint8]:
    """The records data[offsets[i]:offsets[i + 1]] in their frames."""

def decode_examples(
    data: NDArray[numpy.uint8],
    starts: NDArray[numpy.int64],
    lengths: NDArray[numpy.int64],
    names: Sequence[str],
    kinds: Sequence[str],
    all_named: bool,
) -> tuple[
    list[tuple[NDArray[numpy.uint8], NDArray[numpy.int32], NDArray[numpy.generic], NDArray[numpy.int32]]],
    tuple[str, int, bytes, str] | None,
]:
    """Of each named feature: whether records have it, the offsets of their values, the values, and the offsets of bytes in them; and what is wrong: a word, the record, the feature, the kind that it has."""

def summarise_examples(
    data: NDArray[numpy.uint8], starts: NDArray[numpy.int64], lengths: NDArray[numpy.int64]
) -> tuple[list[tuple[bytes, str, bool]], tuple[str, int, bytes, str] | None]:
    """The features of the records: name, kind, and whether no record has several values; and what is wrong."""

def encode_examples(
    rows: int,
    names: Sequence[str],
    kinds: Sequence[str],
    present: Sequence[NDArray[numpy.uint8]],
    offsets: Sequence[NDArray[numpy.int32]],
    values: Sequence[NDArray[numpy.uint8]],
    byte_offsets: Sequence[NDArray[numpy.int32]],
) -> tuple[NDArray[numpy.uint8], NDArray[numpy.int64]]:
    """A tf.Example for each row, one after the other, and their bounds."""

class LookupLog:
    """Training lookups whose batches have not been trained yet."""

    def __init__(self) -> None: ...
    def trained(self, plan: Plan) -> None:
        """The batch of a lookup has been trained."""

    def withdraw(self, plans: Sequence[Plan]) -> None:
        """Undoes these lookups in the tables; their batches will not be trained."""

    @property
    def in_flight(self) -> int: ...
    def __len__(self) -> int: ...

class Table:
    """64-bit keys and their rows."""

    def __init__(
        self,
        name: str,
        dim: int,
        dtype: str,
        init: tuple[str, float, float, float, float],
        seed: int,
        admit: tuple[str, float, int],
        evict: tuple[str, float, int],
        shards: int,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def version(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def set_state(self, initial: Sequence[float], fresh: bool) -> None: ...
    def lookup(
        self, keys: NDArray[numpy.int64], counts: NDArray[numpy.uint32], training: bool, step: int, now: float
    ) -> tuple[NDArray[numpy.float32], int]: ...
    def apply(
        self,
        pushes: Sequence[tuple[NDArray[numpy.int64], NDArray[numpy.float32], int]],
        rule: Rule,
        step: int,
    ) -> None: ...
    def count_skipped(self) -> None: ...
    def evict(self, step: int, now: float) -> int: ...
    def erase(self, keys: NDArray[numpy.int64]) -> int: ...
    def clear(self) -> None: ...
    def evicted_since(self, version: int) -> NDArray[numpy.int64]: ...
    def snapshot(
        self, part: int = 0, parts: int = 1
    ) -> tuple[
        NDArray[numpy.int64],
        NDArray[numpy.float32],
        NDArray[numpy.float32],
        NDArray[numpy.uint32],
        NDArray[numpy.uint32],
    ]: ...
    def load(
        self,
        keys: NDArray[numpy.int64],
        vectors: NDArray[numpy.float32],
        state: NDArray[numpy.float32] | None,
        counts: NDArray[numpy.uint32],
        last_steps: NDArray[numpy.uint32],
    ) -> None: ...
    def clock(self) -> list[tuple[int, float]]:
        """Steps and their times, which a time to live is measured by."""

    def set_clock(self, clock: Sequence[tuple[int, float]]) -> None: ...
    def filter_counts(self, log: LookupLog | None = None) -> NDArray[numpy.uint8]:
        """
        The admission filter's counters, to be saved with the rows; with a log, without its lookups in flight.
        """

    def set_filter_counts(self, counts: NDArray[numpy.uint8]) -> None: ...

def shrink(tables: Sequence[Table], capacity: int) -> int:
    """
    If tables have more rows than this together: removes those used least recently. Returns how many.
    """

class Capture:
    """
    A table as it was at one moment, read part by part while training continues.
    """

    def part(
        self, part: int
    ) -> tuple[
        NDArray[numpy.int64],
        NDArray[numpy.float32],
        NDArray[numpy.float32],
        NDArray[numpy.uint32],
        NDArray[numpy.uint32],
    ]: ...
    def erased(self) -> NDArray[numpy.int64]:
        """Keys removed since the previous capture; some may have rows again."""

    def close(self) -> None: ...
    @property
    def version(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def kept(self) -> int:
        """Rows that were copied because training was about to change them."""

def capture(
    tables: Sequence[tuple[Table, int, int | None]], track: bool, log: LookupLog | None = None
) -> list[Capture]:
    """
    Captures (table, parts, since) all at one moment. With a version as `since`, only what changed after it. With a log, without its lookups in flight.
    """

class Rule:
    """An optimizer's rule and its numbers for one step."""

    def __init__(self, kind: str) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @lr.setter
    def lr(self, arg: float, /) -> None: ...
    @property
    def beta1(self) -> float: ...
    @beta1.setter
    def beta1(self, arg: float, /) -> None: ...
    @property
    def beta2(self) -> float: ...
    @beta2.setter
    def beta2(self, arg: float, /) -> None: ...
    @property
    def eps(self) -> float: ...
    @eps.setter
    def eps(self, arg: float, /) -> None: ...
    @property
    def weight_decay(self) -> float: ...
    @weight_decay.setter
    def weight_decay(self, arg: float, /) -> None: ...
    @property
    def shrink(self) -> float: ...
    @shrink.setter
    def shrink(self, arg: float, /) -> None: ...
    @property
    def alpha(self) -> float: ...
    @alpha.setter
    def alpha(self, arg: float, /) -> None: ...
    @property
    def l1(self) -> float: ...
    @l1.setter
    def l1(self, arg: float, /) -> None: ...
    @property
    def l2(self) -> float: ...
    @l2.setter
    def l2(self, arg: float, /) -> None: ...
    @property
    def clip_value(self) -> float: ...
    @clip_value.setter
    def clip_value(self, arg: float, /) -> None: ...
    @property
    def clip_norm(self) -> float: ...
    @clip_norm.setter
    def clip_norm(self, arg: float, /) -> None: ...
    @property
    def bound(self) -> float: ...
    @bound.setter
    def bound(self, arg: float, /) -> None: ...
    @property
    def accumulate_last(self) -> bool: ...
    @accumulate_last.setter
    def accumulate_last(self, arg: bool, /) -> None: ...

class FeatureSpec:
    """A feature, as the model declares it; mode: pooled, padded or cells."""

    def __init__(
        self, name: str, table: str, *, dim: int, mode: str = "pooled", combiner: str = "sum", stack: int = 1
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def combiner(self) -> str: ...
    @property
    def stack(self) -> int:
        """How many keys an id has."""

class FeatureArrays:
    """
    The arrays of a feature in one batch, by address; an address of 0 means no array.

    values: the int64 keys of `cells` ids. out: the float32 vectors. offsets: int64, where each
    of `samples` starts; without, a sample has one id. weights: float32, of ids. length: the
    ids of a padded sample. uses: uint32, how many uses an id counts as; without, one.
    """

    def __init__(
        self,
        *,
        values: int,
        cells: int,
        samples: int,
        out: int,
        offsets: int = 0,
        weights: int = 0,
        length: int = 1,
        uses: int = 0,
    ) -> None: ...

class Program:
    """The features of an engine; a table's slot is its index in `tables`."""

    def __init__(self, features: Sequence[FeatureSpec]) -> None: ...
    @property
    def tables(self) -> list[str]:
        """In the order in which features first name them."""

class Gradients:
    """One gradient for each distinct key of a batch."""

    def finite(self) -> list[bool]:
        """By slot: is its gradient free of NaN and infinity?"""

    def touched(self) -> list[bool]:
        """By slot: has any key a gradient?"""

    def average(self) -> None:
        """Divides each key's sum by the number of its positions."""

    def keys_and_values(self, slot: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.float32]]: ...
    @staticmethod
    def merge(parts: Sequence[Gradients]) -> Gradients: ...
    def apply(self, rules: Sequence[Rule | None], steps: Sequence[int]) -> None: ...

class Plan:
    """One batch between its lookup and its gradients."""

    def __init__(self, program: Program, inputs: Sequence[FeatureArrays]) -> None: ...
    def unique(self, slot: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.uint32]]: ...
    def pool_from(self, vectors: Sequence[NDArray[numpy.float32]]) -> None: ...
    def reduce(self, addresses: Sequence[int], strides: Sequence[int]) -> Gradients:
        """
        Sums the gradients of the outputs by key; rows are `stride` floats apart, an address of 0 means no gradient.
        """

def prepare(program: Program, inputs: Sequence[FeatureArrays]) -> Plan:
    """
    Groups a batch's keys in advance, on the caller's thread, while other operations may run.
    """

def forward(
    program: Program,
    tables: Sequence[Table],
    inputs: Sequence[FeatureArrays],
    training: bool,
    step: int,
    now: float,
    log: LookupLog | None = None,
) -> Plan:
    """
    Groups the batch's keys, finds or inserts their rows, pools them into the outputs, applies the eviction policies.
    """

def forward_prepared(plan: Plan, tables: Sequence[Table], training: bool, step: int, now: float) -> None:
    """The same for a batch that was prepared."""

class Route:
    """The distinct keys of a plan, by the ranks that own them."""

    def __init__(self, plan: Plan, ranks: int, alone: bool) -> None:
        """alone: on the caller's thread, while other operations may run."""

    @property
    def counts(self) -> list[int]:
        """Keys, by rank and slot."""

    @property
    def keys(self) -> int: ...
    @property
    def floats(self) -> int: ...
    def pack_keys(self, message: int) -> None:
        """Writes the keys, and how often each is used, for each rank."""

    def pool(self, vectors: int) -> None:
        """
        Fills the plan's outputs from vectors in the order in which keys are sent.
        """

    def complete(self, gradients: Gradients) -> bool:
        """
        Whether every feature had a gradient, so that gradients can be sent without their keys.
        """

    def pack_gradients(self, gradients: Gradients, scale: float, out: int) -> None:
        """Writes gradients times scale in the order in which keys are sent."""

def thread_count() -> int:
    """How many threads a batch operation uses."""

def set_thread_count(count: int) -> None:
    """Sets it, from the next operation on."""

def share_team(run: int, width: int) -> None:
    """
    Operations of the first thread run on OpenMP's threads: the addresses of GOMP_parallel and omp_get_max_threads, or 0 and 0 for the core's own threads.
    """

def kernel_names() -> list[str]:
    """The kernels this machine can run, best first."""

def kernels() -> str:
    """The kernels in use."""

class Board:
    """
    Messages between the processes of one machine, through memory that they share.
    """

    def __init__(self, rank: int, ranks: int) -> None: ...
    @property
    def place(self) -> tuple[int, int]:
        """Process and file number, by which others join."""

    def join(self, places: Sequence[tuple[int, int]]) -> None: ...
    def exchange(self, send: int, to: Sequence[int], receive: int, of: Sequence[int], seconds: float) -> str:
        """
        Bytes to and from each rank. Returns done, late, lost (the process of another rank has ended) or left.
        """

    def leave(self) -> None:
        """Ends an exchange that another thread waits in, and all later ones."""

    @property
    def missing(self) -> int:
        """The rank that an exchange was late or lost for."""

class Buffer:
    """
    Uninitialised bytes from the pool, through the buffer protocol; they return to it with the object.
    """

    def __init__(self, bytes: int) -> None: ...
