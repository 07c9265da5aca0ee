"""The slow, obvious reference: a dict of rows, plain loops over ids, torch.optim on dense tensors.

Every combiner is linear, so a lookup is a list of (slot of the output, key, coefficient): the output adds up
coefficient · vector over it, and the gradient of a key adds up coefficient · gradient of the slot.
Where torch.optim has the same rule it makes the update; `formula` methods are for the rules that it lacks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

RTOL, ATOL = 3e-5, 2e-6
MASK64 = 2**64 - 1
PADDED = ("sequence", "tile", "index")
ONE_PER_ROW = ("sum", "mean", "sqrtn", "mean_by_count", "mean_by_density")

# name -> (class of kv.optim, its arguments); clipping is kept apart from weight decay on purpose.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "sgd-clip-value": ("SGD", {"lr": 0.1, "clip_value": 0.5}),
    "sgd-bound": ("SGD", {"lr": 0.1, "weight_bound": 0.05}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adagrad-l2": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.01}),
    "adagrad-decay": ("Adagrad", {"lr": 0.1, "decay": 0.9, "eps": 1e-3}),
    "adagrad-last": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1, "accumulate": "last"}),
    "adagrad-row": ("Adagrad", {"lr": 0.1, "row_wise": True, "weight_decay": 0.01}),
    "adagrad-row-last": (
        "Adagrad",
        {"lr": 0.1, "row_wise": True, "accumulate": "last", "initial_accumulator_value": 0.2},
    ),
    "adagrad-clip-norm": ("Adagrad", {"lr": 0.1, "clip_norm": 0.7}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam-l2": ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.01}),
    "adamw-amsgrad": ("AdamW", {"lr": 0.01, "betas": (0.8, 0.7), "weight_decay": 0.1, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamwtf": ("AdamWTF", {"lr": 0.01, "weight_decay": 0.001}),
    "ftrl": ("FTRL", {"lr": 0.1, "l1": 0.01, "l2": 0.1}),
    "ftrl-start": ("FTRL", {"lr": 0.1, "beta": 0.5, "l1": 0.3, "initial_accumulator_value": 0.1}),
    "ftrl-tf": ("FTRLTF", {"lr": 0.1, "l1": 0.01, "l2": 0.1}),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def signed(key: int) -> int:
    """The int64 that has the key's 64 bits."""
    return (key & MASK64) - (2**64 if key & 2**63 else 0)


def farm64(key: int) -> int:
    """FarmHash64 of the key's eight little-endian bytes."""
    k2, mul = 0x9AE16A3B2F90404F, 0x9AE16A3B2F90404F + 16

    def rotate(x: int, by: int) -> int:
        return (x >> by | x << (64 - by)) & MASK64

    b = key & MASK64
    a = (b + k2) & MASK64
    c = (rotate(b, 37) * mul + a) & MASK64
    d = (rotate(a, 25) + b) * mul & MASK64
    x = (c ^ d) * mul & MASK64
    y = ((x ^ x >> 47) ^ d) * mul & MASK64
    return (y ^ y >> 47) * mul & MASK64


def mix(key: int) -> int:
    """The hash of a key, from the definition in csrc/hash/mix.h."""
    key &= MASK64
    for _ in range(2):
        key ^= key >> 32
        key = key * 0xD6E8FEB86659FD93 & MASK64
    return key ^ key >> 32


