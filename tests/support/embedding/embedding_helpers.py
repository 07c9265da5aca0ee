"""Small pieces that the tests of this folder share."""

import torch

import karvan as kv


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def one(dim=2, shards=16, **options):
    """An engine with the single feature f, and the handle of its table."""
    engine = kv.EmbeddingEngine({"f": kv.Table(dim, **options)}, shards=shards)
    return engine, engine.table("f")


def keys_of(handle):
    return sorted(handle.keys().tolist())


def train(engine, opt, gradient=1.0, **batch):
    """One step in which every output entry has the same gradient."""
    out = engine(batch)
    sum((out[name] * gradient).sum() for name in batch).backward()
    opt.step()
    opt.zero_grad()
