"""Lookups and updates that embedding workers carry out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from karvan.distributed.embedding_workers import Workers
from karvan.distributed.parameter_servers import Servers
from karvan.native import _native
from karvan.protocol.embedding_worker import BACKWARD, CLAIM, Backward, Layouts
from karvan.ragged import IdsReference
from karvan.store.messages import from_wire, to_wire
from karvan.store.program import LookupProgram, OutputLayout, RowIndex, empty
from karvan.store.remote.staleness_window import Countdown, LookupsInFlight, PendingLookup
from karvan.store.types import LookupContext
from karvan.wire import Array, Message, RefusedError
from karvan.wire.schema import expect_array

# The layouts of a batch's outputs as a message, from the embedding worker that computes them.


class LayoutArrays(NamedTuple):
    """The arrays of the layouts of all features, each concatenated."""

    offsets: Array
    rows: Array
    weights: Array


def pack_layouts(layouts: Sequence[OutputLayout]) -> tuple[list[list[Any]], LayoutArrays]:
    """The sizes of layouts, and their arrays."""
    sizes = []
    offsets: list[Array] = [np.empty(0, np.int64)]
    rows: list[Array] = [np.empty(0, np.int32)]
    weights: list[Array] = [np.empty(0, np.float32)]
    for layout in layouts:
        row_index = layout.row_index
        described: list[Any] | None = None
        if layout.offsets is not None:
            offsets.append(layout.offsets.numpy())
        if row_index is not None:
            described = [row_index.vectors, *row_index.rows.shape, row_index.weights is not None]
            rows.append(row_index.rows.reshape(-1).to(torch.int32).numpy())
            if row_index.weights is not None:
                weights.append(row_index.weights.reshape(-1).numpy())
        sizes.append([layout.samples, layout.ids, layout.length, layout.offsets is not None, described])
    return sizes, LayoutArrays(np.concatenate(offsets), np.concatenate(rows), np.concatenate(weights))


def unpack_layouts(
    program: LookupProgram, sizes: Sequence[Sequence[Any]], arrays: LayoutArrays
) -> list[OutputLayout]:
    """The layouts of a program's features; a RefusedError unless arrays are as large as their sizes say.

    Offsets are within the ids, and an index within the vectors.
    """
    if len(sizes) != len(program.features):
        raise RefusedError(f"expected {len(program.features)} features, got {len(sizes)}.")
    offsets, rows, weights = map(_Parts, arrays)
    outputs = []
    for feature, (samples, ids, length, has_offsets, described) in zip(program.features, sizes, strict=True):
        title = f"'{feature.name}'"
        begins = row_index = None
        if has_offsets:
            offsets_part = offsets.next(samples + 1)
            ends = len(offsets_part) == samples + 1 and offsets_part[0] == 0 and offsets_part[-1] == ids
            if not ends or (np.diff(offsets_part) < 0).any():
                raise RefusedError(f"expected offsets of {samples} samples and {ids} ids for {title}.")
            begins = torch.from_numpy(offsets_part.copy())
        if (described is not None) != (program.features_json[feature.name][2] == "index"):
            raise RefusedError(f"expected an index for features with that combiner only, got {title}.")
        if described is not None:
            vectors, *shape, has_weights = described
            cells = shape[0] * shape[1]
            offsets_part = rows.next(cells)
            if len(offsets_part) != cells or not 0 < vectors <= samples or not _within(offsets_part, vectors):
                expected = f"expected an index of {shape[0]} samples into {vectors} of {samples} vectors"
                raise RefusedError(f"{expected} for {title}.")
            row_index = RowIndex(vectors, torch.from_numpy(offsets_part.astype(np.int64)).view(*shape), None)
            if has_weights:
                offsets_part = weights.next(cells)
                if len(offsets_part) != cells:
                    raise RefusedError(f"expected {cells} weights for {title}, got {len(offsets_part)}.")
                row_index = row_index._replace(weights=torch.from_numpy(offsets_part.copy()).view(*shape))
        outputs.append(OutputLayout(samples, ids, length, begins, row_index))
    for name, parts in (("offsets", offsets), ("rows", rows), ("weights", weights)):
        expect_array(parts.array, name, parts.array.dtype.name, parts.at)
    return outputs


class _Parts:
    """An array that is read part by part."""

    def __init__(self, array: Array) -> None:
        self.array, self.at = array, 0

    def next(self, size: int) -> Array:
        """The next part, shorter where the array ends."""
        self.at += size
        return self.array[self.at - size : self.at]


def _within(rows: Array, vectors: int) -> bool:
    return not len(rows) or bool(rows.min() >= 0 and rows.max() < vectors)


# `WorkerLookup`: a batch that an embedding worker looks up, and whose gradients it takes.
#
# The worker returns the outputs of all features, concatenated in one array, and their layouts. Gradients of
# these outputs are sent back the same way. Whether they are finite is checked here, before they are sent, by
# the gradients of those cells that have ids; a sum by key that becomes infinite later is skipped by the
# server that finds it.


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
        send: Callable[[WorkerLookup], Future[Message[Layouts]]],
        forget: Callable[[int], None],
    ) -> None:
        super().__init__(program, context)
        self._send = send
        self._forget = forget
        self._wire = wire
        self.reference = reference
        self._answer: Future[Message[Layouts]] | None = None
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
        self.layouts = unpack_layouts(self.program, answer.head.layouts, LayoutArrays(*answer.arrays[1:]))
        features = list(zip(self.program.features, self.layouts, strict=True))
        size = sum(layout.rows(feature.mode) * feature.dim for feature, layout in features)
        expect_array(vectors, "vectors", "float32" if self._wire == "float32" else "uint16", size)
        flat = from_wire(vectors, self._wire)
        at = 0
        for feature, layout in features:
            out = empty(layout.rows(feature.mode), feature.dim)
            np.copyto(out.numpy().reshape(-1), flat[at : at + out.numel()])
            at += out.numel()
            self._outs.append(out)

    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        """Wait for the answer of the worker, and give it to the plan."""
        outs, self._outs = self._outs, []
        return list(zip(outs, self.layouts, strict=True))

    def pack(self, gradients: Sequence[Tensor | None]) -> Sent:
        """Gradients of the outputs as they are sent."""
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        floats = [gradient.detach().reshape(-1) for gradient in gradients if gradient is not None]
        return Sent(to_wire(torch.cat(floats), self._wire), indices)

    def finite(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Whether a table's gradients are finite; those of cells without an id do not count."""
        return self._by_table(gradients, _finite, all)

    def touched(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Whether any key of a table has a gradient."""
        return self._by_table(gradients, lambda mode, layout, gradient: layout.ids > 0, any)

    def _by_table(
        self,
        gradients: Sequence[Tensor | None],
        condition: Callable[[str, OutputLayout, Tensor], bool],
        of: Callable[[list[bool]], bool],
    ) -> list[bool]:
        by_table: dict[str, list[bool]] = {table: [] for table in self.program.tables}
        for feature, layout, gradient in zip(self.program.features, self.layouts, gradients, strict=True):
            if gradient is not None:
                by_table[feature.table].append(condition(feature.mode, layout, gradient))
        return [of(bits) for bits in by_table.values()]

    def __del__(self) -> None:
        if self.number:
            self._forget(self.number)


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


# `WorkerBatches`: the batches whose ids embedding workers hold.
#
# A worker looks the ids up on behalf of the trainer, and sums the gradients of its outputs by key. Batches
# and pushes have the trainer's numbers, so a worker that replaces another can repeat its requests: servers
# do each only once.


@dataclass
class WorkerBatches:
    """Lookups that workers make, and the gradients that return to them."""

    _workers: Workers
    _servers: Servers
    _store: int
    _wire: str
    _lookups: LookupsInFlight

    def __len__(self) -> int:
        return len(self._workers)

    def make(self, program: LookupProgram, reference: IdsReference, context: LookupContext) -> WorkerLookup:
        """A lookup of a batch by the worker that has its ids."""
        self._workers.watch(reference)
        return WorkerLookup(
            program,
            reference,
            context,
            wire=self._wire,
            send=self._send,
            forget=partial(self._lookups.drop, reference.worker),
        )

    def _send(self, lookup: WorkerLookup) -> Future[Message[Layouts]]:
        if lookup.context.training:
            self._lookups.add(lookup.number)
        worker = lookup.reference.worker
        head = {
            "engine": lookup.program.name,
            "store": self._store,
            "batch": lookup.number,
            "reference": lookup.reference.name,
            **asdict(lookup.context),
            **self._released(worker),
        }
        return self._workers.begin(
            *(worker, "claim", CLAIM, head),
            engine=self._engine(lookup),
            references=[lookup.reference],
            # A worker does not know what this trainer has committed: servers must, before they are asked.
            first=self._servers.commits.flush,
            then=self._note_restarts,
        )

    def push(
        self,
        worker: int,
        head: Mapping[str, Any],
        lookups: Sequence[WorkerLookup],
        gradients: Sequence[Sent],
        pending: Countdown,
    ) -> None:
        """Send gradients of outputs to a worker; `pending` counts its answer."""
        sent = {
            **head,
            "engine": lookups[0].program.name,
            "passes": [
                {"reference": lookup.reference.name, "given": gradient.given}
                for lookup, gradient in zip(lookups, gradients, strict=True)
            ],
            **self._released(worker),
        }
        self._workers.begin(
            *(worker, "backward", BACKWARD, sent, [gradient.array for gradient in gradients]),
            engine=self._engine(lookups[0]),
            references=[lookup.reference for lookup in lookups],
            then=partial(self._pushed, pending),
        )

    def _pushed(self, pending: Countdown, answer: Message[Backward] | Exception) -> None:
        """The gradients that were sent to a worker have been applied, or staged."""
        self._note_restarts(answer)
        pending.one(answer if isinstance(answer, Exception) else None)

    def _note_restarts(self, answer: Message[Any] | Exception) -> None:
        """A worker reports servers that have restarted."""
        for server, life in answer.head.restarted_servers if isinstance(answer, Message) else ():
            self._servers.report_restart(server, life)

    def _engine(self, lookup: WorkerLookup) -> dict[str, Any]:
        return {
            "engine": lookup.program.name,
            "features": lookup.program.features_json,
            "wire": self._wire,
            "tables": self._servers.declared,
            "declarations": self._servers.declarations,
        }

    def _released(self, worker: int) -> dict[str, Any]:
        """What a worker, and the servers through it, can release, and the declarations it should know."""
        return {
            "done": self._lookups.take_done(worker),
            "gone": self._workers.take_gone(worker),
            "declarations": self._servers.declarations,
        }
