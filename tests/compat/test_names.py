"""Names of other systems can be imported from where programs import them, though few modules are files."""

import importlib
import importlib.util
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from karvan.compat.imports import SYSTEMS, import_aliases, unsupported_modules
from karvan.compat.unsupported import UnsupportedError

# The modules of the adapters and their names, as they were when each module was a file. With a name that a
# module has from another one, that one is given: it is the same object.
MODULES = json.loads(Path(__file__).with_name("names_of_systems.json").read_text())
UNSUPPORTED_MODULES = MODULES.pop("unsupported modules")


@pytest.fixture(autouse=True)
def aliases():
    """The packages of all systems can be imported."""
    with import_aliases({name: package for system in SYSTEMS.values() for name, package in system.items()}):
        yield


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_its_names(module):
    found = importlib.import_module(module)
    assert found is importlib.import_module(f"karvan.compat.{module}") is sys.modules[module]
    assert found.__doc__
    assert dir(found) == sorted(set(dir(found)))
    for name, origin in MODULES[module]["names"].items():
        scope = {}
        exec(f"from {module} import {name}", scope)
        assert scope[name] is getattr(found, name)
        if origin:
            package, _, original = origin.rpartition(".")
            assert scope[name] is getattr(importlib.import_module(package), original)
    for name in MODULES[module].get("unsupported", ()):
        with pytest.raises(
            UnsupportedError, match=rf"{module}\.{name} is not supported: .+ See docs/migrating"
        ):
            getattr(found, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = found.nothing


@pytest.mark.parametrize("module", [each for each in MODULES if "." in each])
def test_a_module_is_an_attribute_of_its_package(module):
    scope = {}
    exec(f"import {module}\nfound = {module}", scope)
    assert scope["found"] is sys.modules[module]
    package, _, name = module.rpartition(".")
    exec(f"from {package} import {name}", scope)
    assert scope[name] is scope["found"]


@pytest.mark.parametrize("module", MODULES)
def test_all_names_of_a_module_can_be_imported_at_once(module):
    scope = {}
    exec(f"from {module} import *", scope)
    found = sys.modules[module]
    listed = getattr(found, "__all__", [])
    assert [name for name in listed if scope[name] is not getattr(found, name)] == []
    assert len(listed) == len(set(listed))


def test_objects_are_pickled_and_inspected_as_those_of_a_file():
    initializers = importlib.import_module("recis.nn.initializers")
    made = initializers.NormalInitializer(std=0.5)
    assert pickle.loads(pickle.dumps(made)) == made
    assert pickle.loads(pickle.dumps(initializers.NormalInitializer)) is initializers.NormalInitializer
    former = b"ckarvan.compat.recis.nn.initializers\nNormalInitializer\n."  # as pickled when it was a file
    assert pickle.loads(former) is initializers.NormalInitializer
    assert "class NormalInitializer" in inspect.getsource(initializers.NormalInitializer)
    assert inspect.getsource(initializers).startswith("# The modules of RecIS")
    assert dict(inspect.getmembers(initializers, inspect.isclass)).keys() >= {"Initializer"}
    assert inspect.getmodule(made) is importlib.import_module(type(made).__module__)


def test_modules_are_told_from_packages():
    assert importlib.util.find_spec("karvan.compat.recis.nn.modules").submodule_search_locations is not None
    assert importlib.util.find_spec("karvan.compat.recis.nn.initializers").submodule_search_locations is None
    assert importlib.util.find_spec("karvan.compat.recis.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"'recis.nn.nothing': karvan.compat.recis stands for"):
        importlib.import_module("recis.nn.nothing")


def test_modules_without_a_counterpart_are_those_of_the_tables():
    assert sorted(unsupported_modules("recis")) == UNSUPPORTED_MODULES
    for module in UNSUPPORTED_MODULES:
        assert importlib.util.find_spec(f"karvan.compat.{module}") is None


def test_a_module_of_a_table_can_be_run():
    run = [sys.executable, "-m", "karvan.compat.recis.nn.initializers"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
