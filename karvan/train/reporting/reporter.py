"""Reports: the numbers of a fit, for logs and progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from karvan.train.reporting.progress import memory_bytes
from karvan.train.reporting.results import FitResult, Report
from karvan.train.state.gathering import merged, summed
from karvan.train.step.optimizer_step import engines_of

_log = logging.getLogger("karvan.train")

if TYPE_CHECKING:
    from karvan.train.trainer import Trainer


class Reporter:
    """Tells a Trainer's logs and progress how it goes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._engines = engines_of(trainer.model)
        self._counted: dict[str, int] = {}  # of lookups and pushes, up to the last report
        self._stale: dict[str, float] = {}  # what that has told of them
        self._last = (time.monotonic(), trainer.counts.samples)

    def training(self) -> None:
        """Losses since the last report, metrics since the epoch began, and speed; of all ranks."""
        trainer = self._trainer
        channel = trainer.connection.main
        if not (losses := trainer.window.means(channel)):
            return
        (before, samples), self._last = self._last, (time.monotonic(), trainer.counts.samples)
        rates = {
            f"lr/{name}": float(optimizer.param_groups[0]["lr"])
            for name, optimizer in trainer.update.optimizers.items()
        }
        metrics = self.metrics()
        rows = self._rows()
        held = summed(channel, {"rows": sum(rows.values()), "memory": memory_bytes(trainer.device), **rows})
        values = {
            "samples_per_second": (self._last[1] - samples) / max(self._last[0] - before, 1e-9),
            **losses,
            **metrics,
            **held,
            **self._staleness(),
            **rates,
        }
        self._tell("train", values)
        trainer.window.reset()

    def _rows(self) -> dict[str, int]:
        """The rows of each table, as far as this rank holds them."""
        rows: dict[str, int] = {}
        for engine in self._engines:
            for table, count in engine.sizes().items():
                rows[f"rows/{table}"] = rows.get(f"rows/{table}", 0) + count
        return rows

    def _staleness(self) -> dict[str, float]:
        """Where rows or parameters are on servers: how far gradients were behind since the last report.

        staleness: batches between lookup and applied gradient, this one included; staleness_max: the most of
        them, since training began. dense_staleness: steps of others between pulling dense parameters and
        pushing their gradients.
        """
        trainer = self._trainer
        if trainer.connection.servers is None:
            return {}
        ahead, dense = [engine.store.staleness for engine in self._engines], trainer.dense.staleness
        now = {
            "lookups": sum(each.lookups for each in ahead),
            "out": sum(each.total for each in ahead),
            "pushes": dense.pushes,
            "behind": dense.total,
        }
        told = trainer.connection.main.gather_json(
            [
                {name: value - self._counted.get(name, 0) for name, value in now.items()},
                max((each.most for each in ahead), default=0),
            ]
        )
        self._counted = now
        counts = {name: sum(each[name] for each, _ in told) for name in now}
        if counts["lookups"]:  # not if all were made before
            self._stale["staleness"] = counts["out"] / counts["lookups"]
            self._stale["staleness_max"] = max(most for _, most in told)
        if counts["pushes"]:
            self._stale["dense_staleness"] = counts["behind"] / counts["pushes"]
        return self._stale

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """What an evaluation gave."""
        self._tell("eval", metrics)

    def exclude(self, seconds: float) -> None:
        """Do not count so many seconds as time of training."""
        then, samples = self._last
        self._last = (then + seconds, samples)

    def metrics(self) -> dict[str, float]:
        """The metrics of training so far, over all ranks."""
        return merged(self._trainer.connection.main, self._trainer.metrics)

    def end(self, result: FitResult, skipped: int) -> None:
        """The last words, and a loud one if steps of this fit were skipped."""
        trainer = self._trainer
        trainer.progress.end()
        trainer.progress.say(_last_words(result))
        if not skipped:
            return
        text = f"{skipped} of {result.trained} steps were skipped, because a gradient was not finite."
        if trainer.precision.always_checks:  # a step now and then is too large on purpose
            trainer.progress.say(text)
        elif trainer.connection.rank == 0:
            trainer.progress.say(f"WARNING: {text}")
            _log.warning(text)

    def _tell(self, kind: str, values: Mapping[str, float]) -> None:
        counts = self._trainer.counts
        # Behind the last batch of an epoch, the numbers are still those of that epoch.
        epoch = counts.epoch if counts.batches or not counts.epoch else counts.epoch - 1
        report = Report(kind, counts.step, epoch, values, counts.samples, time.time())
        self._trainer.loggers.write(report)
        self._trainer.progress.report(report)


def _last_words(result: FitResult) -> str:
    where = f"; checkpoint at {result.checkpoint}" if result.checkpoint else "; there are no checkpoints"
    if result.stopped in ("interrupt", "terminate"):
        by = "Ctrl-C" if result.stopped == "interrupt" else "SIGTERM"
        return f"Stopped by {by} after step {result.step}{where}."
    if result.stopped:
        return f"Stopped after step {result.step} ({result.stopped}){where}."
    if not result.trained:
        return f"Trained up to step {result.step} already, nothing more to do{where}."
    return f"Trained {result.trained} steps in {result.seconds:.1f} s, up to step {result.step}{where}."
