"""`EmbeddingEngine`: ids of many features in, vectors out, gradients back, in one native call per direction.

Forward: every feature's ids are checked, then grouped by key, looked up and pooled in one call of the
store. Backward: autograd passes the gradients of all outputs to one call, which sums them by key; they wait
in the engine until a `karvan.optim` optimizer applies them. Several backward passes before a step add up.

A batch may have an `IdsReference` in place of ids, which embedding workers then hold: the workers compute the
outputs, and receive their gradients.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.argument_checks import listed
from karvan.display import html_table
from karvan.distributed import Connection
from karvan.embedding import portable
from karvan.embedding.eviction import TTL, steady_time
from karvan.embedding.feature_inputs import (
    FeatureInput,
    Inputs,
    Output,
    absent_ids,
    likely_padding,
    make_program,
)
from karvan.embedding.table import Table, check_features
from karvan.embedding.table_handle import EngineState, TableHandle, find_table
from karvan.ragged import REFERENCE, IdsReference, IndexedRows, NestedRagged, Padded, Ragged
from karvan.store import LookupContext, LookupPlan, LookupProgram, Store, make_store
from karvan.store.program import Prepared, RemoteLookup
from karvan.store.types import Gradients
from karvan.threads import share_torch_threads
from karvan.torch_internals import TENSOR_VERSION

# The error that `torch.export` and `torch.jit` get from an engine.
#
# Rows live in a store outside of the graph and change in training, so a graph cannot hold a lookup. An
# export without this error would fail deep inside of torch, and `torch.jit.trace` would make a model that
# returns the vectors of its example batch for every batch.


_EXPORT = (
    "An EmbeddingEngine cannot be exported: its rows live outside of the graph. Export the rest "
    "of the model, torch.export.export(model.net, (vectors,)), and call model.embeddings(batch) for "
    "its vectors; kv.checkpoint saves the rows. A model of kv.models has no single net after "
    "its embeddings: export its parts (model.named_children() lists them), or write a "
    "module that takes the vectors and calls these parts. torch.compile(model) works as it is."
)


# `StepReplay`: computes a step again with the vectors of its first computation.
#
# Nothing is looked up or counted twice; gradients of the second computation belong to the same lookup.


class ReplayableForward(NamedTuple):
    """A training forward."""

    inputs: Inputs
    plan: LookupPlan
    outs: tuple[Tensor, ...]


class StepReplay:
    """The training forwards of an engine's step, recorded if the step may have to be computed again."""

    def __init__(self) -> None:
        self.recording = False
        self.remaining: deque[ReplayableForward] = deque()  # what the next training forwards return
        self._forwards: list[ReplayableForward] = []

    def record(self) -> None:
        """A step starts that may be computed again."""
        self.recording = True
        self._forwards.clear()
        self.remaining.clear()

    def replay(self) -> None:
        """The step is computed again: the same forwards, in the same order."""
        self.remaining = deque(self._forwards)

    def end(self) -> None:
        """The step is complete."""
        self.record()
        self.recording = False

    def add(self, inputs: Inputs, plan: LookupPlan, outs: tuple[Tensor, ...]) -> None:
        """A training forward returns these outputs; a model may write to them, so copies are recorded."""
        self._forwards.append(ReplayableForward(inputs, plan, tuple(out.clone() for out in outs)))

    def next(self) -> ReplayableForward:
        """The result of the next training forward, one of those that remain."""
        forward = self.remaining.popleft()
        return forward._replace(outs=tuple(out.clone() for out in forward.outs))


# Batches that were prepared before their forward, recognized by their tensors.
#
# The prepared state is not passed on with the batch, because the user's model is between the feed and the
# engine. It may give the engine a new mapping (`{**batch, "hour": hours}`), other ids, or ids that were
# written to since. The prepared state is right only for the same tensors, unchanged, so batches are
# recognized by them.


_MOST = 8  # the oldest is dropped if more are prepared without being used


class _Entry(NamedTuple):
    tensors: list[Any]  # held, so that no other tensor gets the id of one
    versions: list[Any]  # of their writes
    inputs: Inputs
    prepared: Prepared


