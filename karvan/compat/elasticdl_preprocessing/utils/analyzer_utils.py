"""Statistics of features from the environment; a default where it has none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from karvan.compat.elasticdl_preprocessing.constants import AnalysisEnvTemplate

T = TypeVar("T")


def get_min(feature_name: str, default_value: float) -> float:
    """The smallest value of a feature."""
    return _read(AnalysisEnvTemplate.MIN_ENV, feature_name, float, default_value)


def get_max(feature_name: str, default_value: float) -> float:
    """The largest value of a feature."""
    return _read(AnalysisEnvTemplate.MAX_ENV, feature_name, float, default_value)


def get_avg(feature_name: str, default_value: float) -> float:
    """The mean of a feature."""
    return _read(AnalysisEnvTemplate.AVG_ENV, feature_name, float, default_value)


def get_stddev(feature_name: str, default_value: float) -> float:
    """The standard deviation of a feature."""
    return _read(AnalysisEnvTemplate.STDDEV_ENV, feature_name, float, default_value)


def get_bucket_boundaries(feature_name: str, default_value: list[float]) -> list[float]:
    """The boundaries of a feature's buckets, in order, each once."""
    return _read(AnalysisEnvTemplate.BUCKET_BOUNDARIES_ENV, feature_name, _boundaries, default_value)


def get_distinct_count(feature_name: str, default_value: int) -> int:
    """How many different values a feature has."""
    return _read(AnalysisEnvTemplate.DISTINCT_COUNT_ENV, feature_name, int, default_value)


def get_vocabulary(feature_name: str, default_value: str | list[str]) -> str | list[str]:
    """The file of a feature's words, as `IndexLookup` takes it."""
    return _read(AnalysisEnvTemplate.VOCABULARY_ENV, feature_name, str, default_value)


def _read(template: str, feature: str, parse: Callable[[str], T], default: T) -> T:
    name = template.format(feature)
    if name not in os.environ:
        return default
    try:
        return parse(os.environ[name])
    except ValueError as error:
        raise ValueError(f"The environment variable {name} has a wrong value: {error}.") from error


def _boundaries(text: str) -> list[float]:
    return sorted(set(map(float, text.split(","))))
