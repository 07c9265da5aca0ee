"""`WorkerLookup`: a batch that an embedding worker looks up, and whose gradients it takes.

The worker gives the outputs of all features, one behind the other in one array, and how they are laid out.
Gradients of these outputs return the same way. Whether they are finite is seen here, before they are sent, by
the gradients of those cells that have ids; a sum by key that becomes infinite later is left out by the server
that finds it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from karvan import _native, output_buffers
from karvan.ragged import IdsReference
from karvan.store.base import LookupProgram
from karvan.store.exchange.wire_format import from_wire, to_wire
from karvan.store.remote.output_layout import OutputLayout
from karvan.store.remote.pending_lookup import PendingLookup
from karvan.wire import Array, Message, RefusedError
from karvan.wire.schema.calls import expect_array


class Sent(NamedTuple):
    """Gradients as they travel: one array for all features that have any, and which those are."""

    array: Array
    given: list[int]


class WorkerLookup(PendingLookup):
    """A batch that is to be claimed, or is.

    wire: what vectors travel as. send: asks the worker. forget: is called with the number of a lookup that
    nobody holds any more, at any moment.
    """

    plan = None  # the worker has it

    def __init__(
        self,
        program: LookupProgram,
        reference: IdsReference,
        *,
        wire: str,
        send: Callable[[WorkerLookup], Future[Message]],
        forget: Callable[[int], None],
        training: bool,
        step: int,
        now: float,
    ) -> None:
        super().__init__(program, training=training, step=step, now=now)
        self._send = send
        self._forget = forget
        self._wire = wire
        self.reference = reference
        self._answer: Future[Message] | None = None
        self._there: list[float] = []  # when the answer came
        self._outs: list[Tensor] = []
        self.laid: list[OutputLayout] = []

    def _ask(self) -> None:
        self._answer = self._send(self)
        there = self._there
        self._answer.add_done_callback(lambda _: there.append(time.monotonic()))

    def ready(self) -> tuple[bool, float]:
        """See `PendingLookup.ready`."""
        return not self._there, self._there[0] if self._there else 0.0

    def finish(self) -> None:
        """See `PendingLookup.finish`."""
        assert self._answer is not None
        answer, self._answer = self._answer.result(), None
        vectors, offsets = answer.arrays
        self._check(answer)
        flat = from_wire(vectors, self._wire)
        at = at_offset = 0
        for feature, (rows, ids, length, has_offsets) in zip(
            self.program.features, answer.head["laid"], strict=True
        ):
            begins: Tensor | None = None
            if has_offsets:
                begins = torch.from_numpy(offsets[at_offset : at_offset + rows + 1].copy())
                at_offset += rows + 1
            laid = OutputLayout(rows, ids, length, begins)
            out = output_buffers.empty(_cells(feature.mode, laid), feature.dim)
            np.copyto(out.numpy().reshape(-1), flat[at : at + out.numel()])
            at += out.numel()
            self._outs.append(out)
            self.laid.append(laid)

    def _check(self, answer: Message) -> None:
        """The arrays are as large as the layouts say, and offsets lead to the ids that there are."""
        vectors, offsets = answer.arrays
        laid = answer.head["laid"]
        if len(laid) != len(self.program.features):
            raise RefusedError(f"expected {len(self.program.features)} features, got {len(laid)}.")
        size = at = 0
        for feature, (rows, ids, length, has_offsets) in zip(self.program.features, laid, strict=True):
            size += _cells(feature.mode, OutputLayout(rows, ids, length, None)) * feature.dim
            if has_offsets:
                begins = offsets[at : at + rows + 1]
                at += rows + 1
                ends = len(begins) == rows + 1 and begins[0] == 0 and begins[-1] == ids
                if not ends or (np.diff(begins) < 0).any():
                    raise RefusedError(f"expected offsets of {rows} rows and {ids} ids for '{feature.name}'.")
        expect_array(vectors, "vectors", "float32" if self._wire == "float32" else "uint16", size)
        expect_array(offsets, "offsets", "int64", at)

    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        """See `RemoteLookup.take`."""
        outs, self._outs = self._outs, []
        return list(zip(outs, self.laid, strict=True))

    def pack(self, gradients: Sequence[Tensor | None]) -> Sent:
        """Gradients of the outputs as they travel."""
        given = [place for place, each in enumerate(gradients) if each is not None]
        floats = [each.detach().reshape(-1) for each in gradients if each is not None]
        return Sent(to_wire(torch.cat(floats), self._wire), given)

    def finite(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Whether a table's gradients are finite; those of cells without an id do not count."""
        return self._by_table(gradients, _finite, all)

    def touched(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Whether any key of a table has a gradient."""
        return self._by_table(gradients, lambda mode, laid, each: laid.ids > 0, any)

    def _by_table(
        self,
        gradients: Sequence[Tensor | None],
        one: Callable[[str, OutputLayout, Tensor], bool],
        of: Callable[[list[bool]], bool],
    ) -> list[bool]:
        found: dict[str, list[bool]] = {table: [] for table in self.program.tables}
        for feature, laid, gradient in zip(self.program.features, self.laid, gradients, strict=True):
            if gradient is not None:
                found[feature.table].append(one(feature.mode, laid, gradient))
        return [of(each) for each in found.values()]

    def __del__(self) -> None:
        if self.number:
            self._forget(self.number)


def watch(reference: IdsReference, gone: Callable[[IdsReference], None]) -> None:
    """Call `gone` with one like it, once nobody holds the reference any more."""
    like = IdsReference(reference.worker, reference.name, reference.rows)
    weakref.finalize(reference, gone, like).atexit = False


def _cells(mode: str, laid: OutputLayout) -> int:
    if mode == "pooled":
        return laid.rows
    return laid.ids if mode == "cells" else laid.rows * laid.length


def _finite(mode: str, laid: OutputLayout, gradient: Tensor) -> bool:
    flat = gradient.contiguous()
    if _native.all_finite([flat.data_ptr()], [flat.numel()]):
        return True
    bad = ~torch.isfinite(gradient).all(1)
    if mode == "pooled":
        bad = bad & (laid.lengths() > 0)
    elif mode == "padded":
        bad = bad & laid.mask().reshape(-1)
    return not bool(bad.any())
