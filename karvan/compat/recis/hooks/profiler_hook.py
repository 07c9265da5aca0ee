"""`ProfilerHook`: traces of torch's profiler."""

from __future__ import annotations

from typing import Any

from torch.profiler import profile, schedule, tensorboard_trace_handler
from typing_extensions import override

from karvan.compat.recis.hooks.hook import Hook


class ProfilerHook(Hook):
    """Writes traces of `active` steps into a folder, after `wait` and `warmup` steps, `repeat` times."""

    def __init__(
        self, wait: int = 1, warmup: int = 48, active: int = 1, repeat: int = 4, output_dir: str = "./"
    ) -> None:
        self._profile = profile(
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
            on_trace_ready=tensorboard_trace_handler(output_dir),
            record_shapes=True,
            with_stack=True,
        )

    @override
    def start(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if is_train:
            self._profile.start()

    @override
    def after_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if is_train:
            self._profile.step()

    @override
    def end(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        if is_train:
            self._profile.stop()
