"""Reports: the numbers of a fit, for logs and progress."""

from __future__ import annotations

import logging
import math
import textwrap
import time
from collections.abc import Iterable, Mapping, Sized
from importlib.metadata import version
from typing import Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from karvan.data.identity import Identity
from karvan.display import duration_text
from karvan.distributed import Connection
from karvan.job.checkpoint_url import shown
from karvan.job.environment import JobEnvironment
from karvan.train.assembly import TrainerParts
from karvan.train.optimizer_step import engines_of
from karvan.train.progress import memory_bytes, memory_owner
from karvan.train.results import FitResult, Report, merged, summed

# The banner with which a fit begins: what is trained on what, with what, and where it is saved; and `repr`.


_WIDTH, _NAMES = 80, 8  # columns of a line, tables in it


def show_banner(
    trainer: TrainerParts, data: Iterable[Any], identity: Identity | None, *, resumes: bool
) -> None:
    """Show the banner, once for a Trainer, however many fits it makes."""
    if trainer.run_progress.banner_shown:
        return
    trainer.run_progress.banner_shown = True
    trainer.progress.say(banner(trainer, data, identity, resumes=resumes))


def banner(trainer: TrainerParts, data: Iterable[Any], identity: Identity | None, *, resumes: bool) -> str:
    """Lines of at most 80 columns, except for paths that are longer."""
    runs, optimizers = trainer.setup.runs, trainer.setup.update.optimizers
    fields = {
        "data": _data(data, identity),
        "tables": _tables(trainer) + _optimizer(optimizers.get("sparse")),
        "dense": _dense(trainer) + _optimizer(optimizers.get("dense")),
        "job": _job(trainer.connection),
        "folder": _folder(trainer, resumes),
    }
    model = type(trainer.model).__name__
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


def _tables(trainer: TrainerParts) -> str:
    tables = [table for engine in engines_of(trainer.model) for table in engine.tables()]
    if not tables:
        return "none"
    dims = {table.dim for table in tables}
    names = [table.name if len(dims) == 1 else f"{table.name} ({table.dim})" for table in tables]
    dim = f" of dim {dims.pop()}" if len(dims) == 1 else ""
    devices = {table.store.device.type for table in tables} - {"cpu"}
    where = " on the GPU" if devices == {"cuda"} else ""
    return f"{len(tables)}{dim}{where}: {_listed(names)}"


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def _dense(trainer: TrainerParts) -> str:
    parameters = list(trainer.model.parameters())
    lazy = ", more with the first batch" if any(map(is_lazy, parameters)) else ""
    return (
        f"{sum(parameter.numel() for parameter in parameters if not is_lazy(parameter)):,} parameters{lazy}"
    )


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


def _folder(trainer: TrainerParts, resumes: bool) -> str:
    if trainer.saver.folder is None:
        return "none: there will be no checkpoints"
    state = f"resumed at step {trainer.counts.step:,}" if resumes else "a new run"
    return f"{shown(trainer.saver.folder)}, {state}"


def described(trainer: TrainerParts) -> dict[str, str]:
    """What a Trainer trains, how, and how far it is, for its `repr`, without calls to others."""
    model, counts, where = trainer.model, trainer.counts, trainer.connection
    tables = [f"{table.name} ({table.dim})" for engine in engines_of(model) for table in engine.tables()]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    epochs = f"{counts.epoch} epoch{'s' * (counts.epoch != 1)}"
    lines = {
        "model": f"{type(model).__name__}, {parameters:,} parameters, on {trainer.setup.runs.device}",
        "tables": _listed(tables),
        # The name of a function, whose repr is an address.
        "loss": getattr(trainer.loss, "__qualname__", None) or repr(trainer.loss).splitlines()[0],
        **{
            f"{name}_optimizer": f"{type(optimizer).__name__}(lr={float(optimizer.param_groups[0]['lr']):g})"
            for name, optimizer in trainer.setup.update.optimizers.items()
        },
        "metrics": _listed(list(trainer.metrics)),
        "checkpoints": "" if trainer.saver.folder is None else shown(trainer.saver.folder),
        "ranks": "" if where.world_size == 1 else f"{where.rank} of {where.world_size}",
        "progress": f"step {counts.step:,}, {epochs}, {counts.samples:,} samples",
    }
    return {name: text for name, text in lines.items() if text}