class PreparedBatches:
    """The prepared batches; several threads may put and take."""

    def __init__(self, features: Iterable[str]) -> None:
        self._features = list(features)
        self._entries: deque[_Entry] = deque(maxlen=_MOST)
        self._lock = Lock()

    def hold(self, most: int) -> None:
        """Hold at least so many batches."""
        with self._lock:
            self._entries = deque(self._entries, max(most, self._entries.maxlen or 0))

    def clear(self) -> None:
        """Release all."""
        with self._lock:
            self._entries.clear()

    def put(self, batch: Mapping[str, Any], inputs: Inputs, prepared: Prepared) -> None:
        """Hold a batch's prepared state."""
        entry = _Entry(*self._identify(batch), inputs, prepared)
        with self._lock:
            self._entries.append(entry)

    def take(self, batch: Mapping[str, Any]) -> tuple[Inputs, Prepared] | None:
        """The prepared state of a batch, which serves one forward; None if it was not prepared."""
        if not self._entries:
            return None
        tensors, versions = self._identify(batch)
        with self._lock:
            for index, entry in enumerate(self._entries):
                if entry.versions == versions and all(map(operator.is_, entry.tensors, tensors)):
                    del self._entries[index]
                    return entry.inputs, entry.prepared
        return None

    def _identify(self, batch: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """The tensors of a batch, and how often each was written to."""
        tensors: list[Any] = [batch.get(REFERENCE)]
        for name in self._features:
            entry = batch.get(name)
            if isinstance(entry, Ragged):
                tensors += [entry.values, entry.offsets, entry.weights]
            elif isinstance(entry, NestedRagged):
                tensors += [entry.values, entry.inner, entry.outer]
            else:
                tensors.append(entry)
        return tensors, [getattr(tensor, TENSOR_VERSION, None) for tensor in tensors]


_log = logging.getLogger("karvan.embedding")


class EmbeddingEngine(nn.Module):
    """Look up the embedding vectors of a model's features.

    It is a torch module. A forward in `train()` mode with gradients enabled is one step: it inserts unknown
    keys, counts their uses and records the step. In `eval()` or under `torch.no_grad()` unknown keys get
    zeros, and nothing changes. The rows are not parameters of the module: an optimizer of `kv.optim` trains
    them.

    Args:
        features: A [`Table`][karvan.Table] for each feature, by the feature's name in a batch.
        seed: The seed of new rows. The same seed and key give the same row everywhere.
        shards: How many parts each table has, which threads use in parallel. Results do not depend on it.
        store: Where the rows are; by default as `kv.connect` says.

    Raises:
        ValueError: There are no features, or tables with a device and a store.
        TypeError: `features` is no mapping of names to tables.

    Example:
        >>> engine = kv.EmbeddingEngine(
        ...     {
        ...         "user": kv.Table(dim=4),
        ...         "history": kv.Table(dim=4, name="item", combiner="mean"),
        ...     }
        ... )
        >>> batch = {
        ...     "user": torch.tensor([7, 8]),
        ...     "history": kv.Ragged.from_lists([[1, 2], []]),
        ... }
        >>> vectors = engine(batch)
        >>> vectors["history"].shape
        torch.Size([2, 4])
        >>> engine.sizes()
        {'user': 2, 'item': 2}
    """

    def __init__(
        self, features: Mapping[str, Table], *, seed: int = 0, shards: int = 32, store: Store | None = None
    ) -> None:
        super().__init__()
        if not features:
            raise ValueError("EmbeddingEngine expects at least one feature, got none.")
        check_features(features)
        share_torch_threads()
        self.features = dict(features)
        # The factor by which mixed precision scales the loss; gradients are divided by it. An engine whose
        # store is on a GPU takes it as a float there, too, which is read when the gradients are applied.
        self.gradient_scale: float | Tensor = 1.0
        # The connection that chose the store; None if the user passed one.
        self.connection: Connection | None = distributed.current() if store is None else None
        self._prepared = PreparedBatches(self.features)
        self.replay = StepReplay()  # forwards of a step that may have to be computed again
        self._unseen = {name for name, table in self.features.items() if table.padding_idx is None}
        self._prepared_step = 0  # the step of the training batch that was prepared last
        self._names = {feature: table.name or feature for feature, table in self.features.items()}
        first: dict[str, Table] = {}
        for feature, table in self.features.items():
            name = self._names[feature]
            table.check_shares_rows_with(first.setdefault(name, table), name, feature)
        self._clock = _clock_of(first)
        if store is None:
            store = make_store({name: table.device for name, table in first.items()})
        elif placed := [name for name, table in first.items() if table.device is not None]:
            raise ValueError(
                f"EmbeddingEngine takes a store, or tables with a device, got both: {', '.join(placed)}."
            )
        self._all = make_program(self.features)
        # Features that read alone are looked up apart from those that train, in training.
        self._trains = [i for i, table in enumerate(self.features.values()) if not table.read_only]
        self._reads = [i for i, table in enumerate(self.features.values()) if table.read_only]
        parts = [make_program(self._part(chosen)) for chosen in (self._trains, self._reads)]
        trained, self._read = parts if self._reads else (self._all, parts[1])
        first = {name: first[name] for name in (*trained.tables, *self._all.tables)}  # in the order of slots
        self.state = EngineState(store, trained, list(first))
        seed &= 2**64 - 1  # as the native core reads it
        self._handles: dict[str, TableHandle] = {}
        for name, table in first.items():
            spec = table.spec(name, seed, shards)
            self.store.add_table(spec)
            self._handles[name] = TableHandle(self.state, spec, len(self._handles), self._clock)

    def _part(self, chosen: Sequence[int]) -> dict[str, Table]:
        """Some of the features, by their positions."""
        features = list(self.features.items())
        return dict(features[index] for index in chosen)

    def table(self, name: str) -> TableHandle:
        """Return a table, to read or change its rows.

        Args:
            name: The name of the table; a table without a name has that of its feature.

        Returns:
            The table.

        Raises:
            KeyError: There is no such table.
        """
        return find_table(self._handles, name)

    def sizes(self) -> dict[str, int]:
        """Count the rows of each table in the store of this process.

        Returns:
            The number of rows by table.
        """
        return self.store.sizes([handle.name for handle in self.tables()])

    def tables(self) -> list[TableHandle]:
        """Return all tables.

        Returns:
            The tables.
        """
        return list(self._handles.values())

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor | Padded | Ragged | IndexedRows | Any]:
        """Embed the engine's features of a batch.

        Args:
            batch: Ids by feature: tensors of integers, (B,) or (B, n), or `Ragged`s. Other entries are passed
                through.

        Returns:
            The vectors by feature, in the form that each table's `combiner` says.
        """
        # Is the call recorded as a graph that will run without the engine?
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if tracing or torch.compiler.is_exporting():
            raise RuntimeError(_EXPORT)
        training = self.training and torch.is_grad_enabled() and bool(self._trains)
        replayed = self.replay.next() if training and self.replay.remaining else None
        if replayed is not None:
            inputs, prepared = self._inputs(batch) if self._reads else replayed.inputs, None
        else:
            lookup = self._prepared.take(batch)
            inputs, prepared = (self._inputs(batch), None) if lookup is None else lookup
        if not training:
            self._run(inputs, prepared, training=False)
            outs = inputs.take_out()
        elif not self._reads:
            # Autograd calls `backward` only if an input requires a gradient; that is what the anchor is for.
            outs = _lookup(next(iter(self._handles.values())).anchor, self, inputs, prepared, replayed)
        else:
            inputs, outs = self._train_some(inputs, prepared, replayed)
        result: dict[str, Any] = {
            name: i.present(out) for name, i, out in zip(self.features, inputs.outputs, outs, strict=True)
        }
        for name, entry in batch.items():
            if name not in result:
                result[name] = entry
        return result

    def _train_some(
        self, inputs: Inputs, prepared: Prepared | None, replayed: ReplayableForward | None
    ) -> tuple[Inputs, tuple[Tensor, ...]]:
        """A training forward if some features read alone: they see the rows that the others have created."""
        if inputs.reference is not None:
            names = ", ".join(f"'{name}'" for name in self._part(self._reads))
            raise ValueError(
                f"Features with read_only=True ({names}) expect their ids at the trainer, got a batch "
                "with ids on embedding workers: run the job without embedding workers."
            )
        trained = inputs.part(self._trains) if replayed is None else replayed.inputs
        outs = _lookup(next(iter(self._handles.values())).anchor, self, trained, prepared, replayed)
        read = inputs.part(self._reads)
        self._run(read, None, training=False, program=self._read)
        order = sorted(range(len(self.features)), key=[*self._trains, *self._reads].__getitem__)
        output, outs = [*trained.outputs, *read.outputs], (*outs, *read.take_out())
        return Inputs([output[at] for at in order]), tuple(outs[at] for at in order)

    def prepare(self, batch: Mapping[str, Any], *, training: bool | None = None) -> bool:
        """Check and group the ids of a batch before its forward, on any thread.

        Results are the same.

        A few batches are held, until their forward. Errors in a batch are raised by its forward.

        Args:
            batch: The batch, which later goes to the forward.
            training: Whether it will be a training forward, if that is known. Then rows on servers are
                requested ahead, and batches must be prepared in the order of their forwards.

        Returns:
            Whether it was possible. It is not if the model computes features itself.
        """
        try:
            inputs = self._inputs(batch)
            if self._reads and not training:
                return False  # of all features, or of those that train? Only the forward knows
            lookup_inputs = (inputs.part(self._trains) if self._reads else inputs).for_store(self.state.store)
            step = 0
            if training:
                step = self._prepared_step = max(self._prepared_step, self.state.step) + 1
            context = None if training is None else LookupContext(training, step, self._clock())
            prepared = self.state.store.prepare(self.state.program, lookup_inputs, context)
            self._prepared.put(batch, inputs, prepared)
        # A batch may be anything that a model takes.
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        return True

    def forget_prepared(self) -> None:
        """Drop the prepared batches: they will not be used."""
        self._prepared.clear()
        self._prepared_step = 0

    def hold_prepared(self, batches: int) -> None:
        """Hold at least so many prepared batches.

        Args:
            batches: How many.
        """
        self._prepared.hold(batches)

    def _inputs(self, batch: Mapping[str, Any]) -> Inputs:
        if not hasattr(batch, "get"):
            raise TypeError(
                "EmbeddingEngine expects a batch, a mapping of features to ids such as "
                f"kv.Batch({{'{next(iter(self.features))}': ids}}), got {type(batch).__name__}."
            )
        reference = batch.get(REFERENCE)
        if isinstance(reference, IdsReference) and not all(feature in batch for feature in self.features):
            if reference.rows == 0:  # of a rank without data: there is nothing to ask for
                none = Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
                return self._inputs(dict.fromkeys(self.features, none))
            if not self.state.store.takes_references:
                raise ValueError(
                    "The ids of this batch are on embedding workers: expected an engine that was created "
                    f'after connect("remote", workers=…), got one on a {type(self.state.store).__name__}.'
                )
            return Inputs([Output(table) for table in self.features.values()], reference)
        inputs: list[FeatureInput] = []
        device = self.state.store.device
        for feature, table in self.features.items():
            entry, name = batch.get(feature), self._names[feature]
            if entry is None and table.missing == "empty":
                entry = absent_ids(batch)
            if entry is None:
                title = f"Feature '{feature}' of table '{name}'"
                if feature in batch:
                    raise TypeError(f"{title} is None in the batch.")
                raise KeyError(f"{title} is not in the batch, which has: {listed(feature, batch)}")
            if feature in self._unseen:
                self._look_for_padding(feature, entry)
            input_ = FeatureInput(feature, name, table, entry, device)
            if inputs and input_.rows != inputs[0].rows:
                raise ValueError(
                    f"Feature '{feature}' of table '{name}': expected {inputs[0].rows} samples like feature "
                    f"'{next(iter(self.features))}', got {input_.rows}."
                )
            inputs.append(input_)
        return Inputs(inputs)

    def _look_for_padding(self, feature: str, entry: object) -> None:
        """Warn if ids of the feature's first batch seem to be padded."""
        self._unseen.discard(feature)
        if (padding := likely_padding(entry)) is not None:
            _log.warning(
                "Feature '%s' has the id %d at the ends of most rows. If it fills up shorter rows, it is "
                "trained and counted like any other id: declare it, kv.Table(…, padding_idx=%d).",
                feature,
                padding,
                padding,
            )

    def _run(
        self, inputs: Inputs, prepared: Prepared | None, training: bool, program: LookupProgram | None = None
    ) -> LookupPlan:
        plan = self.state.store.forward(
            program or (self.state.program if training else self._all),
            inputs.for_store(self.state.store) if prepared is None else prepared,
            LookupContext(training, self.state.step + 1, self._clock()),
        )
        if plan.native is None:
            inputs.fill(cast(RemoteLookup, plan.remote))  # a check of the protocol would take long
        if training:
            self.state.step += 1
        return plan

    def _collect(self, plan: LookupPlan, gradients: tuple[Tensor | None, ...]) -> None:
        waiting = set(self.state.trained)
        if not waiting:
            return
        store, scale = self.state.store, self.gradient_scale
        if not store.takes_tensors and scale != 1.0:
            gradients = tuple(None if g is None else g / scale for g in gradients)
        # Slices of one wide gradient, as the backward of torch.cat returns them, are read without a copy.
        readable = [g if g is None or g.stride(1) == 1 else g.contiguous() for g in gradients]
        if plan.native is None:
            sums = store.hold(plan, readable, scale) if store.takes_tensors else store.hold(plan, readable)
        else:
            addresses = [0 if g is None else g.data_ptr() for g in readable]
            strides = [0 if g is None else g.stride(0) for g in readable]
            sums = store.reduce(plan, addresses, strides)
        self.state.add_gradients(plan, sums, waiting)

    def take_gradients(self, handles: Iterable[TableHandle]) -> list[tuple[LookupPlan, Gradients]]:
        """Remove and return the gradients that wait for an optimizer; for optimizers.

        Args:
            handles: The tables of the optimizer.

        Returns:
            The backward passes, oldest first.
        """
        return self.state.take_gradients(handle.name for handle in handles)

    def gradients(self, handles: Iterable[TableHandle]) -> list[tuple[LookupPlan, Gradients]]:
        """Return the gradients that wait for an optimizer, and keep them; for optimizers.

        Args:
            handles: The tables of the optimizer.

        Returns:
            The backward passes, oldest first.
        """
        return self.state.gradients(handle.name for handle in handles)

    @property
    def step(self) -> int:
        """The number of training forwards so far."""
        return self.state.step

    @step.setter
    def step(self, step: int) -> None:
        """The number of training forwards so far."""
        self.state.step = step

    @property
    def store(self) -> Store:
        """Where the rows are."""
        return self.state.store

    @property
    def program(self) -> LookupProgram:
        """The features that train, as the store sees them."""
        return self.state.program

    def state_dict(  # type: ignore[override]
        self, *args: Any, rows: bool = False, prefix: str = "", **options: Any
    ) -> dict[str, Any]:
        """Return the state of the module: the step and the names of the tables.

        Args:
            *args: As of any torch module.
            rows: Whether to include all rows and their optimizer state, for tables in this process of up to 1
                GiB. `load_state_dict` then replaces the existing rows. Save larger tables in checkpoints.
            prefix: As of any torch module.
            **options: As of any torch module.

        Returns:
            The state.
        """
        state: dict[str, Any] = super().state_dict(*args, prefix=prefix, **options)
        if rows:
            state[f"{prefix}_extra_state"] = portable.describe_with_rows(self.state, self._handles)
        return state

    def get_extra_state(self) -> dict[str, Any]:
        """Return the step and the tables for `state_dict()`, without rows.

        Returns:
            The state.
        """
        return portable.describe(self.state, self._handles)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned.

        Args:
            state: The state.

        Raises:
            ValueError: This engine lacks the rows of the state.
        """
        portable.restore(self.state, self._handles, state)

    def __getstate__(self) -> Any:
        raise TypeError(
            "An EmbeddingEngine can be neither copied nor pickled: its rows live in a store. To copy it, "
            "make a second model and load engine.state_dict(rows=True) into it by load_state_dict(…). To "
            "save a model, call kv.checkpoint.save(path, {}, model), and load it with "
            "kv.checkpoint.find(path).load(model)."
        )

    def extra_repr(self) -> str:
        """Return the tables and the features that use them, for `print`.

        Returns:
            The text.
        """
        return "\n".join(
            f"{name}: dim={handle.dim}, rows={handle.rows}, features={self._users(name)}"
            for name, handle in self._handles.items()
        )

    def _repr_html_(self) -> str:
        def row(table: TableHandle) -> list[object]:
            stats = table.stats()
            return [table.name, table.dim, stats["rows"], stats["bytes"], ", ".join(self._users(table.name))]

        head = ("table", "dim", "rows", "bytes", "features")
        return html_table("EmbeddingEngine", head, self.tables(), row)

    def _users(self, table: str) -> list[str]:
        """The features that use a table."""
        return [feature for feature, name in self._names.items() if name == table]


class _Lookup(torch.autograd.Function):
    """The bridge to autograd: outputs of all features forward, their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        engine: EmbeddingEngine,
        inputs: Inputs,
        prepared: Prepared | None,
        replayed: ReplayableForward | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.engine = engine
        ctx.inputs = inputs  # the plan points into these
        if replayed is not None:
            ctx.plan = replayed.plan
            return replayed.outs
        ctx.plan = engine._run(inputs, prepared, training=True)
        outs = inputs.take_out()
        if engine.replay.recording:
            engine.replay.add(inputs, ctx.plan, outs)
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None, None]:
        if any(g is not None for g in gradients):
            ctx.engine._collect(ctx.plan, gradients)
        return None, None, None, None, None


# torch declares `apply` without types.
_lookup = cast(
    "Callable[[Tensor, EmbeddingEngine, Inputs, Prepared | None, ReplayableForward | None], "
    "tuple[Tensor, ...]]",
    _Lookup.apply,
)


def _clock_of(tables: Mapping[str, Table]) -> Callable[[], float]:
    for table in tables.values():
        if isinstance(table.evict, TTL):
            return table.evict.clock
    return steady_time
