"""What the models share: fully connected layers, dot products of vectors, tables of ids, numbers of a batch.

`Layers` in mixed precision on a GPU take few launches. Torch's autocast casts every weight, bias and gradient
by a kernel of its own, and ReLU is one more: the host takes longer to queue a layer than a GPU to compute it.
Here one kernel casts all weights, and another one all gradients, and ReLU is part of the product. In
training, layers whose input has the same shape again are replayed as CUDA graphs (`LayerGraphs`). The numbers
are those of autocast.

`pairwise_dots` of float32 is native code on the CPU and a kernel on a GPU: on some machines torch's batched
products of small matrices take thirty times as long, on a GPU the gradient of choosing pairs takes longer
than all the rest, and vectors need not be copied side by side first. Other cases use torch.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from karvan import kernels
from karvan.argument_checks import listed
from karvan.devices import record
from karvan.embedding import Table, init
from karvan.embedding.table import POOLED
from karvan.native import _native
from karvan.ragged import OptionalRagged, is_text
from karvan.store.program import empty
from karvan.torch_internals import addmm_relu, foreach_copy

# The forward and the backward pass of linear layers with ReLU in 16 bits, as few torch calls.


def forward_pass(
    x: Tensor, weights: Sequence[Tensor], relus: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """The values before and after each layer, and the matrices in the dtype of `x`, which backward needs.

    weights: matrix and bias of each layer, in float32. relus: whether a ReLU follows each.
    """
    small = [torch.empty_like(weight, dtype=x.dtype) for weight in weights]
    foreach_copy(small, list(weights))
    values = [x]
    for weight, bias, relu in zip(small[::2], small[1::2], relus, strict=True):
        product = addmm_relu if relu else torch.addmm
        values.append(product(bias, values[-1], weight.t()))
    return values, small[::2]


def backward_pass(
    gradient: Tensor,
    values: Sequence[Tensor],
    matrices: Sequence[Tensor],
    relus: Sequence[bool],
    *,
    needs_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """The gradient of `x` in its dtype, if it is needed, and those of all weights in float32, as one tensor.

    values, matrices: of `forward_pass`. See `split` for the gradients of each weight.
    """
    outputs = list[Tensor]()
    for layer in reversed(range(len(relus))):
        if relus[layer]:
            gradient = torch.ops.aten.threshold_backward(gradient, values[layer + 1], 0)
        outputs += [gradient.sum(0), gradient.t().mm(values[layer])]
        if layer or needs_x:
            gradient = gradient.mm(matrices[layer])
    outputs.reverse()
    flat = torch.empty(sum(output.numel() for output in outputs), dtype=torch.float32, device=gradient.device)
    foreach_copy(split(flat, [output.shape for output in outputs]), outputs)
    return gradient if needs_x else None, flat


def split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Parts of a tensor, one after the other, with these shapes."""
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# `LayerGraphs`: the passes of `Layers` as CUDA graphs, so that the host queues each by one call.
#
# A graph reads and writes memory of its own: values of the forward pass stay there until their backward pass.
# While such a pass is to come, another forward pass runs without the graph.


_MOST = 4  # shapes of one net that are recorded
_SEEN = 64  # shapes that are remembered


