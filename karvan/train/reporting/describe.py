"""A short description of a Trainer, for `repr`, without calls to other ranks or servers."""

from __future__ import annotations

from torch.optim import Optimizer

from karvan.job.checkpoint_url import shown
from karvan.train.step.optimizer_step import engines_of
from karvan.train.trainer_parts import TrainerParts

_MANY = 8  # names in a line


def describe(parts: TrainerParts) -> str:
    """What it trains, how, and how far it is."""
    body = "".join(f"  {name}: {text}\n" for name, text in described(parts).items())
    return f"Trainer(\n{body})"


def described(parts: TrainerParts) -> dict[str, str]:
    """The same as texts by name."""
    model, counts = parts.model, parts.counts
    tables = [f"{table.name} ({table.dim})" for engine in engines_of(model) for table in engine.tables()]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    where = parts.connection
    lines = {
        "model": f"{type(model).__name__}, {parameters:,} parameters, on {parts.setup.runs.device}",
        "tables": _listed(tables),
        "loss": _one_line(parts.loss),
        **{
            f"{name}_optimizer": _optimizer(optimizer)
            for name, optimizer in parts.setup.update.optimizers.items()
        },
        "metrics": _listed(list(parts.metrics)),
        "checkpoints": "" if parts.saver.folder is None else shown(parts.saver.folder),
        "ranks": "" if where.world_size == 1 else f"{where.rank} of {where.world_size}",
        "progress": f"step {counts.step:,}, {counts.epoch} epoch{'s' * (counts.epoch != 1)}, "
        f"{counts.samples:,} samples",
    }
    return {name: text for name, text in lines.items() if text}


def _optimizer(optimizer: Optimizer) -> str:
    group = optimizer.param_groups[0]
    return f"{type(optimizer).__name__}(lr={float(group['lr']):g})"


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(names[:_MANY]) + more


def _one_line(value: object) -> str:
    """A name for functions, whose repr is an address."""
    name = getattr(value, "__qualname__", None)
    return str(name) if name else repr(value).splitlines()[0]
