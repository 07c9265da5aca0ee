"""The order of the steps of all chains, in which many equal steps run together.

A step can run when the steps before it in its chain are done, and the first one of a chain when the features
it starts from are complete. Among the kinds of steps that can run, the plan takes the one with the fewest
steps that must still wait: running `clip` before a `log1p` whose result another chain clips would split the
`clip` stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from karvan.features.feature import Feature
from karvan.features.ops.base import ChainStep


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
    found: dict[str, str] = {}
    for feature in features:
        for output in feature.outputs():
            if output in found:
                raise ValueError(
                    f"FeatureEngine expects results of different names, but '{output}' comes from feature "
                    f"'{found[output]}' and from feature '{feature.name}'."
                )
            found[output] = feature.name
    return found


def needs(feature: Feature, sources: Mapping[str, str]) -> set[str]:
    """The features whose results the feature starts from; its own name always means the batch's entry."""
    if feature.raw:
        return set()
    return {sources[column] for column in feature.columns if column in sources and column != feature.name}


def plan(features: Sequence[Feature]) -> list[Stage]:
    """All steps of all chains, in stages."""
    found = sources(features)
    chains = {feature.name: feature.ops for feature in features}
    waits = {feature.name: needs(feature, found) for feature in features}
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