class Turn:
    """One use of a graph: a forward pass, whose backward pass may come as long as this object lives."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False  # whether the backward pass was queued


class _Kind(NamedTuple):
    """What a graph depends on, beside the addresses of the weights."""

    shape: torch.Size
    dtype_of_x: torch.dtype
    needs_x: bool
    relus: tuple[bool, ...]
    dtype: torch.dtype
    device: torch.device
    stream: int


class GraphedLayers:
    """The graphs of layers for one shape of their input, and the memory that these use."""

    def __init__(self, kind: _Kind, weights: Sequence[Tensor]) -> None:
        self.addresses = _weight_addresses(weights)
        self._shapes = [weight.shape for weight in weights]
        self._turn: weakref.ref[Turn] | None = None
        self._x = torch.empty(kind.shape, dtype=kind.dtype, device=kind.device)
        stream, pool = _recording_stream(kind.device, kind.stream), torch.cuda.graph_pool_handle()

        def run_forward() -> None:
            self._values, self._matrices = forward_pass(self._x, weights, kind.relus)

        def run_backward() -> None:
            self._of_x, self._of_weights = backward_pass(
                self._gradient, self._values, self._matrices, kind.relus, needs_x=kind.needs_x
            )

        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            self._forward = record(stream, run_forward, pool)
            self._gradient = torch.empty_like(self._values[-1])
            self._backward = record(stream, run_backward, pool)

    @property
    def free(self) -> bool:
        """Whether no first backward pass can come for the last forward pass."""
        turn = None if self._turn is None else self._turn()
        return turn is None or turn.done

    def forward(self, x: Tensor) -> tuple[Tensor, Turn]:
        """The output for `x`, and what `backward` needs to know."""
        turn = Turn()
        self._turn = weakref.ref(turn)
        self._x.copy_(x)
        self._forward.replay()
        return self._values[-1].clone(), turn

    def backward(
        self, turn: Turn, gradient: Tensor, dtype_of_x: torch.dtype
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The gradients of `x`, if it needs one, and of the weights."""
        if self._turn is None or self._turn() is not turn:
            raise RuntimeError(
                "Backward was called a second time for an output of `Layers`, but the next forward pass "
                "has replaced the values that it needs. Sum the losses, and call backward once."
            )
        turn.done = True
        self._gradient.copy_(gradient)
        self._backward.replay()
        of_x = None if self._of_x is None else self._of_x.to(dtype_of_x, copy=True)
        return of_x, split(self._of_weights.clone(), self._shapes)


class LayerGraphs:
    """The graphs of one net, which records an input's shape when it comes a second time."""

    def __init__(self) -> None:
        self._seen: set[_Kind] = set()
        self._recorded: dict[_Kind, GraphedLayers | None] = {}  # None: there was not enough memory

    def take(
        self, x: Tensor, weights: Sequence[Tensor], relus: tuple[bool, ...], dtype: torch.dtype
    ) -> GraphedLayers | None:
        """Graphs for this input; None if it should run without."""
        if torch.cuda.is_current_stream_capturing() or not all(
            type(weight) is nn.Parameter for weight in weights
        ):
            return None
        stream = torch.cuda.current_stream(x.device).cuda_stream
        kind = _Kind(x.shape, x.dtype, x.requires_grad, relus, dtype, x.device, stream)
        if kind in self._recorded:
            layers = self._recorded[kind]
            if layers is None or layers.addresses == _weight_addresses(weights):
                return layers if layers is not None and layers.free else None
            self._recorded.clear()  # the weights have moved
            self._seen.clear()
        if kind not in self._seen:
            if len(self._seen) < _SEEN:
                self._seen.add(kind)
            return None
        if len(self._recorded) >= _MOST:
            return None
        try:
            self._recorded[kind] = GraphedLayers(kind, weights)
        except torch.OutOfMemoryError:
            self._recorded[kind] = None
        return self._recorded[kind]

    def __deepcopy__(self, memo: object) -> LayerGraphs:
        return LayerGraphs()

    def __reduce__(self) -> tuple[type[LayerGraphs], tuple[()]]:
        return LayerGraphs, ()


def _weight_addresses(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in weights)


@cache
def _recording_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """That of recordings of a stream's work: cuBLAS has memory for each stream, which graphs go on to use."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Layers(nn.Sequential):
    """nn.Linear, nn.ReLU and nn.Dropout, in this order, any number of times; the last may lack the ReLU."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._graphs = LayerGraphs()

    def forward(self, x: Tensor) -> Tensor:
        """The output for (B, width)."""
        if x.is_cuda and torch.is_autocast_enabled("cuda") and not torch.compiler.is_compiling():
            layers = self._plain_layers()
            if layers and x.dim() == 2 and x.dtype in (torch.float32, torch.get_autocast_dtype("cuda")):
                return mixed_layers(x, *layers, torch.get_autocast_dtype("cuda"), self._graphs)
        return cast(Tensor, super().forward(x))  # type: ignore[no-untyped-call]

    def _plain_layers(self) -> tuple[list[nn.Linear], list[bool]] | None:
        """The linear layers, and whether a ReLU follows each; None if something else would happen, too."""
        linears: list[nn.Linear] = []
        relus: list[bool] = []
        for module in self:
            if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)):
                return None
            if module._backward_pre_hooks:
                return None
            if type(module) is nn.Linear and module.bias is not None and module.weight.dtype is torch.float32:
                linears.append(module)
                relus.append(False)
            elif type(module) is nn.ReLU and linears and not relus[-1]:
                relus[-1] = True
            elif type(module) is not nn.Dropout or (module.training and module.p):
                return None
        return linears, relus


