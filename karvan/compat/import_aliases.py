"""`import_aliases`: top-level packages that stand for others, as `recis` for `karvan.compat.recis`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from typing_extensions import override


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


def submodules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """A package's `__getattr__` by which `import package` is enough for `package.name`."""

    def get(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return importlib.import_module(f"{package}.{name}")

    return get


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
        spec = importlib.util.find_spec(real)
        if spec is None:
            raise ModuleNotFoundError(self._missing(fullname), name=fullname)
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(real), origin=spec.origin, is_package=is_package)

    def _missing(self, fullname: str) -> str:
        """What to say of a module that a package lacks; it may have MISSING_MODULES: what to use instead."""
        package, _, rest = fullname.partition(".")
        real = self._packages[package]
        missing: Mapping[str, str] = getattr(importlib.import_module(real), "MISSING_MODULES", {})
        if rest in missing:
            return f"'{fullname}' is not supported: {missing[rest]} See docs/migrating.md."
        return (
            f"No module named '{fullname}': {real} stands for the package, and does not have it. "
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
        spec = importlib.util.find_spec(self._real)
        assert spec is not None
        loader: Any = spec.loader  # that of an editable install only behaves as an InspectLoader
        code: CodeType | None = loader.get_code(self._real)
        return code
