"""`WorkerLookup`: a batch that an embedding worker looks up, and whose gradients it takes.

The worker returns the outputs of all features, concatenated in one array, and their layouts. Gradients of
these outputs are sent back the same way. Whether they are finite is checked here, before they are sent, by
the gradients of those cells that have ids; a sum by key that becomes infinite later is skipped by the server
that finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from karvan.native import _native, output_buffers
from karvan.ragged import IdsReference
from karvan.store.exchange.wire_format import from_wire, to_wire
from karvan.store.program import LookupProgram
from karvan.store.remote.layout_message import LayoutArrays, unpack_layouts
from karvan.store.remote.output_layout import OutputLayout
from karvan.store.remote.pending_lookup import PendingLookup
from karvan.store.types import LookupContext
from karvan.wire import Array, Message
from karvan.wire.schema import expect_array


class Sent(NamedTuple):
    """Gradients as they are sent: one array for all features that have any, and the indices of these."""

    array: Array
    given: list[int]


class WorkerLookup(PendingLookup):
    """A batch that is, or will be, claimed from its worker.

    wire: the number format in which vectors are sent. send: asks the worker. forget: called with the number
    of a lookup that nobody holds any more, at any moment.
    """

    plan = None  # the worker has it

    def __init__(
        self,
        program: LookupProgram,
        reference: IdsReference,
        context: LookupContext,
        *,
        wire: str,
        send: Callable[[WorkerLookup], Future[Message]],
        forget: Callable[[int], None],
    ) -> None:
        super().__init__(program, context)
        self._send = send
        self._forget = forget
        self._wire = wire
        self.reference = reference
        self._answer: Future[Message] | None = None
        self._arrival: list[float] = []  # the time when the answer came, if it has
        self._outs: list[Tensor] = []
        self.layouts: list[OutputLayout] = []

    def _ask(self) -> None:
        self._answer = self._send(self)
        arrival = self._arrival
        self._answer.add_done_callback(lambda _: arrival.append(time.monotonic()))

    @override
    def ready(self) -> tuple[bool, float]:
        return not self._arrival, self._arrival[0] if self._arrival else 0.0

    @override
    def finish(self) -> None:
        assert self._answer is not None
        answer, self._answer = self._answer.result(), None
        vectors = answer.arrays[0]
        self.layouts = unpack_layouts(self.program, answer.head["layouts"], LayoutArrays(*answer.arrays[1:]))
        features = list(zip(self.program.features, self.layouts, strict=True))
        size = sum(_cells(feature.mode, layout) * feature.dim for feature, layout in features)
        expect_array(vectors, "vectors", "float32" if self._wire == "float32" else "uint16", size)
        flat = from_wire(vectors, self._wire)
        at = 0
        for feature, layout in features:
            out = output_buffers.empty(_cells(feature.mode, layout), feature.dim)
            np.copyto(out.numpy().reshape(-1), flat[at : at + out.numel()])
            at += out.numel()
            self._outs.append(out)

    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        """Wait for the answer of the worker, and give it to the plan."""
        outs, self._outs = self._outs, []
        return list(zip(outs, self.layouts, strict=True))

    def pack(self, gradients: Sequence[Tensor | None]) -> Sent:
        """Gradients of the outputs as they are sent."""
        indices = [index for index, each in enumerate(gradients) if each is not None]
        floats = [each.detach().reshape(-1) for each in gradients if each is not None]
        return Sent(to_wire(torch.cat(floats), self._wire), indices)

    def finite(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Whether a table's gradients are finite; those of cells without an id do not count."""
        return self._by_table(gradients, _finite, all)

    def touched(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Whether any key of a table has a gradient."""
        return self._by_table(gradients, lambda mode, layout, each: layout.ids > 0, any)

    def _by_table(
        self,
        gradients: Sequence[Tensor | None],
        one: Callable[[str, OutputLayout, Tensor], bool],
        of: Callable[[list[bool]], bool],
    ) -> list[bool]:
        found: dict[str, list[bool]] = {table: [] for table in self.program.tables}
        for feature, layout, gradient in zip(self.program.features, self.layouts, gradients, strict=True):
            if gradient is not None:
                found[feature.table].append(one(feature.mode, layout, gradient))
        return [of(each) for each in found.values()]

    def __del__(self) -> None:
        if self.number:
            self._forget(self.number)


def _cells(mode: str, layout: OutputLayout) -> int:
    if mode == "pooled":
        return layout.samples
    return layout.ids if mode == "cells" else layout.samples * layout.length


def _finite(mode: str, layout: OutputLayout, gradient: Tensor) -> bool:
    flat = gradient.contiguous()
    if _native.all_finite([flat.data_ptr()], [flat.numel()]):
        return True
    bad = ~torch.isfinite(gradient).all(1)
    if mode == "pooled":
        bad = bad & (layout.lengths() > 0)
    elif mode == "padded":
        bad = bad & layout.mask().reshape(-1)
    return not bool(bad.any())
