"""Fits the features of a job before it trains, in one pass over its training data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from karvan.cli.errors import CommandError
from karvan.cli.output import CountedBatches, console, progress

if TYPE_CHECKING:
    import karvan as kv


def fit_features(job: kv.TrainingJob, *, quiet: bool) -> None:
    """Fit the engines of a job that lack statistics: that of its data first, then those in its model.

    A job that resumes from a checkpoint takes its statistics from there and needs no fit.
    """
    from karvan.features import FeatureEngine

    transform = getattr(job.data, "transform", None)
    if isinstance(transform, FeatureEngine) and transform.unfitted:
        _fit(transform, _pass_of(job.data, transform, transformed=False), quiet)
    for module in job.trainer.model.modules():
        if isinstance(module, FeatureEngine) and module.unfitted:
            _fit(module, _pass_of(job.data, module, transformed=True), quiet)


def _pass_of(data: Any, engine: kv.FeatureEngine, *, transformed: bool) -> Iterable[Any]:
    single_pass = getattr(data, "single_pass", None)
    if single_pass is None:
        raise CommandError(
            f"FeatureEngine '{engine.name}' has no statistics yet for {', '.join(engine.unfitted)}. Expected "
            f"data of kv.data.read, to find them in one pass, got {type(data).__name__}: call "
            "engine.fit(batches) in job()."
        )
    return single_pass(transformed=transformed)  # type: ignore[no-any-return]


def _fit(engine: kv.FeatureEngine, batches: Iterable[Any], quiet: bool) -> None:
    from karvan import distributed

    names = ", ".join(engine.unfitted)
    quiet = quiet or distributed.current().rank != 0
    with progress("Fitting features", "samples", quiet=quiet) as steps:
        engine.fit(CountedBatches(batches, steps))
    if not quiet:
        console(stderr=True).print(f"Fitted {names} to the training data.", markup=False)
