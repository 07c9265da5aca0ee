"""What Karvan uses of torch that torch does not promise to keep, in one place.

`tests/test_torch_internals.py` looks each of these up in the installed torch. What each is for, and
what breaks without it:

- `_get_default_group`, `_get_default_store`: the group and the store of torch.distributed that ranks meet by.
  Without them `kv.connect` fails where several trainers train together.
- `Store`, `PrefixStore`: the stores of torch.distributed, which exports them without types. Without them no
  trainer connects to others.
- `TorchDispatchMode`: bf16 products on CPUs without bf16 instructions. Without it `precision="bf16"` fails
  there.
- `_profiler_enabled`, `_global_optimizer_pre_hooks`, `_global_optimizer_post_hooks`,
  `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`: whether anybody observes a step of an optimizer.
  Without them steps of sparse optimizers fail; if their meaning changes, hooks and profiles miss such steps.
- `_step_supports_amp_scaling`, `found_inf` and `grad_scale` of an optimizer: torch's fused optimizers leave
  out a step by a flag on the GPU. Without them every step waits for the GPU; if their meaning changes, steps
  are made that should be skipped.
- `_foreach_norm`, `_foreach_copy_`, `_addmm_activation`: norms and copies of many tensors by few kernels, and
  a product with ReLU by one. Without them steps on a GPU fail.
- `_get_scale_async` of a GradScaler: the scale of the loss on the GPU. Without it precision "fp16" fails.
- `DeviceContext`: what `with torch.device` and `torch.set_default_device` make. Without it no program of
  another system runs; if its meaning changes, those that ask for a GPU fail on machines without one.
- `_worker_loop` of a DataLoader, and its variables `idx` and `index`: which batch a worker computes. Without
  them workers of a DataLoader fetch no records of elasticai_api's data shards.
- `_MultiProcessingDataLoaderIter`, its methods `_shutdown_workers` and `_reset`, the variable
  `resume_iteration_cnt` of that, and `_workers`: whether a program leaves a DataLoader. Without them workers
  that wait for such records hold up the program until they are killed, or for ever.
- `_version` of a tensor: the number of writes to it. Without it a batch that was changed in place after
  `EmbeddingEngine.prepare` trains with its old ids.
- `GOMP_parallel`, `omp_get_max_threads` of libtorch_cpu.so: torch's OpenMP threads, which the native core
  shares. Without them it uses threads of its own, which is slower beside torch and gives the same results.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_group, _get_default_store
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils.worker import _worker_loop
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# The names of torch that other modules import from here.
__all__ = ["DeviceContext", "PrefixStore", "Store", "TorchDispatchMode"]

# The attribute of a tensor that counts the writes to it.
TENSOR_VERSION = "_version"
# Of an optimizer, the first, if it can skip a step by the other two.
SKIP_ATTRIBUTES = ("_step_supports_amp_scaling", "found_inf", "grad_scale")
# What the native core calls to run on torch's threads, in the order of `_native.share_team`.
OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_max_threads")

foreach_norm = torch._foreach_norm
foreach_copy = torch._foreach_copy_
default_group = _get_default_group
default_store = _get_default_store


def addmm_relu(bias: torch.Tensor, first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """ReLU of `torch.addmm(bias, one, other)`."""
    return torch._addmm_activation(bias, first, other)


def loader_batch() -> tuple[int, Any] | None:
    """Which batch a worker of a DataLoader computes, and its samples; None in another process.

    A DataLoader numbers its batches in the order in which it delivers them, from 0 whenever it is iterated.
    """
    for frame in _frames(sys._getframe()):
        if frame.f_code is _worker_loop.__code__:
            return frame.f_locals["idx"], frame.f_locals["index"]
    return None


def is_leaving_loader(worker: int) -> bool:
    """Whether a thread waits for this process, a worker of a DataLoader, to drop what it computes."""
    ends, again = _MultiProcessingDataLoaderIter._shutdown_workers, _MultiProcessingDataLoaderIter._reset
    for thread in sys._current_frames().values():
        for frame in _frames(thread):
            waits = frame.f_code is ends.__code__ or (
                frame.f_code is again.__code__ and frame.f_locals.get("resume_iteration_cnt", 0) > 0
            )
            if waits and worker in {worker.pid for worker in frame.f_locals["self"]._workers}:
                return True
    return False


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer has hooks of its own that are called at a step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def is_step_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks or a profiler want to know of a step of this optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or _profiler_enabled()
    )


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unless` works for the next step of this optimizer."""
    if not getattr(optimizer, SKIP_ATTRIBUTES[0], False):
        return False
    # The groups decide, which a checkpoint may have replaced.
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # Torch allocates the buffers of momentum in the first step, and does not fill them if it is skipped.
    return not isinstance(optimizer, torch.optim.SGD) or not any(
        group["momentum"] and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def step_unless(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Make a step unless this float on the parameters' device is 1.0: then it changes nothing."""
    _, flag, scale = SKIP_ATTRIBUTES
    setattr(optimizer, flag, found_inf)
    setattr(optimizer, scale, None)
    try:
        optimizer.step()
    finally:
        delattr(optimizer, flag)
        delattr(optimizer, scale)


def loss_scale(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """The scale of the loss, on its device; the scaler writes later ones to the same tensor."""
    scale = scaler._get_scale_async()
    assert scale is not None, "the scaler has scaled no loss yet"
    return scale


def openmp_addresses() -> list[int] | None:
    """The addresses of OPENMP_FUNCTIONS in the library that torch's operations use; None if it has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [getattr(library, name) for name in OPENMP_FUNCTIONS]
    except (OSError, AttributeError):  # another system, or a torch that was built in another way
        return None
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