def draw(state: int, number: int) -> int:
    """Output `number` of SplitMix64 that starts at `state`, from the definition in csrc/hash/mix.h."""
    z = (state + (number + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def hash_stack(key: int, rounds: int, size: int) -> list[int]:
    """The `rounds` keys that stand for one id."""
    hashes = list(itertools.accumulate(range(rounds), lambda h, _: farm64(h), initial=key))[1:]
    return [h % size + i * size for i, h in enumerate(hashes)]


@dataclass(frozen=True)
class Feature:
    """What a `kv.Table` says about one feature."""

    dim: int
    combiner: str = "sum"
    length: int | None = None
    stack: tuple[int, int] | None = None
    use_weights: bool = True


@dataclass
class Lookup:
    """One feature of one batch, taken apart into its contributions."""

    feature: Feature
    shape: tuple[int, ...]
    terms: list[tuple[int, int, float]]  # slot, key, coefficient
    mask: Tensor | None = None

    @property
    def occurrences(self) -> Counter[int]:
        return Counter(key for _, key, _ in self.terms)

    def forward(self, vector: Callable[[int], Tensor]) -> Tensor:
        out = torch.zeros(self.shape, dtype=torch.float64).reshape(-1, self.feature.dim)
        for slot, key, coefficient in self.terms:
            out[slot] += coefficient * vector(key).double()
        return out.reshape(self.shape)

    def backward(self, gradient: Tensor) -> dict[int, Tensor]:
        slots = gradient.double().reshape(-1, self.feature.dim)
        result: dict[int, Tensor] = {}
        for slot, key, coefficient in self.terms:
            result[key] = result.get(key, 0) + coefficient * slots[slot]
        return result


def look_up(feature: Feature, rows: list[list[int]], weights: list[list[float]] | None = None) -> Lookup:
    """Take one feature's rows of ids apart; unpooled combiners multiply each vector by its weight."""
    weights = weights if feature.use_weights else None
    if feature.combiner in PADDED and feature.length is not None:
        rows = [row[: feature.length] for row in rows]
        weights = None if weights is None else [w[: feature.length] for w in weights]
    longest = max((len(row) for row in rows), default=0) if feature.length is None else feature.length
    terms = []
    entry = 0
    combiner = feature.combiner
    if combiner == "mean_by_density":
        combiner = "mean_by_count" if sum(map(len, rows)) / (len(rows) + 1) > 5 else "mean"
    for i, row in enumerate(rows):
        w = [1.0] * len(row) if weights is None else weights[i]
        divisors = {"mean": sum(w), "mean_by_count": len(w), "sqrtn": sum(x * x for x in w) ** 0.5}
        divisor = divisors.get(combiner, 1.0)
        for j, key in enumerate(row):
            slot = i if feature.combiner in ONE_PER_ROW else entry
            slot = i * longest + j if feature.combiner in PADDED else slot
            for real in hash_stack(key, *feature.stack) if feature.stack else [signed(key)]:
                terms.append((slot, real, w[j] / divisor))
            entry += 1
    batch, dim = len(rows), feature.dim
    shapes = {"sequence": (batch, longest, dim), "tile": (batch, longest * dim), "ragged": (entry, dim)}
    shapes["index"] = shapes["sequence"]
    shape = shapes.get(feature.combiner, (batch, dim))
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(longest) < lengths[:, None] if feature.combiner in ("sequence", "index") else None
    return Lookup(feature, shape, terms, mask)


def torch_step(
    cls: type[torch.optim.Optimizer], p: Tensor, g: Tensor, state: dict[str, Any], **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    """One step of a torch optimizer on the parameter p, from the given state."""
    parameter = torch.nn.Parameter(p.clone())
    optimizer = cls([parameter], **options)
    parameter.grad = g.clone()
    if cls is torch.optim.SparseAdam:
        parameter.grad = torch.sparse_coo_tensor(
            torch.arange(len(g))[None], g, g.shape, check_invariants=True
        )
    optimizer.state[parameter].update(
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    )
    optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


class Rule:
    """One sparse optimizer, over a block of rows: p, g (n, dim); each state column (n, dim) or (n, 1)."""

    columns: tuple[str, ...] = ()

    def __init__(self, lr, clip_value=None, clip_norm=None, weight_bound=None, **options) -> None:
        self.lr, self.clip_value, self.clip_norm, self.weight_bound = lr, clip_value, clip_norm, weight_bound
        assert set(options) <= set(self.defaults()), options
        self.__dict__.update(self.defaults() | options)

    def defaults(self) -> dict[str, Any]:
        return {}

    def initial(self, n: int, dim: int) -> dict[str, Tensor]:
        return {name: torch.zeros(n, dim) for name in self.columns}

    def apply(self, p: Tensor, g: Tensor, state: dict[str, Tensor], t: int):
        if self.clip_value is not None:
            g = g.clamp(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            g = g * (self.clip_norm / g.norm(dim=1, keepdim=True)).clamp(max=1.0)
        p, state = self.update(p, g, state, t)
        if self.weight_bound is not None:
            p = p.clamp(-self.weight_bound, self.weight_bound)
        return p, {name: state[name] for name in self.columns}

    def update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> tuple[Tensor, dict[str, Any]]:
        raise NotImplementedError


class SGD(Rule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.columns = ("momentum_buffer",) if self.momentum else ()

    def defaults(self):
        return {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}

    def update(self, p, g, state, t):
        options = {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        options["nesterov"] = self.nesterov
        return torch_step(torch.optim.SGD, p, g, state, **options)


class Adagrad(Rule):
    columns = ("sum",)

    def defaults(self):
        return {
            "eps": 1e-10,
            "initial_accumulator_value": 0.0,
            "weight_decay": 0.0,
            "decay": 1.0,
            "row_wise": False,
            "accumulate": "first",
        }

    def initial(self, n, dim):
        return {"sum": torch.full((n, 1 if self.row_wise else dim), float(self.initial_accumulator_value))}

    def update(self, p, g, state, t):
        if self.decay != 1.0 or self.row_wise or self.accumulate == "last":
            return self.formula(p, g, state)
        options = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        return torch_step(torch.optim.Adagrad, p, g, state, **options)

    def formula(self, p, g, state):
        g = g + self.weight_decay * p
        square = (g * g).mean(dim=1, keepdim=True) if self.row_wise else g * g
        old, new = state["sum"], self.decay * state["sum"] + square
        used = old if self.accumulate == "last" else new
        return p - self.lr * g / (used.sqrt() + self.eps), {"sum": new}


class Adam(Rule):
    columns = ("exp_avg", "exp_avg_sq")

    def __init__(self, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(lr=lr, **options)
        if self.amsgrad:
            self.columns = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def defaults(self):
        return {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}

    def update(self, p, g, state, t):
        return self.moments(p, g + self.weight_decay * p, state, t)

    def moments(self, p, g, state, t):
        if self.amsgrad:
            return self.formula(p, g, state, t)
        options = {"lr": self.lr, "betas": self.betas, "eps": self.eps}
        return torch_step(torch.optim.SparseAdam, p, g, {"step": t - 1, **state}, **options)

    def formula(self, p, g, state, t):
        first, second = self.betas
        m = first * state["exp_avg"] + (1 - first) * g
        v = second * state["exp_avg_sq"] + (1 - second) * g * g
        most = torch.maximum(state["max_exp_avg_sq"], v)
        rate = self.lr * (1 - second**t) ** 0.5 / (1 - first**t)
        made = {"exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": most}
        return p - rate * m / (most.sqrt() + self.eps), made


class AdamW(Adam):
    def defaults(self):
        return super().defaults() | {"weight_decay": 0.01}

    def update(self, p, g, state, t):
        return self.moments(p * (1 - self.lr * self.weight_decay), g, state, t)


class AdamWTF(AdamW):
    def update(self, p, g, state, t):
        return self.moments(p * (1 - self.weight_decay), g, state, t)


class FTRL(Rule):
    columns = ("z", "n")

    def defaults(self):
        return {"beta": 1.0, "l1": 0.0, "l2": 0.0, "initial_accumulator_value": 0.0}

    def initial(self, n, dim):
        return {"z": torch.zeros(n, dim), "n": torch.full((n, dim), float(self.initial_accumulator_value))}

    def update(self, p, g, state, t):
        z, n = state["z"], state["n"]
        sigma = ((n + g * g).sqrt() - n.sqrt()) / self.lr
        z = z + g - sigma * p
        n = n + g * g
        p = -(z - z.sign() * self.l1) / ((self.beta + n.sqrt()) / self.lr + self.l2)
        return torch.where(z.abs() <= self.l1, 0.0, p), {"z": z, "n": n}


class FTRLTF(FTRL):
    """As TensorFlow's documentation writes it, with a learning rate power of -0.5."""

    def defaults(self):
        return {"beta": 0.0, "l1": 0.0, "l2": 0.0, "initial_accumulator_value": 0.1}

    def update(self, p, g, state, t):
        z, n = state["z"], state["n"]
        after = n + g * g
        z = z + g - (after**0.5 - n**0.5) / self.lr * p
        quadratic = after**0.5 / self.lr + 2 * (self.l2 + self.beta / (2 * self.lr))
        p = torch.where(z.abs() > self.l1, (z.sign() * self.l1 - z) / quadratic, 0.0)
        return p, {"z": z, "n": after}


def make_rule(name: str) -> Rule:
    """The rule of an entry of OPTIMIZERS."""
    cls, options = OPTIMIZERS[name]
    return {c.__name__: c for c in (SGD, Adagrad, Adam, AdamW, AdamWTF, FTRL, FTRLTF)}[cls](**options)


@dataclass
class Row:
    vector: Tensor
    state: dict[str, Tensor]
    count: int = 0
    last_step: int = 0


@dataclass
class ReferenceTable:
    """A table as a dict; `init` gives the first vector of a key."""

    dim: int
    rule: Rule
    init: Callable[[int], Tensor]
    dtype: torch.dtype = torch.float32
    rows: dict[int, Row] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    t: int = 0
    dropped: int = 0
    skipped: int = 0

    def see(self, occurrences: Counter[int], step: int) -> None:
        """What a training lookup does: insert, count, stamp."""
        for key, times in occurrences.items():
            if key not in self.rows:
                state = {name: column[0] for name, column in self.rule.initial(1, self.dim).items()}
                self.rows[key] = Row(self.init(key).clone(), state)
            self.rows[key].count += times
            self.rows[key].last_step = step

    def vector(self, key: int) -> Tensor:
        return self.rows[key].vector if key in self.rows else torch.zeros(self.dim)

    def apply(self, gradients: dict[int, Tensor], gone: Iterable[int] = ()) -> None:
        """One optimizer step; `gone` are keys whose row went away since the lookup."""
        if any(not g.isfinite().all() for g in gradients.values()):
            self.skipped += 1
            return
        self.dropped += len(set(gone) & set(gradients))
        keys = [key for key in gradients if key not in set(gone)]
        if not keys:
            return
        self.t += 1
        p = torch.stack([self.rows[key].vector for key in keys])
        g = torch.stack([gradients[key] for key in keys]).float()
        state = {n: torch.stack([self.rows[key].state[n] for key in keys]) for n in self.rule.columns}
        p, state = self.rule.apply(p, g, state, self.t)
        for i, key in enumerate(keys):
            self.rows[key].vector = p[i]
            self.rows[key].state = {name: column[i] for name, column in state.items()}
        self.touched.update(keys)

    def evict(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.rows.pop(key, None)


def add_gradients(*parts: dict[int, Tensor]) -> dict[int, Tensor]:
    """The sum of several gradients per key."""
    total: dict[int, Tensor] = {}
    for part in parts:
        for key, gradient in part.items():
            total[key] = total.get(key, 0) + gradient
    return total


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between the two neighbours of x that the dtype can store."""
    smallest = torch.finfo(dtype).smallest_normal
    exponent = x.abs().clamp(min=smallest).log2().floor()
    return torch.exp2(exponent) * torch.finfo(dtype).eps


def sort_rows(rows: Any) -> dict[str, Tensor]:
    """A `Rows` as a dict of tensors, sorted by key; counts and steps as int64."""
    parts = {name: torch.as_tensor(getattr(rows, name)) for name in ("keys", "vectors", "state")}
    parts |= {
        name: torch.tensor(getattr(rows, name).tolist(), dtype=torch.int64)
        for name in ("counts", "last_steps")
    }
    order = parts["keys"].argsort()
    return {name: part[order] for name, part in parts.items()}


def check_table(handle: Any, table: ReferenceTable) -> None:
    """Compare a real table with the reference, then go on from the real values.

    Rows without a gradient since the last check are bit-equal. The others agree within float tolerance, and a
    16-bit vector is one of the two neighbours of the float32 result, as stochastic rounding leaves it.
    """
    real = sort_rows(handle.snapshot())
    keys = sorted(table.rows)
    assert real["keys"].tolist() == keys
    assert handle.rows == len(keys)
    assert real["counts"].tolist() == [table.rows[key].count for key in keys]
    assert real["last_steps"].tolist() == [table.rows[key].last_step for key in keys]
    for i, key in enumerate(keys):
        row, vector = table.rows[key], real["vectors"][i]
        widths = [row.state[name].shape[0] for name in table.rule.columns]
        state = dict(zip(table.rule.columns, real["state"][i].split(widths), strict=True))
        if key in table.touched:
            near = ATOL + RTOL * row.vector.abs()
            if table.dtype != torch.float32:
                near = near + spacing(row.vector, table.dtype)
            assert ((vector - row.vector).abs() <= near).all(), (key, vector, row.vector)
            for name, expected in row.state.items():
                torch.testing.assert_close(state[name], expected, rtol=RTOL, atol=ATOL)
        else:
            assert torch.equal(vector, row.vector), (key, vector, row.vector)
            assert all(torch.equal(state[name], row.state[name]) for name in table.rule.columns), key
        row.vector, row.state = vector, state
    table.touched.clear()
