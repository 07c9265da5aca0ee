"""Trains tables beside a dense reference before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

import karvan as kv
from gpu_lines.device import Device

DIM = 20
_INITIAL = 0.1


def row_bytes(samples: int) -> int:
    """Bytes of the rows, vectors and state, that a check of so many samples has."""
    return 2 * _keys(samples) * 2 * 4 * DIM


def _keys(samples: int) -> int:
    return samples // 6


def check(device: Device, samples: int = 3000, device_memory: int | None = None) -> None:
    """Train two tables for some steps beside a reference in double precision; raises if they differ.

    device_memory: bytes of rows on the device; the others are in the memory of the machine.
    """
    keys, dim, lr = _keys(samples), DIM, 0.1
    place = device.device
    tables = {"one": kv.Table(dim), "many": kv.Table(dim, combiner="mean")}
    engine = device.engine(tables, device_memory, seed=3)
    # A first accumulator of 0 would make steps of the signs of sums that are zero but for rounding.
    optimizer = kv.optim.Adagrad(engine, lr=lr, initial_accumulator_value=_INITIAL)
    every = torch.arange(keys, device=place)
    first = engine({"one": every, "many": kv.Ragged(every, torch.arange(keys + 1, device=place))})
    rows = {name: out.detach().double().requires_grad_() for name, out in first.items()}
    sums = {name: torch.full_like(vectors, _INITIAL) for name, vectors in rows.items()}

    def draw(count: int) -> Tensor:
        return torch.randint(0, keys, (count,)).to(place)

    for _ in range(5):
        one = draw(samples)
        ends = torch.randint(0, 5, (samples,)).cumsum(0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(place)
        many = draw(int(ends[-1]))
        out = engine({"one": one, "many": kv.Ragged(many, offsets)})
        lengths = offsets.diff()
        sample = torch.repeat_interleave(torch.arange(samples, device=place), lengths)
        pooled = torch.zeros(samples, dim, dtype=torch.float64, device=place)
        pooled = pooled.index_add(0, sample, rows["many"][many])
        expected = {"one": rows["one"][one], "many": pooled / lengths.clamp(min=1)[:, None]}
        weights = device.normal(samples, dim)
        for name, vectors in out.items():
            torch.testing.assert_close(vectors.double(), expected[name], rtol=1e-4, atol=1e-5)
        sum((vectors * weights).sum() for vectors in out.values()).backward()  # type: ignore[union-attr]
        sum((vectors * weights).sum() for vectors in expected.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for name, vectors in rows.items():
                gradient = vectors.grad
                assert gradient is not None
                sums[name] += gradient**2
                vectors -= lr * gradient / (sums[name].sqrt() + 1e-10)
                vectors.grad = None
