"""The error that `torch.export` and `torch.jit` get from an engine, with what to do instead.

Rows live in a store outside of the graph and change in training, so a graph cannot hold a lookup. An export
without this error would fail deep inside of torch, and `torch.jit.trace` would make a model that returns the
vectors of its example batch for every batch.
"""

from __future__ import annotations

import torch


def refuse_export() -> None:
    """Raise if the call is being recorded as a graph that will run without the engine."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if tracing or torch.compiler.is_exporting():
        raise RuntimeError(
            "An EmbeddingEngine cannot be exported: its rows live outside of the graph. Export the rest "
            "of the model, torch.export.export(model.net, (vectors,)), and call model.embeddings(batch) for "
            "its vectors; kv.checkpoint saves the rows. A model of kv.models has no single net after "
            "its embeddings: export its parts (model.named_children() lists them), or write a "
            "module that takes the vectors and calls these parts. torch.compile(model) works as it is."
        )
