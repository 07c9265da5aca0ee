"""The precision of arithmetic: fp32, bf16 or fp16, the last with a scaled loss.

| `precision` | on the CPU | on CUDA |
|---|---|---|
| "fp32" | as it is | as it is |
| "bf16" | autocast; bf16 products by fp32 arithmetic where the CPU has no instructions for them | autocast |
| "fp16" | refused: torch has no gradient scaling there | autocast and a `torch.amp.GradScaler` |
| "auto" | "bf16" | "fp16" |
| a `torch.amp.GradScaler` | fp32 with a loss that it scales | the same |

A scaled loss makes all gradients too large by the scale. The scaler divides those of parameters, the
embedding engines divide theirs (`EmbeddingEngine.gradient_scale`). The scale is on the GPU, where engines
with rows on that GPU read it; others need it on the host, which waits for it in every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from karvan.embedding import EmbeddingEngine
from karvan.torch_internals import TorchDispatchMode, loss_scale

NAMES = ("fp32", "bf16", "fp16", "auto")


class Precision:
    """fp32: nothing is changed. The others derive from it."""

    name = "fp32"

    # The context of a forward and its backward.
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self) -> AbstractContextManager[Any]:
        """The context of the forward and the loss, inside of `context`."""
        return _explained_dtypes(nullcontext())

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to compute gradients from."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer | None, sparse_finite: bool) -> None:
        """Undo `scale` on the gradients of an optimizer's parameters."""

    def unscale_late(self, optimizer: torch.optim.Optimizer | None, found_inf: Tensor) -> None:
        """The same where only the device knows: found_inf is 1.0 if any gradient is not finite, else 0.0."""

    def update(self) -> None:
        """A step was taken, or skipped because of an overflow."""

    always_checks = False  # whether gradients must be checked, because overflows are part of the method

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""


@contextmanager
def _explained_dtypes(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """A context in which torch's error about a model of another precision than float32 says what to do."""
    try:
        with inner:
            yield
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        raise TypeError(
            f"{error}. Vectors of embeddings and columns of numbers are float32: expected a model of "
            "float32, with precision='bf16' or 'fp16' in place of model.half() or model.to(torch.bfloat16)."
        ) from error


class Autocast(Precision):
    """bf16: products of matrices in bf16, the rest as autocast decides."""

    name = "bf16"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slow = device.type == "cpu" and not fast_bf16()
        if self._slow:
            warnings.warn(
                "This CPU has no instructions for bf16: products are computed in fp32 from operands "
                "rounded to bf16. The numbers are the same as with such instructions, the speed is at "
                "most that of fp32.",
                stacklevel=5,
            )

    @override
    def context(self) -> AbstractContextManager[Any]:
        return Bf16Products() if self._slow else nullcontext()  # type: ignore[no-untyped-call]

    @override
    def forward(self) -> AbstractContextManager[Any]:
        return _explained_dtypes(torch.autocast(self._device.type, torch.bfloat16))


class ScaledLoss(Precision):
    """fp32 with a loss that is scaled up, for models that compute in half precision by themselves."""

    name = "scaled loss"
    always_checks = True

    def __init__(
        self, device: torch.device, engines: Iterable[EmbeddingEngine], scaler: torch.amp.GradScaler
    ) -> None:
        self._engines = list(engines)
        self._scaler = scaler
        # The scaler checks gradients of optimizers only. This single gradient represents those of rows.
        self._witness = torch.zeros(1, device=device, requires_grad=True)
        self._witness_optimizer = torch.optim.SGD([self._witness], lr=0.0)

    @override
    def scale(self, loss: Tensor) -> Tensor:
        """Also sets the scale of the engines."""
        scaled = self._scaler.scale(loss)
        scale = loss_scale(self._scaler)
        on_host = any(engine.store.device != scale.device for engine in self._engines)
        number = self._scaler.get_scale() if on_host else 0.0  # it waits for the GPU
        for engine in self._engines:
            engine.gradient_scale = scale if engine.store.device == scale.device else number
        return scaled

    @override
    def unscale(self, optimizer: torch.optim.Optimizer | None, sparse_finite: bool) -> None:
        self._unscale(optimizer, torch.full_like(self._witness, 0.0 if sparse_finite else torch.inf))

    @override
    def unscale_late(self, optimizer: torch.optim.Optimizer | None, found_inf: Tensor) -> None:
        self._unscale(optimizer, (found_inf / (1 - found_inf)).reshape(1))  # 0, or infinite

    def _unscale(self, optimizer: torch.optim.Optimizer | None, of_rows: Tensor) -> None:
        self._witness.grad = of_rows
        self._scaler.unscale_(self._witness_optimizer)
        if optimizer is not None:
            self._scaler.unscale_(optimizer)

    @override
    def update(self) -> None:
        """The scale falls after an overflow and rises after many steps without."""
        self._scaler.update()
        for engine in self._engines:
            engine.gradient_scale = 1.0

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(dict(state))


class Scaled(ScaledLoss):
    """fp16 on CUDA: the loss is scaled up, so that small gradients do not vanish."""

    name = "fp16"

    def __init__(self, device: torch.device, engines: Iterable[EmbeddingEngine]) -> None:
        super().__init__(device, engines, torch.amp.GradScaler(device.type))
        self._device_type = device.type

    @override
    def forward(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device_type, torch.float16)


def make_precision(
    name: str | torch.amp.GradScaler, device: torch.device, engines: Iterable[EmbeddingEngine]
) -> Precision:
    """The precision of that name, or a loss that this scaler scales."""
    if isinstance(name, torch.amp.GradScaler):
        return ScaledLoss(device, engines, name) if name.is_enabled() else Precision()
    if name not in NAMES:
        raise ValueError(f"precision must be one of {', '.join(NAMES)}, got {name!r}.")
    if name == "auto":
        name = "fp16" if device.type == "cuda" else "bf16"
    if name == "fp16" and device.type != "cuda":
        raise ValueError(f"precision 'fp16' needs a CUDA device, but the model is on {device}; use 'bf16'.")
    if name == "fp16":
        return Scaled(device, engines)
    return Autocast(device) if name == "bf16" else Precision()


def fast_bf16() -> bool:
    """Whether this CPU has instructions for bf16 matrices; torch is some 200 times slower without."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.addbmm.default,
    _aten.baddbmm.default,
    _aten.addmv.default,
    _aten.mv.default,
    _aten.dot.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
}


class Bf16Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of bf16 matrices in fp32, forward and backward, and rounds the results to bf16.

    This is what the instructions do: they multiply exactly and add up in fp32.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every operation, below autograd and autocast."""
        if func not in _PRODUCTS or not any(_is_bf16(arg) for arg in args):
            return func(*args, **(kwargs or {}))
        products = func(*(arg.float() if _is_bf16(arg) else arg for arg in args), **(kwargs or {}))
        return tuple(map(_rounded, products)) if isinstance(products, tuple) else _rounded(products)


def _is_bf16(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bfloat16


def _rounded(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) else value
