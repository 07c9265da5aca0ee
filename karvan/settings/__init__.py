"""YAML files of settings: read and checked key by key, with errors that name the key."""

from karvan.settings.schema import (
    Count,
    CountOrZero,
    FolderOrURL,
    Integer,
    Positive,
    PositiveOrZero,
    Section,
    SettingsError,
    problem_text,
    read_settings,
)
from karvan.settings.yaml_text import parse, place_of

__all__ = [
    "Count",
    "CountOrZero",
    "FolderOrURL",
    "Integer",
    "Positive",
    "PositiveOrZero",
    "Section",
    "SettingsError",
    "parse",
    "place_of",
    "problem_text",
    "read_settings",
]
