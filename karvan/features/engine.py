"""`FeatureEngine`: from a batch of raw columns to ids and floats, equal steps of many features at once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.argument_checks import listed
from karvan.distributed.collectives import RankHeartbeats
from karvan.features.feature import Feature
from karvan.features.ops.base import ChainStep, OpCall, run
from karvan.features.ops.fitted import FittedOp, RunningStatistics
from karvan.features.ops.numbers import Log1p
from karvan.ragged import Entry, NestedRagged, OptionalRagged, OptionalText, Ragged, rows_of, values_of

# Columns that a batch lacks, for features with `missing="empty"`: as if no sample had a value.
#
# Steps take columns of certain kinds: numbers, strings, lists. Which kind a batch lacks is not known, so the
# first kind is taken that the whole chain of the feature accepts; those of one value per sample come first.


Kind = Callable[[Tensor], Entry]
"""Makes an entry without values of the offsets of its rows, which are all 0."""


def _values(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


KINDS: tuple[Kind, ...] = (
    lambda rows: OptionalRagged(_values(rows, torch.int64), rows),
    lambda rows: OptionalRagged(_values(rows, torch.float32), rows),
    lambda rows: Ragged(_values(rows, torch.int64), rows),
    lambda rows: Ragged(_values(rows, torch.float32), rows),
    lambda rows: Ragged(_values(rows, torch.int64), rows, _values(rows, torch.float32)),
    lambda rows: NestedRagged(_values(rows, torch.int64), rows[:1], rows),
    lambda rows: OptionalText(_values(rows, torch.uint8), rows[:1], rows),
    lambda rows: NestedRagged(_values(rows, torch.uint8), rows[:1], rows),
)
LISTS, TEXT = KINDS[2], KINDS[-2:]


def find_kind(accepts: Callable[[Entry], object], text: bool) -> Kind | None:
    """The first kind that a chain accepts: which raises no TypeError or ValueError; text: strings first."""
    for kind in (*TEXT, *KINDS) if text else KINDS:
        try:
            accepts(kind(torch.zeros(2, dtype=torch.int64)))
        except (TypeError, ValueError):
            continue
        return kind
    return None


def rows_like(batch: Mapping[str, Entry]) -> Tensor | None:
    """The offsets of rows without values, as many as the batch has; None for a batch without columns."""
    for entry in batch.values():
        if isinstance(entry, Ragged | NestedRagged) or (isinstance(entry, Tensor) and entry.dim()):
            return torch.zeros(rows_of(entry) + 1, dtype=torch.int64, device=values_of(entry).device)
    return None


# The steps of a chain as text, to check that fitted statistics belong to the same steps.
#
# The text is the same in every process and with every version of NumPy and torch.


_LONGEST = 32  # values of a setting that are written out; longer ones become a digest


def describe_step(step: ChainStep) -> str:
    """A step's name and settings; defaults at the end of the settings are omitted."""
    if isinstance(step, Log1p) and step.clip is not None:
        return f"{describe_step(step.clip)}.{describe_step(Log1p())}"
    settings: list[Any] = []
    if dataclasses.is_dataclass(step):
        fields = [field for field in dataclasses.fields(step) if not field.metadata.get("derived")]
        settings = [getattr(step, field.name) for field in fields]
        while settings and settings[-1] == fields[len(settings) - 1].default:
            settings.pop()
    return f"{step.name}({', '.join(map(_text, settings))})"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, tuple | list):
        texts = [_text(text) for text in value]
        if len(texts) <= _LONGEST:
            return f"[{', '.join(texts)}]"
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
        return f"[{len(texts)} values, digest {digest}]"
    return describe_step(value) if isinstance(value, ChainStep) else type(value).__name__


# One pass over data that computes the statistics of fitted steps, on all ranks together.
#
# Every rank reads its own share and counts. Then each rank adds up the counts of all ranks in the order of
# ranks; they are exact, so all get the same bits, whichever rank had which record. A rank without data
# participates with empty counts. An error on one rank is an error on all.


Entries = Callable[[Mapping[str, Entry]], Mapping[str, list[Entry]]]


def gather_statistics(
    statistics: Mapping[str, RunningStatistics], batches: Iterable[Mapping[str, Entry]], entries: Entries
) -> None:
    """Count the entries by name of all batches of all ranks; a collective."""
    connection = distributed.current()
    channel = connection.here
    rounds = RankHeartbeats(channel, connection.settings.timeout)
    problem: Exception | None = None
    try:
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise TypeError(
                    f"fit expects batches of columns, but {type(batches).__name__} returns a "
                    f"{type(batch).__name__}: pass kv.data.read(…, batch_size=1024)."
                )
            for name, value in entries(batch).items():
                for entry in value:
                    try:
                        statistics[name].add(entry)
                    except (TypeError, ValueError) as error:
                        raise type(error)(f"Feature '{name}', fit: {error}") from None
            rounds.still_working()
    except distributed.RankError:
        raise  # other ranks no longer respond
    except Exception as error:
        if channel.world_size == 1:
            raise
        problem = error
    if channel.world_size == 1:
        return
    rounds.finish()
    gathered = channel.gather_json(
        {
            "problem": None if problem is None else f"{type(problem).__name__}: {problem}",
            "states": {name: statistic.state() for name, statistic in statistics.items()},
        }
    )
    if problem is not None:
        raise problem
    for rank, result in enumerate(gathered):
        if result["problem"] is not None:
            raise distributed.RankError(f"Rank {rank} could not fit its features: {result['problem']}")
        if list(result["states"]) != list(statistics):
            raise ValueError(
                f"fit expects equal features on all ranks, but rank {channel.rank} fits {list(statistics)} "
                f"and rank {rank} fits {list(result['states'])}."
            )
    for rank, result in enumerate(gathered):
        if rank != channel.rank:
            for name, state in result["states"].items():
                statistics[name].merge(state)


