"""What RecIS programs import from `recis.utils`: `Logger`, `copy_data_to_device` and `ArgumentParser`."""

from __future__ import annotations

import argparse
import enum
import logging
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import override

_LOG_METHODS = ("debug", "info", "warning", "error", "info_rank0", "warning_rank0", "error_rank0")


class Logger:
    """A logger of a program; the methods that end with `_rank0` log on rank 0 alone."""

    def __init__(self, name: str = "karvan.compat.recis.utils.logger", level: int = logging.DEBUG) -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(level)
        self._logger.propagate = False
        if not self._logger.handlers:
            form = logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s")
            for handler, wants in ((_Stream("stdout"), True), (_Stream("stderr"), False)):
                handler.addFilter(partial(_passes, wants))
                handler.setFormatter(form)
                self._logger.addHandler(handler)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The method `debug`, `info`, `warning` or `error` of the logger; with `_rank0` for rank 0 alone."""
        if name not in _LOG_METHODS:
            raise AttributeError(f"'Logger' object has no attribute '{name}'")
        if name.endswith("_rank0") and os.environ.get("RANK", "0") != "0":
            return lambda *args, **options: None
        method: Callable[..., None] = getattr(self._logger, name.removesuffix("_rank0"))
        return method


class _Stream(logging.StreamHandler[Any]):
    """Writes to what sys.stdout or sys.stderr is when it writes."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._target = name

    @property
    def stream(self) -> Any:
        return getattr(sys, self._target)


def _passes(informs: bool, record: logging.LogRecord) -> bool:
    return (record.levelno == logging.INFO) is informs


def copy_data_to_device(data: Any, device: Any, *args: Any, **options: Any) -> Any:
    """The same lists, tuples, mappings and dataclasses with everything that has `to` on the device."""

    def copy(value: Any) -> Any:
        return copy_data_to_device(value, device, *args, **options)

    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(copy, data))
    if isinstance(data, list | tuple):
        return type(data)(map(copy, data))
    if isinstance(data, Mapping):
        copies = {name: copy(value) for name, value in data.items()}
        if isinstance(data, defaultdict):
            return defaultdict(data.default_factory, copies)
        return type(data)(copies)  # type: ignore[call-arg]
    if hasattr(data, "to"):
        return data.to(device, *args, **options)
    if is_dataclass(data) and not isinstance(data, type):
        copies = {field.name: copy(getattr(data, field.name)) for field in fields(data) if field.init}
        return replace(data, **copies)
    return data


_BOOLS = {
    **dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "0", "f", "n"), False),
}


