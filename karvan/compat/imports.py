"""Imports of programs of other systems: `import recis` gives `karvan.compat.recis`; tables have its modules.

A table, such as `recis.toml`, has an entry for each module of the system that is no file here:

    ["recis.features.op"]
    doc = "Operations of features."
    "karvan.compat.recis.features" = ["Bucketize", "FeatureOp as _OP"]

    ["recis.features.op".unsupported]
    "filter values by an operation of your own, an _OP." = ["Mask"]

It says which names the module has, and which module of Karvan implements them. A name is imported when a
program asks for it. What else the implementing modules have can be imported, too, but `from … import *`
leaves it out. `unsupported` has names without a counterpart, and what to use instead; that of the whole
table has modules. A module that is a file may have an entry, too, without `doc`.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from typing_extensions import override

from karvan.compat.unsupported import UnsupportedError

SYSTEMS: dict[str, dict[str, str]] = {
    "recis": {"recis": "karvan.compat.recis", "column_io": "karvan.compat.recis.io"},  # its reader of data
    "persia": {"persia": "karvan.compat.persia"},
    "elasticdl": {
        "elasticdl": "karvan.compat.elasticdl",
        "elasticdl_client": "karvan.compat.elasticdl_client",
        "elasticai_api": "karvan.compat.elasticai_api",
        "elasticdl_preprocessing": "karvan.compat.elasticdl_preprocessing",
    },
}
"""For each system the packages that its programs import, and what stands for them."""

_HERE = "karvan.compat."


@contextmanager
def import_aliases(packages: Mapping[str, str]) -> Iterator[None]:
    """Within it, `import NAME` and imports of what is below give the packages that the names stand for.

    packages: for each name the package, as {"recis": "karvan.compat.recis"}; an installed package of that
    name is not used. A module is the same object under both names. At the end all is as before.
    """
    for name in packages:
        if name in sys.modules:
            raise RuntimeError(
                f"'{name}' has been imported already: aliases must come before its first import."
            )
    finder = _AliasFinder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for loaded in list(sys.modules):
            if finder.real_name(loaded) is not None:
                del sys.modules[loaded]


def add_alias(name: str, package: str) -> None:
    """Have `import name` give a package for the rest of the process; called by the module of that name."""
    sys.meta_path.insert(0, _AliasFinder({name: package}))
    sys.modules[name] = importlib.import_module(package)


def find_by_tables() -> None:
    """Have imports find the modules of the tables for the rest of the process."""
    sys.meta_path.insert(0, _TableFinder())


def _attributes_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module: it gives the names of its table, and the modules below it."""

    def get(name: str) -> Any:
        entry = _entry_of(module) or _Entry(None, {}, {})
        if name in entry.unsupported:
            raise UnsupportedError(f"{module.removeprefix(_HERE)}.{name}", entry.unsupported[name])
        if name in entry.names:
            source, attribute = entry.names[name]
            return attrgetter(attribute)(importlib.import_module(source))
        if not name.startswith("__"):
            is_package = hasattr(sys.modules[module], "__path__")
            if is_package and find_spec(f"{module}.{name}") is not None:
                return importlib.import_module(f"{module}.{name}")
            for source in dict.fromkeys(source for source, _ in entry.names.values()):
                if hasattr(implementing := importlib.import_module(source), name):
                    return getattr(implementing, name)
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return get


def unsupported_modules(system: str) -> Mapping[str, str]:
    """The modules of a system that have no counterpart, and what to use instead."""
    return _read_table(system).unsupported


@dataclass(frozen=True)
class _Entry:
    """What a table says of a module."""

    doc: str | None
    names: Mapping[str, tuple[str, str]]  # to the implementing module, and the name there
    unsupported: Mapping[str, str]  # names, and what to use instead


@dataclass(frozen=True)
class _Table:
    """The modules of a system by name."""

    path: Path
    entries: Mapping[str, _Entry]
    unsupported: Mapping[str, str]  # modules, and what to use instead


