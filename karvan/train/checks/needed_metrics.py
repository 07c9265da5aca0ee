"""Checks that evaluations give the metrics by which callbacks and keep_best decide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from karvan.train.losses import ColumnLoss, Sum
from karvan.train.types import Loss


class NeededMetrics:
    """The metrics that callbacks need, by their names, and those of keep_best and of schedulers."""

    def __init__(
        self,
        of_callbacks: Mapping[str, Sequence[str]],
        best_metric: str | None,
        of_scheduler: str | None = None,
    ) -> None:
        self._needs = {f"callback {name}": list(metrics) for name, metrics in of_callbacks.items()}
        if of_scheduler is not None:
            self._needs["scheduler ReduceLROnPlateau"] = [of_scheduler]
        if best_metric is not None:
            self._needs["keep_best"] = [best_metric]

    def check_evaluated(self, has_eval_data: bool) -> None:
        """Raise if there are no evaluations, but something needs their metrics."""
        if self._needs and not has_eval_data:
            who, metrics = next(iter(self._needs.items()))
            raise ValueError(
                f"{_named(who, 'The')} needs '{metrics[0]}' of evaluations, but this fit has no eval_data: "
                "give fit(…, eval_data=…)."
            )

    def check_known(self, metrics: Iterable[str], loss: Loss) -> None:
        """Raise if the evaluations of a Trainer with these metrics and this loss lack one."""
        known = ["loss", *metrics]
        named = isinstance(loss, Sum)
        if isinstance(loss, Sum):
            known += [f"loss/{name}" for name in loss.losses]
        for who, needed in self._needs.items():
            for metric in needed:
                # A loss function of the user's own may give losses by any names.
                free = metric.startswith("loss/") and not (named or isinstance(loss, ColumnLoss))
                if metric not in known and not free:
                    raise ValueError(
                        f"{_named(who, 'The')} needs '{metric}', but evaluations give: {', '.join(known)}. "
                        f"Add it to the Trainer's metrics: metrics={{'{metric}': …}}."
                    )

    def require_numbers(self, metrics: Mapping[str, float], step: int, nonfinite: str) -> None:
        """Raise if one is NaN; nonfinite: text about columns with NaN or infinite values, if any."""
        for who, names in self._needs.items():
            for name in names:
                if name in metrics and math.isnan(metrics[name]):
                    raise ValueError(
                        f"The evaluation at step {step} gives NaN for '{name}', but {_named(who, 'the')} "
                        "needs it to decide." + (nonfinite or _hint(name))
                    )


def _named(who: str, article: str) -> str:
    return who if who == "keep_best" else f"{article} {who}"


def _hint(name: str) -> str:
    return (
        f" Look at the evaluation data and at the model's outputs: a NaN in either makes '{name}' NaN. "
        "Metrics such as AUC are also NaN if all labels are equal."
    )