# The order of the steps of all chains, in which many equal steps run together.
#
# A step can run when the steps before it in its chain are done, and the first one of a chain when the
# features it starts from are complete. Among the kinds of steps that can run, the plan takes the one with
# the fewest steps that must still wait: running `clip` before a `log1p` whose result another chain clips
# would split the `clip` stage.


class Stage(NamedTuple):
    """Steps of one class that run together.

    Attributes:
        kind: The class of the steps.
        steps: Pairs of a feature's name and the index of its step.

    Example:
        >>> engine = kv.FeatureEngine([kv.Feature("price").log1p()])
        >>> [stage.kind.__name__ for stage in engine.stages()]
        ['Log1p']
    """

    kind: type[ChainStep]
    steps: tuple[tuple[str, int], ...]


def sources(features: Sequence[Feature]) -> dict[str, str]:
    """Result name → the feature that computes it; two features with the same result are an error."""
    types: dict[str, str] = {}
    for feature in features:
        for output in feature.outputs():
            if output in types:
                raise ValueError(
                    f"FeatureEngine expects results of different names, but '{output}' comes from feature "
                    f"'{types[output]}' and from feature '{feature.name}'."
                )
            types[output] = feature.name
    return types


def needs(feature: Feature, sources: Mapping[str, str]) -> set[str]:
    """The features whose results the feature starts from; its own name always means the batch's entry."""
    if feature.raw:
        return set()
    return {sources[column] for column in feature.columns if column in sources and column != feature.name}


def plan(features: Sequence[Feature]) -> list[Stage]:
    """All steps of all chains, in stages."""
    names = sources(features)
    chains = {feature.name: feature.ops for feature in features}
    waits = {feature.name: needs(feature, names) for feature in features}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        cycle = " → ".join(error.args[1])
        raise ValueError(
            f"FeatureEngine expects features in some order, but these need each other: {cycle}."
        ) from None
    done = dict.fromkeys(chains, 0)
    stages: list[Stage] = []
    while True:
        complete = _complete(chains, waits, done)
        ready = [
            name
            for name, ops in chains.items()
            if done[name] < len(ops) and (done[name] or waits[name] <= complete)
        ]
        if not ready:
            return stages
        kinds = dict.fromkeys(type(chains[name][done[name]]) for name in ready)
        blocked = dict.fromkeys(kinds, 0)
        for name, ops in chains.items():
            for op in ops[done[name] + (name in ready) :]:
                if type(op) in blocked:
                    blocked[type(op)] += 1
        kind = min(kinds, key=lambda kind: blocked[kind])
        steps = tuple((name, done[name]) for name in ready if type(chains[name][done[name]]) is kind)
        for name, _ in steps:
            done[name] += 1
        stages.append(Stage(kind, steps))


def _complete(
    chains: Mapping[str, tuple[ChainStep, ...]], waits: Mapping[str, set[str]], done: Mapping[str, int]
) -> set[str]:
    """Features with all steps done, also those without steps whose sources are complete."""
    complete: set[str] = set()
    for name in TopologicalSorter(waits).static_order():
        if done[name] == len(chains[name]) and waits[name] <= complete:
            complete.add(name)
    return complete


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
        entries_: list[Entry] = []
        for column in feature.columns or (name,):
            other = None if feature.raw or column == name else self._sources.get(column)
            if other is not None and other != name:
                outputs = self._features[other].outputs()
                results = values[other] if self._features[other].ops else self._inputs(other, batch, values)
                entries_.append(results[outputs.index(column)])
            elif column in batch:
                entries_.append(batch[column])
            elif feature.missing == "empty":
                entries_.append(self._absent(name, column, batch))
            else:
                raise KeyError(
                    f"Feature '{name}' needs column '{column}', which is not in the batch; it has: "
                    f"{listed(column, batch)} With missing='empty' the feature is empty in such a batch."
                )
            _check_kind(name, column, entries_[-1])
        return tuple(entries_)

    def _absent(self, name: str, column: str, batch: Mapping[str, Entry]) -> Entry:
        """A column that the batch lacks, without values, of a kind that the chain takes."""
        kind = self._absent_kinds.get(name)
        if kind is None:
            feature = dataclasses.replace(self._features[name], raw=True, missing="error")
            columns = feature.columns or (name,)
            alone = FeatureEngine([feature])
            result: Kind | None = LISTS
            if feature.ops:
                text = feature.ops[0].takes_text
                result = find_kind(lambda entry: alone(dict.fromkeys(columns, entry)), text)
            if result is None:
                raise ValueError(
                    f"Feature '{name}' needs column '{column}', but the batch lacks it, and its steps do "
                    "not take an empty one: expected the column, or steps for samples without values."
                )
            kind = self._absent_kinds[name] = result
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
        for name, statistic in statistics.items():
            op = self._op_to_fit(name)
            try:
                fitted[name] = op.fitted(statistic)
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
        start = columns[0] if len(columns) == 1 else f"({', '.join(columns)})"
        return ".".join([start, *map(describe_step, ops[:count])])  # such as `price.clip(0, 10).log1p()`

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
            feature_steps = self._steps_of(name, step + 1)
            if state[name] is not None and steps[name] != feature_steps:
                raise ValueError(
                    f"Feature '{name}' of FeatureEngine '{self.name}' expects statistics of the steps "
                    f"{feature_steps}, but received statistics of {steps[name]}. Keep the steps that the "
                    "statistics "
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
