"""The reference: every public name says what it does, what its arguments are, and how it is used.

Public are the names in `__all__` of the modules that `docs/reference` shows, and the public methods of their
classes. A method that overrides a public one needs no more than a sentence: its arguments are the same.
"""

import dataclasses
import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import karvan as kv

PAGES = Path(__file__).parents[1] / "docs" / "reference"
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
# Functions and methods that are used as the example of their class, or of their page, shows.
MODULES = sorted({name for page in PAGES.glob("*.md") for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)})


def module_of(name):
    """A module by its public name: `karvan.optim` is an attribute, and no file of that name."""
    parts, value = name.split("."), kv
    for part in parts[1:]:
        value = getattr(value, part)
    return value


def public_objects():
    """Each public class and function once, with the shortest of its names."""
    known = {}
    for module in sorted(MODULES, key=lambda name: name.count(".")):
        scope = module_of(module)
        own = [name for name, value in vars(scope).items() if getattr(value, "__module__", "") == module]
        for name in getattr(scope, "__all__", [name for name in own if not name.startswith("_")]):
            value = getattr(scope, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                known.setdefault(id(value), (f"{module}.{name}", value))
    return dict(known.values())


OBJECTS = public_objects()


def functions_of(kind):
    """The public methods that a class defines itself: their names, what they are, and their functions."""
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not name.startswith("_") and inspect.isfunction(function) and function.__name__ == name:
            yield name, member, function


def is_described_by_base(kind, name):
    return any(name in vars(base) for base in kind.__mro__[1:] if base in OBJECTS.values())


def sections_of(text):
    """The text before the first section, and the lines of each section."""
    parts = {"": []}
    current = parts[""]
    for line in text.splitlines():
        title = line.removesuffix(":")
        if title in SECTIONS and line.endswith(":"):
            current = parts.setdefault(title, [])
        else:
            current.append(line)
    return parts


def entries(lines):
    return [found[1] for line in lines if (found := re.match(r"    (\*{0,2}\w+): \S", line))]


def parameters_of(value):
    if getattr(value, "_is_protocol", False) or inspect.isclass(value) and value.__init__ is object.__init__ and value.__new__ is object.__new__:
        return []
    names = []
    for parameter in inspect.signature(value).parameters.values():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.name not in ("self", "cls"):
            names.append(stars + parameter.name)
    return names


def problems_of(name, value, *, as_property=False, is_override=False):
    text = inspect.cleandoc(value.__doc__ or "")
    parts = sections_of(text)
    summary = text.split("\n\n")[0].replace("\n", " ")
    if not summary.endswith(".") or summary.startswith("See "):
        yield f"{name}: the docstring begins with {summary[:60]!r}, not with a sentence"
    if long := [line for line in parts.get("Example", ()) if len(line) > 84]:
        yield f"{name}: a line of the example is longer than 80 columns: {long[0]}"
    if as_property or is_override:
        return
    described = entries(parts.get("Args", parts.get("Attributes", ())))
    is_result = "Attributes" in parts and dataclasses.is_dataclass(value)
    try:
        expected = [each.name for each in dataclasses.fields(value)] if is_result else parameters_of(value)
    except ValueError:  # as of an exception that inherits how it is made
        expected = described
    if described != expected:
        yield f"{name}: Args describes {described}, expected {expected}"
    returned = getattr(value, "__annotations__", {}).get("return")
    if inspect.isfunction(value) and returned not in (None, "None") and not {"Returns", "Yields"} & parts.keys():
        yield f"{name}: Returns is missing"


def all_problems():
    for name, value in OBJECTS.items():
        yield from problems_of(name, value)
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        if not is_error and "Example" not in sections_of(inspect.cleandoc(value.__doc__ or "")):
            yield f"{name}: Example is missing"
        for method, member, function in functions_of(value) if inspect.isclass(value) else ():
            yield from problems_of(
                f"{name}.{method}",
                function,
                as_property=isinstance(member, property),
                is_override=is_described_by_base(value, method),
            )


def examples():
    """The examples of all docstrings, by the names of what they are of."""
    for name, value in OBJECTS.items():
        members = [(name, value)]
        if inspect.isclass(value):
            members += [(f"{name}.{method}", function) for method, _, function in functions_of(value)]
        for title, member in members:
            text = "\n".join(sections_of(inspect.cleandoc(member.__doc__ or "")).get("Example", ()))
            if text:
                yield title, text


def test_every_public_name_is_described():
    assert not list(all_problems())


def test_examples_of_docstrings_give_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, failures = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False), []
    for name, text in examples():
        torch.manual_seed(0)
        example = doctest.DocTestParser().get_doctest(text, {"kv": kv, "torch": torch}, name, None, 0)
        runner.run(example, out=failures.append)
    assert not failures, "".join(failures)


if __name__ == "__main__":
    import collections, sys
    found=list(all_problems())
    by=collections.Counter()
    for p in found:
        by[".".join(p.split(":")[0].split(".")[:2])]+=1
        if len(sys.argv)>1 and re.search(sys.argv[1],p): print(p)
    print(len(found), by)
    import os, tempfile, time
    os.chdir(tempfile.mkdtemp())
    for name,text in examples():
        if len(sys.argv)>2 and not re.search(sys.argv[2],name): continue
        t0=time.time(); torch.manual_seed(0)
        ex = doctest.DocTestParser().get_doctest(text, {"kv": kv, "torch": torch}, name, None, 0)
        out=[]; doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(ex,out=out.append)
        if out: print(name, "".join(out))
        if time.time()-t0>.3: print("SLOW",name,round(time.time()-t0,2))