class ArgumentParser(argparse.ArgumentParser):
    """A parser of argparse that has `add_arguments`: arguments, as `--drop_remainder=true`, fill dataclasses.

    A field is `--name value`, and `--dest.name value`, which is its only form if two dataclasses have one of
    that name. A field without a default is required. Lists are `--name a b c`; a bool is `--name true`,
    `--name` or `--noname`. Fields of nested dataclasses are options, too; a field of another type, such as a
    function, keeps its default.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._records: list[_Record] = []

    def add_arguments(
        self, dataclass: Any, dest: str | None = None, *, prefix: str = "", default: Any = None
    ) -> None:
        """Add the fields of a dataclass, or of an object of one, whose values are then the defaults.

        The parsed arguments have an object of it as their attribute `dest`, the name of the class if it is
        not given.
        """
        if not is_dataclass(dataclass):
            raise TypeError(f"add_arguments expects a dataclass, got {dataclass!r}.")
        if not isinstance(dataclass, type):
            dataclass, default = type(dataclass), dataclass
        dest = dest or dataclass.__name__
        if dest in {record.path for record in self._records}:
            raise ValueError(f"add_arguments expects another dest than '{dest}', which there is already.")
        self._records.append(_Record(dataclass, dest, prefix, default))

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """`parse_args` calls it, too."""
        self._add_options()
        namespace_, rest = super().parse_known_args(args, namespace)
        values = vars(namespace_)
        for record in self._records:
            setattr(namespace_, record.path, record.value(values))
        for option in self._options():
            values.pop(option.path, None)
        return namespace_, rest

    @override
    def format_help(self) -> str:
        self._add_options()
        return super().format_help()

    def _options(self) -> Iterator[_Option]:
        return (option for record in self._records for option in record.options())

    def _add_options(self) -> None:
        """Add what has been added since the last time; which names are unique is only clear now."""
        options = list(self._options())
        names = [option.name for option in options]
        actions = self._option_string_actions
        for option in options:
            if f"--{option.path}" not in actions:
                alone = names.count(option.name) == 1 and f"--{option.name}" not in actions
                option.add_to(self, [option.path, option.name] if alone else [option.path])


@dataclass(frozen=True)
class _Record:
    """A dataclass, and where its object will be."""

    kind: Any
    path: str
    prefix: str
    default: Any  # an object of it, or None

    def parts(self) -> Iterator[_Record | _Option]:
        """The records and options of its fields."""
        hints = get_type_hints(self.kind)
        for field in fields(self.kind):
            path, hint = f"{self.path}.{field.name}", _without_none(hints[field.name])
            value = field.default if field.default_factory is MISSING else field.default_factory()
            if self.default is not None:
                value = getattr(self.default, field.name)
            if not field.init:
                continue
            if is_dataclass(hint) and value is not None:
                yield _Record(hint, path, self.prefix, None if value is MISSING else value)
            elif _reader(hint) is not None or value is MISSING:
                yield _Option(path, self.prefix + field.name, hint, value, hint is not hints[field.name])

    def options(self) -> Iterator[_Option]:
        """Those of all its fields."""
        for part in self.parts():
            yield from part.options()

    def value(self, values: dict[str, Any]) -> Any:
        """The object."""
        given = {part.path.rpartition(".")[2]: part.value(values) for part in self.parts()}
        names = [] if self.default is None else [field.name for field in fields(self.kind) if field.init]
        return self.kind(**{name: getattr(self.default, name) for name in names} | given)


@dataclass(frozen=True)
class _Option:
    """A field that is given by arguments."""

    path: str
    name: str
    hint: Any
    default: Any
    optional: bool  # whether None is a value

    def options(self) -> Iterator[_Option]:
        """The option alone."""
        yield self

    def value(self, values: dict[str, Any]) -> Any:
        """What was given, or the default."""
        return values.get(self.path, self.default)

    def add_to(self, parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
        """Add it under some names."""
        read = _reader(self.hint)
        if read is None:
            raise TypeError(
                f"ArgumentParser expects a default for '{self.path}', since {self.hint} is not a type that "
                "arguments can have."
            )
        # argparse would read a default that is a string, such as an enum of strings, as if it were given.
        shown: dict[str, Any] = {"required": self.default is MISSING, "default": argparse.SUPPRESS}
        flags = [f"--{name}" for name in names]
        if self.hint is bool:
            opposite = [f"--{head}{dot}no{last}" for head, dot, last in (n.rpartition(".") for n in names)]
            parser.add_argument(
                *flags, *opposite, dest=self.path, type=read, nargs="?", const=True, action=_Store, **shown
            )
            return
        reader = _optional(read) if self.optional else read
        items, kind = get_args(self.hint), get_origin(self.hint) or self.hint
        count = len(items) if kind is tuple and items and Ellipsis not in items else "*"
        parser.add_argument(
            *flags,
            dest=self.path,
            type=reader,
            nargs=None if _items(self.hint) is None else count,
            metavar=self.name.upper(),
            action=_Store if kind is tuple else "store",
            **shown,
        )


class _Store(argparse.Action):
    """A bool, of which options with "no" are the opposite, or values as a tuple."""

    @override
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        middle = len(self.option_strings) // 2
        same = option_string in self.option_strings[:middle]
        setattr(namespace, self.dest, values is same if isinstance(values, bool) else tuple(values))


def _without_none(hint: Any) -> Any:
    """`X` of `Optional[X]`."""
    if get_origin(hint) in (Union, types.UnionType):
        some = tuple(choice for choice in get_args(hint) if choice is not type(None))
        return some[0] if len(some) == 1 else Union[some]  # noqa: UP007 - the types are in a tuple
    return hint


def _items(hint: Any) -> Any:
    """The type of the items of a list, or None."""
    kind = get_origin(hint) or hint
    if not isinstance(kind, type) or issubclass(kind, str) or not issubclass(kind, (list, tuple, Sequence)):
        return None
    items = set(get_args(hint) or (str,)) - {Ellipsis}
    return items.pop() if len(items) == 1 else tuple  # of several types: none that arguments can have


def _reader(hint: Any) -> Callable[[str], Any] | None:
    """What reads one value of a type; None for a type that arguments cannot have."""
    if (item := _items(hint)) is not None:
        return str if item is Any else None if _items(item) is not None else _reader(item)
    if hint is bool:
        return _yes_or_no
    if get_origin(hint) is Literal:
        return lambda text: _choice(text, {str(choice): choice for choice in get_args(hint)})
    if get_origin(hint) in (Union, types.UnionType):
        readers = [_reader(choice) for choice in get_args(hint)]
        return None if None in readers else lambda text: _first(text, readers)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return lambda text: _choice(text, dict(hint.__members__))
    return hint if hint in (int, float, str) else None


def _yes_or_no(text: str) -> bool:
    if text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def _choice(text: str, choices: dict[str, Any]) -> Any:
    if text in choices:
        return choices[text]
    raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, got {text!r}")


def _first(text: str, readers: Sequence[Any]) -> Any:
    for read in readers:
        try:
            return read(text)
        except (ValueError, argparse.ArgumentTypeError):
            continue
    raise argparse.ArgumentTypeError(f"invalid value: {text!r}")


def _optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Also "None"; a wrong value has the error of the type itself."""

    def value(text: str) -> Any:
        return None if text in ("None", "none") else read(text)

    value.__name__ = getattr(read, "__name__", "value")
    return value