def mixed_layers(
    x: Tensor,
    linears: Sequence[nn.Linear],
    relus: Sequence[bool],
    dtype: torch.dtype,
    graphs: LayerGraphs | None = None,
) -> Tensor:
    """The output of layers, computed in a dtype of 16 bits.

    relus: whether a ReLU follows each layer. graphs: those of these layers, which are used in training.
    """
    weights = [parameter for linear in linears for parameter in (linear.weight, linear.bias)]
    if graphs is not None and torch.is_grad_enabled():
        graphed = graphs.take(x, weights, tuple(relus), dtype)
        if graphed is not None:
            return _graphed_layers(x, graphed, *weights)
    return _mixed_layers(x, tuple(relus), dtype, *weights)


class _MixedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relus: tuple[bool, ...], dtype: torch.dtype, *weights: Tensor) -> Tensor:
        values, ctx.weights = forward_pass(x.to(dtype), weights, relus)
        ctx.relus, ctx.dtype_of_x, ctx.shapes = relus, x.dtype, [weight.shape for weight in weights]
        ctx.save_for_backward(*values)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_x, of_weights = backward_pass(
            gradient, ctx.saved_tensors, ctx.weights, ctx.relus, needs_x=ctx.needs_input_grad[0]
        )
        of_x = None if of_x is None else of_x.to(ctx.dtype_of_x)
        return of_x, None, None, *split(of_weights, ctx.shapes)


class _GraphedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, graphed: GraphedLayers, *weights: Tensor) -> Tensor:
        ctx.graphed, ctx.dtype_of_x = graphed, x.dtype
        output, ctx.turn = graphed.forward(x)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_x, of_weights = ctx.graphed.backward(ctx.turn, gradient, ctx.dtype_of_x)
        return of_x, None, *of_weights


# torch declares `apply` without types.
_mixed_layers = cast(Callable[..., Tensor], _MixedLayers.apply)
_graphed_layers = cast(Callable[..., Tensor], _GraphedLayers.apply)


# Dot products of all pairs of a sample's vectors, as in DLRM.

_MOST_VECTORS = 64  # of a sample on a GPU: a kernel holds its vectors and products in shared memory