_log = logging.getLogger("karvan.train")

_REPORTS = 50  # of a fit, at least, if it has as many steps
_LONGEST = 100  # steps between two reports


def report_period(steps: int | None) -> int:
    """How many steps are between two reports to loggers, for a fit of so many steps; None if unknown."""
    return _LONGEST if steps is None else max(1, min(_LONGEST, steps // _REPORTS))


class Reporter:
    """Sends reports to a Trainer's loggers and progress; `steps` are those of the fit, if they are known."""

    def __init__(self, trainer: TrainerParts, steps: int | None) -> None:
        self._trainer = trainer
        self.period = trainer.log_every or report_period(steps)
        self._engines = engines_of(trainer.model)
        self._counted: dict[str, int] = {}  # of lookups and pushes, up to the last report
        self._stale: dict[str, float] = {}  # the staleness in the last report
        self._last = self._shown = (time.monotonic(), trainer.counts.samples)
        self._wanted: int | None = trainer.counts.step + 1  # by the first rank; see `shows`

    def shows(self, step: int) -> bool:
        """Whether progress wants numbers after this step, although loggers do not."""
        if self._trainer.log_every is not None:
            return False
        alone = self._trainer.connection.world_size == 1
        wanted = self._trainer.progress.next_report if alone else self._wanted
        return wanted is not None and step >= wanted

    def show(self, metrics: Mapping[str, float] | None = None) -> None:
        """Show what the next report for loggers would have so far; a collective like `training`."""
        now = time.monotonic(), self._trainer.counts.samples
        values = self._training_values(metrics, now, self._shown)
        self._shown = now
        if values:
            everything = {**values, **self._stale, **self._rates()}
            self._trainer.progress.report(self._make_report("train", everything))
        self._agree_on_next()

    def training(self, metrics: Mapping[str, float] | None = None) -> None:
        """Losses since the last report, metrics since the start of the epoch, and speed; of all ranks.

        metrics: those of all ranks, if they are known.
        """
        now = time.monotonic(), self._trainer.counts.samples
        values = self._training_values(metrics, now, self._last)
        if not values:
            return
        self._last = self._shown = now
        self._report("train", {**values, **self._staleness(), **self._rates()})
        self._trainer.window.reset()
        self._agree_on_next()

    def _training_values(
        self, metrics: Mapping[str, float] | None, now: tuple[float, int], before: tuple[float, int]
    ) -> dict[str, float]:
        """Speed, losses, metrics, rows and memory; nothing if there are no losses."""
        trainer = self._trainer
        channel = trainer.connection.main
        if not (losses := trainer.window.means(channel)):
            return {}
        if metrics is None:
            metrics = self.metrics()
        rows = self._rows()
        memory = memory_bytes(trainer.setup.runs.device)
        return {
            "samples_per_second": (now[1] - before[1]) / max(now[0] - before[0], 1e-9),
            **losses,
            **{name: value for name, value in metrics.items() if not math.isnan(value)},  # of no samples
            **summed(channel, {"rows": sum(rows.values()), "memory": memory, **rows}),
        }

    def _agree_on_next(self) -> None:
        """All ranks learn when the first one shows numbers next."""
        connection = self._trainer.connection
        if self._trainer.log_every is None and connection.world_size > 1:
            self._wanted = connection.main.gather_json(self._trainer.progress.next_report)[0]

    def _rates(self) -> dict[str, float]:
        return {
            f"lr/{name}": float(optimizer.param_groups[0]["lr"])
            for name, optimizer in self._trainer.setup.update.optimizers.items()
        }

    def _rows(self) -> dict[str, int]:
        """The rows of each table, as far as this rank holds them."""
        rows: dict[str, int] = {}
        for engine in self._engines:
            for table, count in engine.sizes().items():
                rows[f"rows/{table}"] = rows.get(f"rows/{table}", 0) + count
        return rows

    def _staleness(self) -> dict[str, float]:
        """With rows or parameters on servers: how stale gradients were since the last report.

        staleness: batches between lookup and applied gradient, this one included; staleness_max: the largest
        since training started. dense_staleness: steps of others between pulling dense parameters and pushing
        their gradients.
        """
        trainer = self._trainer
        if trainer.connection.servers is None:
            return {}
        ahead, dense = [engine.store.staleness for engine in self._engines], trainer.setup.dense.staleness
        now = {
            "lookups": sum(lookups.lookups for lookups in ahead),
            "out": sum(lookups.total for lookups in ahead),
            "pushes": dense.pushes,
            "behind": dense.total,
        }
        gathered = trainer.connection.main.gather_json(
            [
                {name: value - self._counted.get(name, 0) for name, value in now.items()},
                max((lookups.most for lookups in ahead), default=0),
            ]
        )
        self._counted = now
        counts = {name: sum(rank_counts[name] for rank_counts, _ in gathered) for name in now}
        if counts["lookups"]:  # otherwise all were made before
            self._stale["staleness"] = counts["out"] / counts["lookups"]
            self._stale["staleness_max"] = max(most for _, most in gathered)
        if counts["pushes"]:
            self._stale["dense_staleness"] = counts["behind"] / counts["pushes"]
        return self._stale

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Report the results of an evaluation."""
        self._report("eval", metrics)

    def exclude(self, seconds: float) -> None:
        """Do not count these seconds as training time."""
        self._last = (self._last[0] + seconds, self._last[1])
        self._shown = (self._shown[0] + seconds, self._shown[1])

    def metrics(self) -> dict[str, float]:
        """The metrics of training so far, over all ranks."""
        return merged(self._trainer.connection.trainers, self._trainer.metrics)

    def end(self, result: FitResult, skipped: int) -> None:
        """Show the final message, and a warning if steps of this fit, or records, were skipped."""
        trainer = self._trainer
        trainer.progress.end()
        trainer.progress.say(_final_message(result))
        saved_early = result.checkpoint is not None and result.stopped in ("interrupt", "terminate")
        if saved_early and not JobEnvironment.read().job:  # of a launched job, the launcher says it
            trainer.progress.say(trainer.resume_hint)
        if result.bad_records:
            some = f"{result.bad_records} bad record{'s' * (result.bad_records != 1)}"
            trainer.progress.say(f"WARNING: {some} skipped, because they raised errors.")
        if not skipped:
            return
        text = f"{skipped} of {result.trained} steps were skipped, because a gradient was not finite."
        if trainer.setup.runs.precision.always_checks:  # occasional overflows are part of fp16
            trainer.progress.say(text)
        elif trainer.connection.rank == 0:
            trainer.progress.say(f"WARNING: {text}")
            _log.warning(text)

    def _make_report(self, kind: str, values: Mapping[str, float]) -> Report:
        counts = self._trainer.counts
        # After the last batch of an epoch, the numbers are still those of that epoch.
        epoch = counts.epoch if counts.batches or not counts.epoch else counts.epoch - 1
        memory_of = memory_owner(self._trainer.setup.runs.device, self._trainer.connection.world_size)
        return Report(kind, counts.step, epoch, values, counts.samples, time.time(), memory_of)

    def _report(self, kind: str, values: Mapping[str, float]) -> None:
        report = self._make_report(kind, values)
        self._trainer.loggers.write(report)
        self._trainer.progress.report(report)


def _final_message(result: FitResult) -> str:
    where = f"; checkpoint at {result.checkpoint}" if result.checkpoint else "; there are no checkpoints"
    if result.stopped in ("interrupt", "terminate"):
        by = "Ctrl-C" if result.stopped == "interrupt" else "SIGTERM"
        return f"Stopped by {by} after step {result.step}{where}."
    if result.stopped:
        return f"Stopped after step {result.step} ({result.stopped}){where}."
    if not result.trained:
        return f"Trained up to step {result.step} already, nothing more to do{where}."
    time_taken = duration_text(result.seconds)
    return f"Trained {result.trained} steps in {time_taken}, up to step {result.step}{where}."