@cache
def _read_table(system: str) -> _Table:
    path = Path(__file__).with_name(f"{system}.toml")
    tree = tomllib.loads(path.read_text())
    modules = _instead(tree.pop("unsupported", {}))
    entries: dict[str, _Entry] = {}
    for module, parts in tree.items():
        doc, unsupported = parts.pop("doc", None), _instead(parts.pop("unsupported", {}))
        named = [(source, text.partition(" as ")) for source, texts in parts.items() for text in texts]
        names = {alias or name: (source, name) for source, (name, _, alias) in named}
        entries[module] = _Entry(doc, names, unsupported)
    return _Table(path, entries, modules)


def _instead(groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: instead for instead, names in groups.items() for name in names}


@cache
def _table_of(module: str) -> _Table | None:
    """The table of the system to which a module of karvan.compat belongs; None without one."""
    package = ".".join(module.split(".")[:3])
    systems = (system for system, packages in SYSTEMS.items() if package in packages.values())
    return next(map(_read_table, systems), None)


def _entry_of(module: str) -> _Entry | None:
    table = _table_of(module)
    return None if table is None else table.entries.get(module.removeprefix(_HERE))


class _TableFinder(MetaPathFinder):
    """Finds the modules of the tables, and files that have an entry or modules below them in a table."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        table, entry = _table_of(fullname), _entry_of(fullname)
        name = fullname.removeprefix(_HERE)
        if table is None or fullname == name:
            return None
        is_package = any(module.startswith(f"{name}.") for module in table.entries)
        if entry is not None and entry.doc is not None:
            spec = ModuleSpec(fullname, _TableLoader(entry), origin=str(table.path), is_package=is_package)
            spec.has_location = True  # so that it has a __file__, which is what tells inspect its source
            return spec
        folder = table.path.parent.joinpath(*name.split("."))
        file = folder / "__init__.py"
        folders = [str(folder)] if file.is_file() else [] if is_package else None
        file = file if file.is_file() else folder.with_suffix(".py")
        if not file.is_file() or (entry is None and not is_package):
            return None
        loader = _FileLoader(fullname, str(file))
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folders)


class _FileLoader(SourceFileLoader):
    @override
    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _attributes_of(module.__name__)
        super().exec_module(module)
        entry = _entry_of(module.__name__)
        if entry is not None and entry.names:
            vars(module).setdefault("__all__", sorted(entry.names))


class _TableLoader(Loader):
    def __init__(self, entry: _Entry) -> None:
        self._entry = entry

    @override
    def exec_module(self, module: ModuleType) -> None:
        names = sorted(self._entry.names)
        vars(module).update(
            __doc__=self._entry.doc,
            __all__=names,
            __getattr__=_attributes_of(module.__name__),
            __dir__=lambda: sorted({*vars(module), *names}),
        )

    def get_code(self, fullname: str) -> CodeType:
        """A program that imports the module, for `python -m NAME`."""
        return compile(f"from {fullname} import *", f"<{fullname}>", "exec")


class _AliasFinder(MetaPathFinder):
    def __init__(self, packages: Mapping[str, str]) -> None:
        self._packages = dict(packages)

    def real_name(self, name: str) -> str | None:
        """The module that a name stands for; None if it is no alias."""
        top, dot, rest = name.partition(".")
        return self._packages[top] + dot + rest if top in self._packages else None

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        real = self.real_name(fullname)
        if real is None:
            return None
        spec = find_spec(real)
        if spec is None:
            raise ModuleNotFoundError(self._missing(fullname, real), name=fullname)
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(real), origin=spec.origin, is_package=is_package)

    def _missing(self, fullname: str, real: str) -> str:
        """What to say of a module that a package lacks."""
        table, name = _table_of(real), real.removeprefix(_HERE)
        if table is not None and name in table.unsupported:
            return f"'{fullname}' is not supported: {table.unsupported[name]} See docs/migrating.md."
        package = self._packages[fullname.partition(".")[0]]
        return (
            f"No module named '{fullname}': {package} stands for the package, and does not have it. "
            "See docs/migrating.md for what it has."
        )


class _AliasLoader(Loader):
    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, which importlib then gives the alias's spec."""
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """That of the module, for `python -m NAME`."""
        spec = find_spec(self._real)
        assert spec is not None
        loader: Any = spec.loader  # that of an editable install only behaves as an InspectLoader
        code: CodeType | None = loader.get_code(self._real)
        return code
