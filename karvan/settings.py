"""YAML files of settings: read and checked key by key, with errors that name the key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from karvan.argument_checks import listed
from karvan.job.checkpoint_url import local_path, url_of

# The YAML of settings files and of --set.


_MOST_LEVELS = 100
_MOST_VALUES = 100_000  # aliases counted as what they stand for


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as most people expect it: 1e-3 is a number, `no` and `on` are text, a repeated key is an error."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Brackets within brackets take quadratic time."""
        if self.flow_level == _MOST_LEVELS:
            raise _error(f"expected at most {_MOST_LEVELS} brackets within each other", self.get_mark())
        super().fetch_flow_collection_start(token)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:\d[\d_]*)?\.\d+(?:[eE][-+]?\d+)?|\d[\d_]*\.?[eE][-+]?\d+|\d[\d_]*\.|\.(?:inf|nan))$"
    ),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error("expected a key that is text or a number", key.start_mark)
        if key.value in keys:
            raise _error(f"the key '{key.value}' appears twice", key.start_mark)
        keys.add(key.value)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str) -> Any:
    """A piece of YAML; whatever is wrong with it is a YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(f"expected at most {_MOST_LEVELS} levels, got more") from None
    except (ValueError, OverflowError, AttributeError, TypeError) as error:  # of a tag, such as a date
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    finally:
        loader.dispose()


def _check_size(root: yaml.Node) -> None:
    """A YAMLError if aliases make a tree that is endless, or larger than a file would be."""
    sizes: dict[yaml.Node, int | None] = {}  # None: being counted

    def size_of(node: yaml.Node) -> int:
        if node in sizes:
            size = sizes[node]
            if size is None:
                raise _error("an alias stands for a value that it is in", node.start_mark)
            return size
        sizes[node] = None
        size = 1
        if isinstance(node, yaml.SequenceNode):
            size += sum(map(size_of, node.value))
        elif isinstance(node, yaml.ScalarNode):
            node.value.encode()  # "\\ud800" is no character
        elif isinstance(node, yaml.MappingNode):
            size += sum(size_of(key) + size_of(value) for key, value in node.value)
        if size > _MOST_VALUES:
            raise _error(f"expected at most {_MOST_VALUES:,} values, got more", node.start_mark)
        sizes[node] = size
        return size

    size_of(root)


def _error(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, mark)


def place_of(error: yaml.YAMLError) -> str:
    """The line and column of an error, and its text."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem}." if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}."


# Settings files with declared keys. Unknown keys and wrong values are errors.


_SHOWN = 500  # characters of a wrong value in an error
_PROBLEMS = 20  # in one error


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):  # which pydantic accepts as 0 or 1
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


def _as_folder(value: Any) -> Any:
    return local_path(value) if isinstance(value, str) else value


Integer = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Integer, Field(ge=1)]
CountOrZero = Annotated[Integer, Field(ge=0)]
PositiveOrZero = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]
# A path or a URL; URLs are paths that stand for them, see `karvan/job/checkpoint_url.py`.
FolderOrURL = Annotated[
    Path,
    BeforeValidator(_as_folder),
    PlainSerializer(lambda path: url_of(path) or str(path), return_type=str, when_used="json"),
]
_PATHS: tuple[Any, ...] = (Path, Path | None)


class SettingsError(ValueError):
    """A settings file with unknown, missing or wrong values; `unreadable` if it is not text at all."""

    def __init__(self, text: str, *, unreadable: bool = False) -> None:
        super().__init__(text)
        self.unreadable = unreadable


class Section(BaseModel):
    """A section of settings with declared keys; any other key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    elsewhere: ClassVar[Mapping[str, str]] = {}  # keys that people look for here, and the ones they mean

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key in cls.elsewhere:
                    raise ValueError(f"unknown key '{key}'. Did you mean '{cls.elsewhere[key]}'?")
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key '{key}'; there are: {listed(key, cls.model_fields)}")
                value = values[key]
                if cls.model_fields[key].annotation in _PATHS and isinstance(value, str) and "://" in value:
                    raise ValueError(f"{key} expects the path of a file or folder, got the URL {value}")
        return values


Settings = TypeVar("Settings", bound=Section)


def read_settings(kind: type[Settings], path: Path, changes: Mapping[str, str]) -> Settings:
    """Read a file, with some values set to others: {"train.epochs": "3"}."""
    tree = read_tree(path)
    if isinstance(tree, dict):
        for name, text in changes.items():
            _set(tree, name, text, kind)
    return checked_settings(kind, tree, str(path))


def read_tree(path: Path) -> Any:
    """The content of a YAML file; a SettingsError says what is wrong with it."""
    try:
        return parse(path.read_text())
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {place_of(error)}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not YAML: {error}", unreadable=True) from error


def checked_settings(kind: type[Settings], tree: Any, where: str) -> Settings:
    """Settings of a tree; `where` begins the text of errors."""
    if not isinstance(tree, dict):
        raise SettingsError(
            f"{where} must be a mapping with {', '.join(kind.model_fields)}, got {_shown(tree)}."
        )
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(f"{where}: {_problems(error)}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def problem_text(text: str) -> str:
    """A message of pydantic, for the middle of a sentence."""
    text = text.removeprefix("Value error, ").rstrip(".")
    return text[:1].lower() + text[1:]


def _set(tree: dict[str, Any], name: str, text: str, kind: type[BaseModel]) -> None:
    *path, last = name.split(".")
    default: Any = None  # what the settings have at the part without the file
    for part in path:
        field = kind.model_fields.get(part)
        default = None if field is None else field.get_default(call_default_factory=True)
        kind = type(default) if isinstance(default, BaseModel) else BaseModel
        # A class by name keeps its name and its arguments, of which one is set.
        named = isinstance(default, BaseModel) and not isinstance(default, Section)
        below = tree.setdefault(part, default.model_dump() if named else {})
        if below is None or isinstance(below, str):  # `model: DLRM` is short for `model: {name: DLRM}`
            below = tree[part] = {} if below is None else {"name": below}
        if not isinstance(below, dict):
            raise SettingsError(f"--set {name}: '{part}' holds no keys, but is {_shown(below)}.")
        tree = below
    try:
        tree[last] = parse(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {name}={text}: not a value of YAML: {place_of(error)}") from error


def _problems(error: ValidationError) -> str:
    problems = list(
        dict.fromkeys(
            _problem(problem["loc"], problem["msg"], problem["type"], problem["input"])
            for problem in error.errors()
        )
    )
    more = [f"… and {len(problems) - _PROBLEMS} more."] if len(problems) > _PROBLEMS else []
    return "\n".join(problems[:_PROBLEMS] + more)


def _problem(path: Sequence[int | str], text: str, kind: str, value: Any) -> str:
    # For alternatives pydantic also names the types, which are no keys of the file.
    names = [str(part) for part in path if isinstance(part, int) or re.fullmatch(r"[\w.-]+", part)]
    where = ".".join(name for name in names if name not in ("Column", "Named", "str"))
    if kind == "missing":
        return f"'{where}' is missing."
    got = "" if kind == "value_error" else f", got {_shown(value)}"
    problem = f"{f'{where}: ' if where else ''}{problem_text(text)}{got}"
    return problem if problem.endswith("?") else f"{problem}."
