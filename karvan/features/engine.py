"""`FeatureEngine`: from a batch of raw columns to ids and floats, equal steps of many features at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from karvan.features.feature import Feature
from karvan.features.numbers import Normalise
from karvan.features.op import Job, run
from karvan.features.plan import Stage, needs, plan, sources
from karvan.features.statistics import Moments
from karvan.ragged import Entry, NestedRagged, Ragged
from karvan.rows import values_of


class FeatureEngine(nn.Module):
    """Runs the chains of all features on a batch.

    The result holds every feature, and every entry of the batch that no feature has the name of. Entries are
    never changed, but results may share memory with them and with each other. Fitted statistics are part of
    the state dict. `forward` may be called from several threads.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        super().__init__()
        for feature in features:
            if not isinstance(feature, Feature):
                raise TypeError(f"FeatureEngine expects Features, but received {type(feature).__name__}.")
        self._features = {feature.name: feature for feature in features}
        self._made = sources(features)
        self._stages = plan(features)
        self._fitted = [
            (feature.name, step)
            for feature in features
            for step, op in enumerate(feature.ops)
            if isinstance(op, Normalise) and op.mean is None
        ]

    @property
    def features(self) -> list[Feature]:
        """The features, in the order in which they were given, with fitted statistics."""
        return list(self._features.values())

    @property
    def row_wise(self) -> bool:
        """Whether each row's features depend on that row alone; a `Loader` asks, to compute many at once."""
        return all(op.row_wise for feature in self.features for op in feature.ops)

    def stages(self) -> list[Stage]:
        """The plan: which steps of which features run together."""
        return list(self._stages)

    def forward(self, batch: Mapping[str, Entry]) -> dict[str, Entry]:
        """The features of a batch."""
        values: dict[str, tuple[Entry, ...]] = {}
        for stage in self._stages:
            jobs: list[Job] = []
            sizes: list[int] = []
            for name, step in stage.steps:
                op = self._features[name].ops[step]
                entries = self._inputs(name, batch, values) if step == 0 else values[name]
                arguments = [entries] if op.joins else [(entry,) for entry in entries]
                made = [Job(name, part, argument) for argument in arguments for part in op.parts()]
                jobs += made
                sizes.append(len(made))
            results = iter(run(jobs))
            for (name, _), size in zip(stage.steps, sizes, strict=True):
                values[name] = tuple(next(results) for _ in range(size))
        result = {name: entry for name, entry in batch.items() if name not in self._made}
        for name, feature in self._features.items():
            made_of = self._inputs(name, batch, values) if not feature.ops else values[name]
            result.update(zip(feature.outputs(), made_of, strict=True))
        return result

    def _inputs(
        self, name: str, batch: Mapping[str, Entry], values: Mapping[str, tuple[Entry, ...]]
    ) -> tuple[Entry, ...]:
        """What a chain starts from: entries of the batch, and results of other features."""
        feature = self._features[name]
        found: list[Entry] = []
        for column in feature.columns or (name,):
            other = None if feature.raw or column == name else self._made.get(column)
            if other is not None and other != name:
                outputs = self._features[other].outputs()
                results = values[other] if self._features[other].ops else self._inputs(other, batch, values)
                found.append(results[outputs.index(column)])
            elif column in batch:
                found.append(batch[column])
            else:
                raise KeyError(
                    f"Feature '{name}' needs column '{column}', which is not in the batch; "
                    f"it has: {', '.join(map(str, batch)) or 'nothing'}."
                )
            _check_kind(name, column, found[-1])
        return tuple(found)

    def fit(self, batches: Iterable[Mapping[str, Entry]]) -> FeatureEngine:
        """Find the statistics of every `normalise()` that was given none, over all batches, and return self.

        NaN does not count. Calling it again replaces what was found before.
        """
        if not self._fitted:
            raise ValueError("fit expects a feature with normalise() without statistics, but there is none.")
        before = self._before_fitting()
        moments = {place: Moments() for place in self._fitted}
        for batch in batches:
            made = before(batch)
            for (name, _), moment in moments.items():
                for output in before._features[name].outputs():
                    moment.add(values_of(made[output]))
        for (name, _), moment in moments.items():
            if not moment.count:
                raise ValueError(f"Feature '{name}', normalise: expected values to fit, but there were none.")
        self._set([(moment.mean, moment.std) for moment in moments.values()])
        return self

    def _before_fitting(self) -> FeatureEngine:
        """An engine that ends each fitted chain just before its statistics are needed."""
        cut: dict[str, Feature] = {}
        late: set[str] = set()
        for name, step in self._fitted:
            if name in cut:
                raise ValueError(
                    f"Feature '{name}' has two normalise() to fit; give statistics to one of them."
                )
            cut[name] = dataclasses.replace(self._features[name], ops=self._features[name].ops[:step])
        waits = {feature.name: needs(feature, self._made) for feature in self.features}
        while grown := {n for n, w in waits.items() if n not in late and w & (late | cut.keys())}:
            late |= grown
        if both := [name for name in cut if name in late]:
            raise ValueError(
                f"Feature '{both[0]}', normalise: cannot be fitted, since it starts from features "
                "that are to be fitted themselves; give statistics to one of them."
            )
        return FeatureEngine([cut.get(f.name, f) for f in self.features if f.name not in late])

    def _set(self, statistics: Sequence[tuple[float | None, float | None]]) -> None:
        for (name, step), (mean, std) in zip(self._fitted, statistics, strict=True):
            ops = list(self._features[name].ops)
            ops[step] = Normalise(mean, std)
            self._features[name] = dataclasses.replace(self._features[name], ops=tuple(ops))

    def get_extra_state(self) -> Tensor:
        """Mean and standard deviation of each fitted step, NaN before `fit`; part of the state dict."""
        rows = []
        for name, step in self._fitted:
            op = self._features[name].ops[step]
            assert isinstance(op, Normalise)
            rows.append([float("nan")] * 2 if op.mean is None or op.std is None else [op.mean, op.std])
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the statistics of another engine with the same features."""
        if tuple(state.shape) != (len(self._fitted), 2):
            raise ValueError(
                f"FeatureEngine expects statistics of shape ({len(self._fitted)}, 2), one row for each "
                f"normalise() that is fitted, but received {tuple(state.shape)}."
            )
        known = [(None, None) if mean != mean else (mean, std) for mean, std in state.tolist()]
        self._set(known)

    def extra_repr(self) -> str:
        """The features' names."""
        return ", ".join(self._features)


def _check_kind(name: str, column: str, entry: object) -> None:
    if isinstance(entry, Ragged | NestedRagged) or (isinstance(entry, Tensor) and entry.dim()):
        return
    kind = f"{'0-D ' if isinstance(entry, Tensor) else ''}{type(entry).__name__}"
    raise TypeError(
        f"Feature '{name}' expects column '{column}' to be a Ragged, a NestedRagged or a Tensor of rows, "
        f"but it is a {kind}."
    )
