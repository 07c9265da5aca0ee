"""`Accumulating`: what RecIS's sparse optimizers have beside those of `kv.optim`."""

from __future__ import annotations

from karvan.compat.unsupported import UnsupportedError, require_default


class Accumulating:
    """Gradients of several backward passes are summed; `step` applies them all."""

    def set_grad_accum_steps(self, steps: int) -> None:
        """Not supported, except for 1."""
        if steps != 1:
            raise UnsupportedError(
                f"set_grad_accum_steps({steps})",
                "give TrainingArguments gradient_accumulation_steps, or call step() after the last batch.",
            )


def require_no_decay(lr_decay: float) -> None:
    """Raise for a learning rate that falls by itself."""
    require_default("lr_decay", lr_decay, 0, "give the optimizer a scheduler of torch.")