def pairwise_dots(vectors: Tensor | Sequence[Tensor], first: Tensor | None = None) -> Tensor:
    """Compute the dot products of all pairs of a sample's vectors.

    Pairs come in the order (1, 0), (2, 0), (2, 1), (3, 0), …. Half precision is computed in float32.

    Args:
        vectors: (B, n, dim), or n tensors (B, dim), which may be slices of wider ones.
        first: (B, e), which becomes the first columns of the result.

    Returns:
        (B, n (n - 1) / 2), after the columns of `first`.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]]])
        >>> kv.models.pairwise_dots(vectors)
        tensor([[2., 0., 3.]])
    """
    listed = list(vectors.unbind(1)) if isinstance(vectors, Tensor) else list(vectors)
    _check(listed, first)
    if first is None:
        first = listed[0][:, :0]
    if any(t.dtype is not torch.float32 for t in (first, *listed)):
        dtype = torch.float64 if any(t.dtype is torch.float64 for t in listed) else torch.float32
        same = first is listed[0]
        listed = [t.to(dtype) for t in listed]
        first = listed[0] if same else first.to(dtype)
    if first.dtype is torch.float32:
        small = 1 < len(listed) <= _MOST_VECTORS and not torch.compiler.is_compiling()
        if small and all(map(kernels.on_gpu, (first, *listed))):
            return _pairs_on_gpu(first, *listed)
        if all(t.is_cpu for t in (first, *listed)):
            return _pairs(first, *(t if t.stride(1) == 1 else t.contiguous() for t in listed))
    with torch.autocast(first.device.type, enabled=False):
        stacked, n = torch.stack(listed, 1), len(listed)
        row, column = torch.tril_indices(n, n, -1, device=stacked.device)
        return torch.cat([first, torch.bmm(stacked, stacked.transpose(1, 2))[:, row, column]], 1)


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(first: Tensor, *vectors: Tensor) -> Tensor:
        samples, dim = vectors[0].shape
        extra = first.shape[1]
        out = empty(samples, extra + len(vectors) * (len(vectors) - 1) // 2)
        if extra:
            out[:, :extra] = first
        if len(vectors) > 1 and samples:
            _native.interact(*_addresses(vectors), samples, dim, out.data_ptr() + 4 * extra, out.stride(0))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.extra = inputs[0].shape[1]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        vectors: tuple[Tensor, ...] = ctx.saved_tensors
        samples, dim = vectors[0].shape
        if gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        vectors_ = empty(samples, len(vectors), dim)
        if vectors_.numel():
            address = gradient.data_ptr() + 4 * ctx.extra
            _native.interact_backward(
                *_addresses(vectors), samples, dim, address, gradient.stride(0), vectors_.data_ptr()
            )
        return gradient[:, : ctx.extra], *vectors_.unbind(1)


class _PairsOnGPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, *vectors: Tensor) -> Tensor:
        from karvan.kernels.pairs import evenly_spaced, pairs

        lead, others = vectors[0], vectors[1:]
        if lead.stride(1) != 1:
            lead = lead.contiguous()
        if not evenly_spaced(others):
            others = torch.stack(others).unbind()
        ctx.extra = extra = first.shape[1]
        ctx.save_for_backward(lead, *others)
        n = len(vectors)
        out = torch.empty(len(first), extra + n * (n - 1) // 2, dtype=torch.float32, device=first.device)
        if extra:
            out[:, :extra] = first
        pairs(lead, others, out[:, extra:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        from karvan.kernels.pairs import pairs_backward

        lead, *others = ctx.saved_tensors
        if gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        gradients = pairs_backward(lead, others, gradient[:, ctx.extra :])
        return gradient[:, : ctx.extra], *gradients.unbind()


# torch declares `apply` without types.
_pairs = cast(Callable[..., Tensor], _Pairs.apply)
_pairs_on_gpu = cast(Callable[..., Tensor], _PairsOnGPU.apply)


def _addresses(vectors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [t.data_ptr() for t in vectors], [t.stride(0) for t in vectors]


def _check(vectors: list[Tensor], first: Tensor | None) -> None:
    if not vectors:
        raise ValueError("pairwise_dots expects at least one vector for each sample, got none.")
    shape = tuple(vectors[0].shape)
    for tensor in vectors:
        if tensor.dim() != 2 or tuple(tensor.shape) != shape:
            raise ValueError(
                f"pairwise_dots expects vectors of one shape (B, dim), got {shape} and {tuple(tensor.shape)}."
            )
    if first is not None and (first.dim() != 2 or first.shape[0] != shape[0]):
        raise ValueError(f"pairwise_dots expects first of shape ({shape[0]}, e), got {tuple(first.shape)}.")


Names: TypeAlias = Sequence[str] | Mapping[str, int]
Tables: TypeAlias = Table | Mapping[str, Table] | None

_log = logging.getLogger("karvan.models")

# With numbers up to 1e5 a DeepFM ended at a loss of 43, with the same ones up to 1 at 0.57.
_LARGEST = 1e5


def names_in(ids: Sequence[str]) -> list[str]:
    """The ids as a list; a single name would become a list of its letters."""
    if isinstance(ids, str):
        raise ValueError(f"Expected a list of different ids, got {ids!r}: give it [{ids!r}].")
    return list(ids)


def tables_of(ids: Sequence[str], dim: int, table: Tables, spread: float | None = None) -> dict[str, Table]:
    """A table of `dim` columns for each id.

    table: a template for all; or the tables of some ids by name; None for means of rows that start within
    ±`spread`, by default 1 / sqrt(dim), so that products of vectors are large enough to learn from.
    """
    if isinstance(ids, str) or len(set(ids)) != len(ids):
        raise ValueError(f"Expected a list of different ids, got {ids!r}.")
    spread = dim**-0.5 if spread is None else spread
    default = Table(dim, combiner="mean", init=init.Uniform(-spread, spread))
    if table is None or isinstance(table, Table):
        tables = dict.fromkeys(ids, table or default)
    else:
        if unknown := set(table) - set(ids):
            raise ValueError(
                f"There is a table for {', '.join(sorted(unknown))}, but ids are {', '.join(ids)}."
            )
        tables = {name: table.get(name, default) for name in ids}
    for name, part in tables.items():
        if part.dim != dim:
            raise ValueError(f"The table of '{name}' has dim {part.dim}, but the model has dim {dim}.")
        if part.combiner not in POOLED:
            raise ValueError(
                f"The table of '{name}' must pool its ids by {', '.join(POOLED)}, but has combiner "
                f"'{part.combiner}'."
            )
    return tables


def widened(tables: Mapping[str, Table], columns: int) -> dict[str, Table]:
    """The same tables with more columns."""
    return {name: replace(table, dim=table.dim + columns) for name, table in tables.items()}


class Numbers(nn.Module):
    """The numbers of a batch side by side, (B, width).

    names: those of single numbers (B,); or a mapping from names to widths, for tensors (B, width).
    """

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.widths = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 1)
        if isinstance(names, str) or len(self.widths) != len(names):
            raise ValueError(f"Expected a list of different numbers, got {names!r}.")
        self.width = sum(self.widths.values())
        self._is_checked = False

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, width), float32."""
        columns = [self._column(batch, name) for name in self.widths]
        if self.training and not self._is_checked and not torch.compiler.is_compiling():
            self._is_checked = True
            self._warn_of_large(columns)
        if columns and self.width == len(columns) and all(column.dim() == 1 for column in columns):
            return torch.stack(columns, 1)
        widths = self.widths.values()
        return torch.cat([column.view(-1, width) for column, width in zip(columns, widths, strict=True)], 1)

    def _column(self, batch: Mapping[str, Any], name: str) -> Tensor:
        if name not in batch:
            raise KeyError(f"Number '{name}' is not in the batch, which has: {listed(name, batch)}")
        column, width = batch[name], self.widths[name]
        if (
            not isinstance(column, Tensor)
            or column.dim() not in (1, 2)
            or (len(column) and column.shape[1:].numel() != width)
        ):
            if isinstance(column, OptionalRagged):
                missing = column.rows - column.values.shape[0]
                raise ValueError(
                    f"Number '{name}' has missing values: {missing} in the {column.rows} samples of this "
                    f"batch. Choose a value for them: kv.data.Fixed('{name}', default=0) while reading, or "
                    f"kv.Feature('{name}').fill_missing(0)."
                )
            if is_text(column):
                raise ValueError(
                    f"Number '{name}' is text in the batch. If it names something, turn it into ids by "
                    f"kv.Feature('{name}').hash(\"farm\") in a FeatureEngine, and name it in `ids` of the "
                    f"model. If it is numbers, parse them by kv.Feature('{name}').to_numbers(default=0)."
                )
            shape = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
            raise ValueError(f"Number '{name}' must be a tensor (B, {width}), but is {shape}.")
        return column if column.dtype is torch.float32 else column.float()

    def _warn_of_large(self, columns: Iterable[Tensor]) -> None:
        """Warn of numbers in the first batch that are too large to learn from, such as timestamps."""
        for name, column in zip(self.widths, columns, strict=True):
            values = column.detach().abs()
            large = values[values > _LARGEST]
            if len(large):
                _log.warning(
                    "Number '%s' has values up to %.2g in the first batch. A net does not learn from numbers "
                    "that large: the loss becomes huge. Scale it by a step: kv.Feature('%s').normalise() or "
                    '.log1p(). Of a timestamp, take the hour or the weekday as an id: see "Dates" in the '
                    "guide to features.",
                    name,
                    large.max().item(),
                    name,
                )

    def extra_repr(self) -> str:
        """The names."""
        return ", ".join(self.widths)


def beside(numbers: Numbers, batch: Mapping[str, Any], vectors: Iterable[Tensor]) -> Tensor:
    """Numbers and vectors side by side."""
    return torch.cat([*([numbers(batch)] if numbers.width else []), *vectors], 1)


def mlp(width: int, hidden: Sequence[int], out: int | None = None, *, dropout: float = 0.0) -> Layers:
    """Layers with ReLU, and a last one without it if `out` is given."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    if out is not None:
        layers.append(nn.Linear(width, out))
    return Layers(*layers)
