"""The banner with which a fit begins: what is trained on what, with what, and where it is saved."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sized
from importlib.metadata import version
from typing import Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from karvan.data.identity import Identity
from karvan.distributed import Connection
from karvan.job.checkpoint_url import shown
from karvan.train.step.optimizer_step import engines_of
from karvan.train.trainer_parts import TrainerParts

_WIDTH, _NAMES = 80, 8  # columns of a line, tables in it


def show_banner(
    parts: TrainerParts, data: Iterable[Any], identity: Identity | None, *, resumes: bool
) -> None:
    """Show the banner, once for a Trainer, however many fits it makes."""
    if parts.run.banner_shown:
        return
    parts.run.banner_shown = True
    parts.progress.say(banner(parts, data, identity, resumes=resumes))


def banner(parts: TrainerParts, data: Iterable[Any], identity: Identity | None, *, resumes: bool) -> str:
    """Lines of at most 80 columns, except for paths that are longer."""
    runs, optimizers = parts.setup.runs, parts.setup.update.optimizers
    fields = {
        "data": _data(data, identity),
        "tables": _tables(parts) + _optimizer(optimizers.get("sparse")),
        "dense": _dense(parts) + _optimizer(optimizers.get("dense")),
        "job": _job(parts.connection),
        "folder": _folder(parts, resumes),
    }
    model = type(parts.model).__name__
    lines = [f"Karvan {version('karvan')}: {model} on {runs.device}, {runs.precision.name}"]
    for name, text in fields.items():
        if text:
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=f"  {name:<8}",
                subsequent_indent=" " * 10,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _data(data: Iterable[Any], identity: Identity | None) -> str:
    if identity is not None:
        return identity.label
    try:
        return f"{len(data):,} batch{'es' * (len(data) != 1)}" if isinstance(data, Sized) else ""
    except TypeError:  # it has no end
        return ""


def _tables(parts: TrainerParts) -> str:
    tables = [table for engine in engines_of(parts.model) for table in engine.tables()]
    if not tables:
        return "none"
    dims = {table.dim for table in tables}
    names = [table.name if len(dims) == 1 else f"{table.name} ({table.dim})" for table in tables]
    more = f", and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    dim = f" of dim {dims.pop()}" if len(dims) == 1 else ""
    devices = {table.store.device.type for table in tables} - {"cpu"}
    where = " on the GPU" if devices == {"cuda"} else ""
    return f"{len(tables)}{dim}{where}: {', '.join(names[:_NAMES])}{more}"


def _dense(parts: TrainerParts) -> str:
    parameters = list(parts.model.parameters())
    lazy = ", more with the first batch" if any(map(is_lazy, parameters)) else ""
    return f"{sum(each.numel() for each in parameters if not is_lazy(each)):,} parameters{lazy}"


def _optimizer(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return ""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    return f"; {type(optimizer).__name__}, lr {' and '.join(f'{rate:g}' for rate in sorted(rates))}"


def _job(connection: Connection) -> str:
    """Who trains together; nothing for a process alone."""
    ranks, servers, workers = connection.trainers.world_size, connection.servers, connection.workers
    counts = {
        "trainer": ranks,
        "parameter server": 0 if servers is None else len(servers),
        "embedding worker": 0 if workers is None else len(workers),
    }
    if ranks == 1 and servers is None:
        return ""
    parts = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count]
    if servers is None:
        return f"{parts[0]}, each with a part of the rows"
    return f"{', '.join(parts)}; mode {connection.settings.mode.name}"


def _folder(parts: TrainerParts, resumes: bool) -> str:
    if parts.saver.folder is None:
        return "none: there will be no checkpoints"
    state = f"resumed at step {parts.counts.step:,}" if resumes else "a new run"
    return f"{shown(parts.saver.folder)}, {state}"
