"""`FeatureEngine`: from a batch of raw columns to ids and floats, equal steps of many features at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from karvan.argument_checks import listed
from karvan.features.absent_columns import LISTS, Kind, find_kind, rows_like
from karvan.features.describe import describe_chain
from karvan.features.feature import Feature
from karvan.features.fitting import gather_statistics
from karvan.features.fusion_plan import Stage, needs, plan, sources
from karvan.features.ops.base import OpCall, run
from karvan.features.ops.fitted import FittedOp
from karvan.ragged import Entry, NestedRagged, Ragged

STEPS = "karvan.steps"
"""The entry of the state that describes the steps that the statistics belong to."""


class FeatureEngine(nn.Module):
    """Run the chains of all features on a batch.

    The result holds every feature, and every entry of the batch whose name no feature has. Entries are never
    changed, but results may share memory with them. Fitted statistics are part of the state dict and of
    checkpoints. `forward` may be called from several threads.

    Args:
        features: The features, in any order.
        name: What identifies the statistics in checkpoints, if the engine is the `transform` of a loader.

    Raises:
        ValueError: Two features have the same result, or they need each other in a circle.
        TypeError: `features` is no list of Features.

    Example:
        >>> engine = kv.FeatureEngine([kv.Feature("price").normalise()])
        >>> batch = {"price": torch.tensor([1.0, 3.0])}
        >>> engine.fit([batch])(batch)["price"]
        tensor([-1.,  1.])
    """

    def __init__(self, features: Sequence[Feature], *, name: str = "features") -> None:
        super().__init__()
        if not isinstance(name, str) or not name:
            raise ValueError(f"FeatureEngine expects a name, but received {name!r}.")
        self.name = name
        if isinstance(features, Feature):
            raise TypeError(
                f"FeatureEngine expects a list of Features: give it [kv.Feature('{features.name}')]."
            )
        for feature in features:
            if not isinstance(feature, Feature):
                raise TypeError(f"FeatureEngine expects Features, but received {type(feature).__name__}.")
        self._features = {feature.name: feature for feature in features}
        self._sources = sources(features)
        self._stages = plan(features)
        steps = {feature.name: _step_to_fit(feature) for feature in features}
        self._fitted = {name: step for name, step in steps.items() if step is not None}
        self._absent_kinds: dict[str, Kind] = {}  # of columns that batches have lacked, by feature
        self._unfitted_ops = {name: self._op_to_fit(name) for name in self._fitted}

    @property
    def features(self) -> list[Feature]:
        """The features in the order in which they were given, with fitted statistics."""
        return list(self._features.values())

    @property
    def row_wise(self) -> bool:
        """Whether a sample's features depend on this sample alone."""
        return all(op.row_wise for feature in self.features for op in feature.ops)

    def stages(self) -> list[Stage]:
        """Return the plan: which steps of which features run together.

        Returns:
            The stages in their order.
        """
        return list(self._stages)

    def forward(self, batch: Mapping[str, Entry]) -> dict[str, Entry]:
        """Compute the features of a batch.

        Args:
            batch: Columns by name.

        Returns:
            The features, and the entries whose names no feature has.

        Raises:
            TypeError: `batch` is no mapping, or a column is of another kind than a step expects.
            ValueError: A feature is not fitted yet.
        """
        if not hasattr(batch, "items"):
            raise TypeError(
                f"FeatureEngine expects a batch, a mapping of columns to tensors, got {type(batch).__name__}."
            )
        values: dict[str, tuple[Entry, ...]] = {}
        for stage in self._stages:
            jobs: list[OpCall] = []
            sizes: list[int] = []
            for name, step in stage.steps:
                op = self._features[name].ops[step]
                entries = self._inputs(name, batch, values) if step == 0 else values[name]
                arguments = [entries] if op.joins else [(entry,) for entry in entries]
                calls = [OpCall(name, part, argument) for argument in arguments for part in op.parts()]
                jobs += calls
                sizes.append(len(calls))
            results = iter(run(jobs))
            for (name, _), size in zip(stage.steps, sizes, strict=True):
                values[name] = tuple(next(results) for _ in range(size))
        result = {name: entry for name, entry in batch.items() if name not in self._sources}
        for name, feature in self._features.items():
            entries = self._inputs(name, batch, values) if not feature.ops else values[name]
            result.update(zip(feature.outputs(), entries, strict=True))
        return result

    def _inputs(
        self, name: str, batch: Mapping[str, Entry], values: Mapping[str, tuple[Entry, ...]]
    ) -> tuple[Entry, ...]:
        """The inputs of a chain: entries of the batch, and results of other features."""
        feature = self._features[name]
        found: list[Entry] = []
        for column in feature.columns or (name,):
            other = None if feature.raw or column == name else self._sources.get(column)
            if other is not None and other != name:
                outputs = self._features[other].outputs()
                results = values[other] if self._features[other].ops else self._inputs(other, batch, values)
                found.append(results[outputs.index(column)])
            elif column in batch:
                found.append(batch[column])
            elif feature.missing == "empty":
                found.append(self._absent(name, column, batch))
            else:
                raise KeyError(
                    f"Feature '{name}' needs column '{column}', which is not in the batch; it has: "
                    f"{listed(column, batch)} With missing='empty' the feature is empty in such a batch."
                )
            _check_kind(name, column, found[-1])
        return tuple(found)

    def _absent(self, name: str, column: str, batch: Mapping[str, Entry]) -> Entry:
        """A column that the batch lacks, without values, of a kind that the chain takes."""
        kind = self._absent_kinds.get(name)
        if kind is None:
            feature = dataclasses.replace(self._features[name], raw=True, missing="error")
            columns = feature.columns or (name,)
            alone = FeatureEngine([feature])
            found: Kind | None = LISTS
            if feature.ops:
                text = feature.ops[0].takes_text
                found = find_kind(lambda entry: alone(dict.fromkeys(columns, entry)), text)
            if found is None:
                raise ValueError(
                    f"Feature '{name}' needs column '{column}', but the batch lacks it, and its steps do "
                    "not take an empty one: expected the column, or steps for samples without values."
                )
            kind = self._absent_kinds[name] = found
        rows = rows_like(batch)
        if rows is None:
            raise ValueError(
                f"Feature '{name}' is empty where a batch lacks column '{column}', but the batch has no "
                "column at all, so its number of samples is unknown."
            )
        return kind(rows)

    @property
    def unfitted(self) -> list[str]:
        """The features that cannot be computed before `fit`, or before statistics are loaded."""
        return [name for name in self._fitted if not self._op_to_fit(name).ready]

    def require_fitted(self) -> None:
        """Raise if a feature cannot be computed yet.

        Raises:
            ValueError: A feature lacks its statistics.
        """
        if unfitted := self.unfitted:
            raise ValueError(
                f"FeatureEngine '{self.name}' has no statistics yet for {_listed(unfitted)}: expected "
                "engine.fit(batches) before, with batches of a loader without this transform, or the "
                "statistics of a checkpoint."
            )

    def _op_to_fit(self, name: str) -> FittedOp:
        op = self._features[name].ops[self._fitted[name]]
        assert isinstance(op, FittedOp)
        return op

    def fit(self, batches: Iterable[Mapping[str, Entry]]) -> FeatureEngine:
        """Compute the statistics and words that features find in data.

        These are the mean and deviation of `normalise()`, and the words of `vocabulary()`, where they have no
        arguments. NaN and empty strings do not count. Calling it again replaces the previous result. After
        `kv.connect`, all ranks call it, each with its share of the data; all get the same bits as one process
        with all the data would.

        Args:
            batches: Batches of columns, such as a `kv.data.read(...)`.

        Returns:
            The engine.

        Raises:
            ValueError: No feature needs it, or values are infinite.
        """
        if not self._fitted:
            raise ValueError(
                "fit expects a feature with normalise() or vocabulary() without arguments, but there is none."
            )
        before = self._before_fitting()
        statistics = {name: self._op_to_fit(name).statistics() for name in self._fitted}

        def entries(batch: Mapping[str, Entry]) -> dict[str, list[Entry]]:
            result = before(batch)
            return {
                name: [result[output] for output in before._features[name].outputs()] for name in statistics
            }

        gather_statistics(statistics, batches, entries)
        fitted: dict[str, FittedOp] = {}
        for name, found in statistics.items():
            op = self._op_to_fit(name)
            try:
                fitted[name] = op.fitted(found)
            except ValueError as error:
                raise ValueError(f"Feature '{name}', {op.name}: {error}") from None
        self._set(fitted)
        return self

    def _before_fitting(self) -> FeatureEngine:
        """An engine that ends each fitted chain just before its statistics are needed."""
        cut = {
            name: dataclasses.replace(self._features[name], ops=self._features[name].ops[:step])
            for name, step in self._fitted.items()
        }
        late: set[str] = set()
        waits = {feature.name: needs(feature, self._sources) for feature in self.features}
        while grown := {n for n, w in waits.items() if n not in late and w & (late | cut.keys())}:
            late |= grown
        if both := [name for name in cut if name in late]:
            raise ValueError(
                f"Feature '{both[0]}', {self._op_to_fit(both[0]).name}: cannot be fitted, since it starts "
                "from features that must be fitted themselves; pass statistics to one of them."
            )
        return FeatureEngine([cut.get(f.name, f) for f in self.features if f.name not in late])

    def _set(self, fitted: Mapping[str, FittedOp]) -> None:
        for name, op in fitted.items():
            ops = list(self._features[name].ops)
            ops[self._fitted[name]] = op
            self._features[name] = dataclasses.replace(self._features[name], ops=tuple(ops))

    def get_extra_state(self) -> dict[str, Any]:
        """Return each feature's statistics, and the steps they belong to, for the state dict.

        Returns:
            The state.
        """
        if not self._fitted:
            return {}
        state = {name: self._op_to_fit(name).fit_state() for name in self._fitted}
        return {**state, STEPS: {name: self._steps_of(name, step + 1) for name, step in self._fitted.items()}}

    def _steps_of(self, name: str, count: int | None = None) -> str:
        """The first steps of a feature, with those of the features that it starts from."""
        feature = self._features[name]
        ops = list(feature.ops)
        if name in self._fitted:
            ops[self._fitted[name]] = self._unfitted_ops[name]
        others = needs(feature, self._sources)
        columns = [
            f"[{self._steps_of(self._sources[column])}]" if self._sources.get(column) in others else column
            for column in feature.columns or (name,)
        ]
        return describe_chain(columns, ops[:count])

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the statistics of another engine with the same features and steps.

        Args:
            state: What `get_extra_state` returned.

        Raises:
            ValueError: The features or their steps differ.
        """
        steps = state.get(STEPS, {})
        state = {name: fit_state for name, fit_state in state.items() if name != STEPS}
        if set(state) != set(self._fitted):
            raise ValueError(
                f"FeatureEngine '{self.name}' expects statistics of {_listed(self._fitted)}, but received "
                f"statistics of {_listed(state)}."
            )
        for name, step in self._fitted.items():
            own = self._steps_of(name, step + 1)
            if state[name] is not None and steps[name] != own:
                raise ValueError(
                    f"Feature '{name}' of FeatureEngine '{self.name}' expects statistics of the steps "
                    f"{own}, but received statistics of {steps[name]}. Keep the steps that the statistics "
                    "were fitted with, or give the feature another name and fit the engine again, for a "
                    "new model."
                )
        fitted: dict[str, FittedOp] = {}
        for name, fit_state in state.items():
            op = self._unfitted_ops[name]
            try:
                fitted[name] = op if fit_state is None else op.with_state(fit_state)
            except ValueError as error:
                raise ValueError(f"Feature '{name}', {op.name}: {error}") from None
        self._set(fitted)

    def extra_repr(self) -> str:
        """Return the features' names, for `print`.

        Returns:
            The text.
        """
        return ", ".join(self._features)


def _step_to_fit(feature: Feature) -> int | None:
    """The index of the step of a feature that must be fitted, if any."""
    steps = [n for n, op in enumerate(feature.ops) if isinstance(op, FittedOp) and not op.ready]
    if len(steps) > 1:
        names = ", ".join(feature.ops[n].name for n in steps)
        raise ValueError(
            f"Feature '{feature.name}' has two steps to fit ({names}); pass statistics to one of them."
        )
    return steps[0] if steps else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"


def _check_kind(name: str, column: str, entry: object) -> None:
    if isinstance(entry, Ragged | NestedRagged) or (isinstance(entry, Tensor) and entry.dim()):
        return
    kind = f"{'0-D ' if isinstance(entry, Tensor) else ''}{type(entry).__name__}"
    raise TypeError(
        f"Feature '{name}' expects column '{column}' to be a Ragged, a NestedRagged or a Tensor of rows, "
        f"but it is a {kind}."
    )
