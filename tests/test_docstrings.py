"""The reference: every public name says what it does, what its arguments are, and how it is used.

Public are the names in `__all__` of the modules on the pages of `docs/reference`, what these pages show
besides, and the public methods of their classes. A method that overrides a public one needs no more than a
sentence: its arguments are the same.
"""

import dataclasses
import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import torch

import karvan as kv

PAGES = Path(__file__).parents[1] / "docs" / "reference"
MODULES = re.findall(r"^\| \[(karvan[\w.]*)\]\(", (PAGES / "index.md").read_text(), re.M)
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
SHOWN = {  # the options of each
    path: options
    for page in sorted(PAGES.glob("*.md"))
    for path, options in re.findall(r"^::: ([\w.]+)\n((?: .*\n)?)", page.read_text(), re.M)
}


def find(path):
    """What a path means: a module, a name in one, or what it gives under this name, as `karvan.optim`."""
    home, _, name = path.rpartition(".")
    if not home:
        return kv
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError:
        module = find(home)
    return getattr(module, name, None) or importlib.import_module(path)


def is_described(value):
    return inspect.isclass(value) or inspect.isfunction(value)


def public_objects():
    """Each public class and function once, by its first name."""
    paths = [f"{module}.{name}" for module in MODULES for name in find(module).__all__]
    for path in [*paths, *SHOWN]:
        if isinstance(module := find(path), ModuleType) and hasattr(module, "__all__"):
            paths += [f"{path}.{name}" for name in module.__all__]
    objects = {}
    for path in [*paths, *SHOWN]:
        if is_described(value := find(path)):
            objects.setdefault(value, path)
    return {path: value for value, path in objects.items()}


OBJECTS = public_objects()


def methods_of(kind):
    """The public methods and properties that a class defines itself, and their functions."""
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        if not name.startswith("_") and inspect.isfunction(function) and function.__name__ == name:
            yield name, member, function


def members():
    """Every public name with its docstring, and how strictly it is looked at."""
    for path, value in OBJECTS.items():
        yield path, value, True
        for name, member, function in methods_of(value) if inspect.isclass(value) else ():
            bases = [base for base in value.__mro__[1:] if base in OBJECTS.values()]
            overrides = any(name in vars(base) for base in bases)
            is_function = inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)
            yield f"{path}.{name}", function, is_function and not overrides


def sections_of(value):
    """The text before the first section, and the lines of each section."""
    parts = {"": []}
    current = parts[""]
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if line.endswith(":") and line[:-1] in SECTIONS:
            current = parts.setdefault(line[:-1], [])
        else:
            current.append(line)
    return parts


def summary_of(value):
    return " ".join(sections_of(value)[""]).split("  ")[0].strip()


def expected_arguments(value, has_attributes):
    if has_attributes and dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    makers = [getattr(value, name, None) for name in ("__init__", "__new__")]
    if getattr(value, "_is_protocol", False) or makers == [object.__init__, object.__new__]:
        return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(value).parameters.values()
    return [stars.get(each.kind, "") + each.name for each in found if each.name not in ("self", "cls")]


def problems_of(path, value, strictly):
    parts, summary = sections_of(value), summary_of(value)
    if not summary.endswith(".") or summary.startswith("See ") or re.search(r"[.!?] [A-Z]", summary):
        yield f"{path} should begin with one sentence, but begins with {summary!r}"
    if not strictly:
        return
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    lines = parts.get("Args", parts.get("Attributes", ()))
    described = [found[1] for line in lines if (found := re.match(r"    (\*{0,2}\w+): \S", line))]
    if not is_error or described:  # most exceptions inherit how they are made
        expected = expected_arguments(value, "Attributes" in parts)
        if described != expected:
            yield f"{path} should describe the arguments {expected}, but describes {described}"
    returned = getattr(value, "__annotations__", {}).get("return")
    if inspect.isfunction(value) and returned not in (None, "None") and not {"Returns", "Yields"} & {*parts}:
        yield f"{path} should say what it returns"
    if path in OBJECTS and not is_error and "Example" not in parts:
        yield f"{path} should have an example"


def test_every_public_name_is_described():
    problems = [problem for member in members() for problem in problems_of(*member)]
    assert not problems, "\n".join(problems)


def test_examples_of_docstrings_give_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, failures = doctest.DocTestRunner(verbose=False), []
    for path, value, _ in members():
        lines = [line.removeprefix("    ") for line in sections_of(value).get("Example", ())]
        failures += [f"{path}: longer than 80 columns: {line}\n" for line in lines if len(line) > 80]
        torch.manual_seed(0)
        scope = {"kv": kv, "torch": torch}
        example = doctest.DocTestParser().get_doctest("\n".join(lines), scope, path, None, 0)
        runner.run(example, out=failures.append)
    assert not failures, "".join(failures)


def is_shown(path, value):
    if any(find(shown) is value for shown in SHOWN):
        return True
    home, _, name = path.rpartition(".")
    chosen = re.search(r"members: \[(.*?)\]", SHOWN.get(home, "members: []"))
    # mkdocstrings takes a module of this name for it: a page has to show it by its own path
    folder = Path(find(home).__file__)
    is_hidden = folder.name == "__init__.py" and folder.with_name(f"{name}.py").exists()
    return not is_hidden and (chosen is None or name in chosen[1].split(", "))


def test_the_reference_shows_every_public_name():
    assert [path for path, value in OBJECTS.items() if not is_shown(path, value)] == []


def test_members_that_pages_choose_exist():
    for path, options in SHOWN.items():
        for name in re.findall(r"[\w]+", "".join(re.findall(r"members: \[(.*?)\]", options))):
            assert hasattr(find(path), name), f"{path} has no {name}"


def test_tables_of_the_reference_have_the_first_sentences_of_docstrings():
    for page in PAGES.glob("*.md"):
        for path, text in re.findall(r"^\| \[\w+\]\[([\w.]+)\] \| (.*) \|$", page.read_text(), re.M):
            assert text == summary_of(find(path)).removesuffix("."), path
