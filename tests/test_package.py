"""The package as a whole: how it imports, and which of its modules may know which."""

import ast
import inspect
import pickle
import re
import resource
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

import karvan

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "karvan"

# An import may point to a layer before its own in this list, or stay within its part.
LAYERS = tomllib.loads((ROOT / "tools" / "layers.toml").read_text())["layers"]
LAYER_OF = {part: level for level, parts in enumerate(LAYERS) for part in parts}


_parse = cache(ast.parse)


@cache
def _modules():
    """Module name → syntax tree."""
    trees = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = _parse(path.read_text())
    return trees


def _imports(tree, typing=False):
    """(module, name or None) of each import of karvan that happens at run time, or for types as well."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING" and not typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((a.name, None) for a in node.names if a.name.split(".")[0] == "karvan")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module.split(".")[0] == "karvan":
                yield from ((node.module, a.name) for a in node.names)
        pending.extend(_statements(node))


def _statements(node):
    """The statements right below a node: imports and classes are among them, and not in expressions."""
    below = ast.stmt, ast.excepthandler, ast.match_case
    return [each for each in ast.iter_child_nodes(node) if isinstance(each, below)]


@cache
def _dependencies(typing=False):
    """Module → the karvan modules it imports; typing: also those that it imports for types alone."""
    trees = _modules()
    known = {*trees, "karvan._native"}
    graph = {}
    for module, tree in trees.items():
        targets = {
            f"{source}.{name}" if f"{source}.{name}" in known else source
            for source, name in _imports(tree, typing)
        }
        graph[module] = targets
    return graph


def _part(module):
    return module.split(".")[1] if "." in module else "__init__"


def test_each_room_stays_within_its_budget(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from size import ROOMS, sizes

    named = [part for room in ROOMS.values() for part in room["parts"]]
    assert len(named) == len({*named}), "a part is in two rooms"
    assert {*named} <= {*LAYER_OF}, "a room has a part that no layer has"
    above = {
        room: (size.code, size.files)
        for room, size in sizes(_parse).items()
        if size.code > 1.03 * ROOMS[room]["code"] or size.files > 1.03 * ROOMS[room]["files"]
    }
    assert above == {}, "code lines and files of rooms above their budget + 3 %: see tools/layers.toml"


def test_imports_point_down_the_layers():
    wrong = [
        f"{module} imports {target}"
        for module, targets in _dependencies().items()
        for target in targets
        if _part(module) != _part(target) and LAYER_OF[_part(target)] >= LAYER_OF[_part(module)]
    ]
    assert wrong == []


# A public name that is found in a package below the one that has its code. Only who asks for it imports that.
UPWARDS = {"karvan.data": ["karvan.cluster.loader_stream"]}


def _named_modules(node):
    """The modules that a call of `importlib.import_module` or of `publish` names."""
    if not isinstance(node, ast.Call):
        return []
    name = getattr(node.func, "attr", getattr(node.func, "id", None))
    named = {
        "import_module": node.args[:1],
        "publish": [key for each in node.args[1:] for key in getattr(each, "keys", ())],
    }
    return [each.value for each in named.get(name, ()) if isinstance(getattr(each, "value", None), str)]


def test_imports_by_name_point_down_the_layers_too():
    upwards = {}
    for module, tree in _modules().items():
        for node in ast.walk(tree):
            for target in _named_modules(node):
                if LAYER_OF[_part(target)] > LAYER_OF[_part(module)]:
                    upwards.setdefault(module, []).append(target)
    assert upwards == UPWARDS


def _cycle(graph):
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_through_others():
    assert _cycle(_dependencies()) == []


def test_no_module_imports_itself_through_others_for_types():
    graph = dict(_dependencies(typing=True))
    del graph["karvan"]  # its imports for types say to checkers which names it gives
    assert _cycle(graph) == []


def _path(module):
    path = ROOT.joinpath(*module.split("."))
    package = path / "__init__.py"
    return package if package.exists() else path.with_suffix(".py")


def _classes(tree):
    """All classes of a module, also those inside of functions and classes."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            yield node
        pending.extend(_statements(node))


def _bases(node):
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        yield base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def test_no_class_is_spread_over_files_by_inheritance():
    """A base class in another file is an interface, has several subclasses, or is used by itself, too."""
    classes, subclasses = {}, {}
    for module, tree in _modules().items():
        for node in _classes(tree):
            classes[node.name] = module, node
            for base in _bases(node):
                subclasses.setdefault(base, set()).add(module)
    sources = {module: _path(module) for module in _modules()}
    words = {
        module: set(re.findall(r"\w+", path.read_text()))
        for module, path in sources.items()
        if path.name != "__init__.py"
    }
    spread = []
    for name, (module, node) in classes.items():
        among = subclasses.get(name, set())
        if len(among) != 1 or module in among:
            continue
        interface = {"ABC", "Protocol"} & set(_bases(node)) or "abstractmethod" in ast.unparse(node)
        used = any(name in words[each] for each in words.keys() - {module, *among})
        if not interface and not used:
            spread.append(f"{name} ({sources[module].relative_to(ROOT)})")
    assert spread == []


def test_no_module_imports_the_privates_of_another():
    private = [
        f"{module}: from {source} import {name}"
        for module, tree in _modules().items()
        for source, name in _imports(tree)
        if name and name.startswith("_") and name != "_native"
    ]
    assert private == []


def test_public_names_are_listed_and_exist():
    assert sorted(karvan.__all__) == sorted(set(karvan.__all__))
    assert [name for name in karvan.__all__ if not hasattr(karvan, name)] == []
    assert len(karvan.__all__) <= 31
    assert karvan.__version__ == metadata.version("karvan")
    assert (PACKAGE / "py.typed").exists()


PUBLIC_MODULES = (
    "karvan",
    "karvan.train",
    *(f"karvan.{name}" for name in karvan.__all__ if inspect.ismodule(getattr(karvan, name))),
)


@pytest.mark.parametrize("name", [f"kv{each.removeprefix('karvan')}" for each in PUBLIC_MODULES])
def test_dir_of_a_public_module_lists_its_public_names_alone(name):
    module = eval(name, {"kv": karvan})
    assert dir(module) == sorted(module.__all__)
    for each in module.__all__:
        assert getattr(module, each) is not None


def test_a_misspelled_name_of_a_public_module_says_which_one_is_meant():
    wrong = {
        "Auc": (karvan.metrics, "AUC"),
        "Trianer": (karvan, "Trainer"),
        "Fixd": (karvan.data, "Fixed"),
        "Adagrd": (karvan.optim, "Adagrad"),
        "mincount": (karvan.admission, "MinCount"),
        "farmhash": (karvan.ids, "farm"),
    }
    for name, (module, right) in wrong.items():
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. Did you mean '{right}'\?$"):
            getattr(module, name)
    with pytest.raises(AttributeError, match=r"module 'karvan' has no attribute 'zzz'\.$"):
        _ = karvan.zzz


def test_a_misspelled_argument_says_which_one_is_meant():
    wrong = {
        lambda: karvan.Table(
            8, combinr="mean"
        ): r"Table\(\) has no argument 'combinr'. Did you mean 'combiner'",
        lambda: karvan.Trainer(None, None, clip_nrom=1.0): "'clip_nrom'. Did you mean 'clip_norm'",
        lambda: karvan.Trainer.fit(None, [], eval_dat=[]): r"Trainer.fit\(\) has no argument 'eval_dat'",
        lambda: karvan.metrics.AUC(bin=3): r"AUC\(\) has no argument 'bin'. Did you mean 'bins'",
        lambda: karvan.optim.Adam(None, beta=(0.9, 0.9)): "Did you mean 'betas'",
        lambda: karvan.data.read("x", batchsize=3): "'batchsize'. Did you mean 'batch_size'",
        lambda: karvan.connect("memory", capcity=3): "Did you mean 'capacity'",
        lambda: karvan.eviction.LRU(size=3): r"LRU\(\) has no argument 'size'. It has: capacity",
        lambda: karvan.presets.persia.table(8, admit_probabilty=0.5): "has no argument 'admit_probabilty'",
        lambda: karvan.losses.BinaryCrossEntropy(lable="x"): "Did you mean 'label'",
    }
    for call, text in wrong.items():
        with pytest.raises(TypeError, match=text):
            call()


def test_an_error_inside_of_a_public_function_stays_as_it_is():
    class Own(karvan.callbacks.EarlyStopping):
        def __init__(self, **options):
            super().__init__("auc", **options)
            dict(**options)[0] = len(options, nothing=1)

    with pytest.raises(TypeError, match=r"has no argument 'patienc'\. Did you mean 'patience'"):
        Own(patienc=1)
    with pytest.raises(TypeError, match=r"^len\(\) takes no keyword arguments$"):
        Own(patience=1)


def test_public_functions_can_be_pickled():
    for function in (karvan.data.read, karvan.ids.farm, karvan.connect, karvan.checkpoint.find):
        assert pickle.loads(pickle.dumps(function)) is function


def _seconds(code):
    """The processor's time that a program takes, whatever else runs on the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_takes_less_than_two_seconds():
    for _ in range(5):
        whole = _seconds("import karvan; karvan.EmbeddingEngine")
        # Where torch alone takes that long, as on a busy machine, karvan may add a quarter of its time.
        if whole < 2.0 or whole < 1.25 * (alone := _seconds("import torch")):
            return
    raise AssertionError(f"importing karvan takes {whole:.1f} s, torch alone {alone:.1f} s")


def test_import_needs_no_extra_and_leaves_cuda_alone():
    extras = ["triton", "fbgemm_gpu", "pyarrow", "ray", "fastapi", "prometheus_client", "typer", "pydantic"]
    extras += ["rich", "tensorboard", "safetensors"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({extras}));"
        "import karvan, torch; karvan.EmbeddingEngine; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# Who may draw from or set the generators of the program: its own are for everybody else.
USES_GLOBAL_GENERATORS = {
    "karvan.train.results": "saves and restores them",
    "karvan.cli.config": "train.seed of the configuration is that of the model",
    "karvan.cli.commands.demo": "is a program, whose model has the same weights each time",
    "karvan.compat.persia.env": "setup_seed is PERSIA's function to set them",
    "karvan.models.deepfm": "initial weights of a layer",
}
_TORCH_DRAWS = {
    *("bernoulli", "dropout", "multinomial", "normal", "poisson", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm"),
}
_TORCH = "torch", "torch.cuda", "torch.random", "torch.cuda.random", "torch.nn.functional"
_DRAWS_IN_PLACE = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_"),
    *("trunc_normal_", "uniform_"),
}
_SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"}
_OF_NO_GENERATOR = {"default_rng", "Generator", "SFC64", "PCG64", "SeedSequence", "SystemRandom", "Random"}


def _dotted(node):
    """A name with what follows its dots, "?" for any other expression: "numpy.random", "?.uniform_"."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _global_draws(tree):
    """What of a program draws from or sets the global generators of Python, numpy and torch.

    A function that is passed on counts, too; one that is called with a generator does not.
    """
    nodes, names = list(ast.walk(tree)), {}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [
                (a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2 for a in node.names
            ]
            names |= dict(modules)
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    given = {
        id(call.func)
        for call in nodes
        if isinstance(call, ast.Call) and {"generator", "random_state"} & {each.arg for each in call.keywords}
    }
    for used in nodes:
        if not isinstance(used, ast.Name | ast.Attribute) or id(used) in given:
            continue
        name = _dotted(used)
        first, dot, rest = name.partition(".")
        whole = f"{names.get(first, '?')}{dot}{rest}"
        module, _, last = whole.rpartition(".")
        if (
            (module in ("random", "numpy.random") and last not in _OF_NO_GENERATOR)
            or (module in _TORCH and last in _TORCH_DRAWS | _SEEDS)
            or (module == "torch.nn.init" and last.endswith("_"))
            or last in _DRAWS_IN_PLACE
            or last in ("default_generator", "default_generators")
        ):
            yield f"{name}, line {used.lineno}"


def test_only_what_is_of_the_program_uses_its_random_generators():
    found = {module: list(_global_draws(tree)) for module, tree in _modules().items()}
    assert {
        module: calls for module, calls in found.items() if calls and module not in USES_GLOBAL_GENERATORS
    } == {}
    assert [module for module in USES_GLOBAL_GENERATORS if not found[module]] == []


@pytest.mark.parametrize(
    "draws",
    [
        "import random; random.uniform(0, 1)",
        "import random as r; r.shuffle([])",
        "from random import choice; choice([1])",
        "import numpy as np; np.random.permutation(3)",
        "from numpy import random; random.rand()",
        "import torch; torch.randperm(3)",
        "from torch import rand; rand(3)",
        "import torch; torch.empty(3).uniform_()",
        "from torch import nn; nn.init.zeros_(w)",
        "import torch; torch.cuda.manual_seed_all(1)",
        "import random; sorted([], key=random.random)",
        "from random import uniform as draw; delay = draw",
        "import numpy; numpy.random.default_rng(0); numpy.random.shuffle([])",
        "import torch.nn.functional as f; f.dropout(x)",
        "import torch; torch.default_generator.seed()",
    ],
)
def test_a_draw_from_a_generator_of_the_program_is_seen(draws):
    assert len(list(_global_draws(ast.parse(draws)))) == 1


# Who may rename: a file that was written anew takes its place by `karvan.files`, which waits for the disk.
RENAMES = {
    "karvan.files": "the one place",
    "karvan.checkpoint.atomic_folder": "renames folders, whose files are on the disk",
    "karvan.owner": "sets the lease of another aside",
    "karvan.launch.engines.keeper": "imports nothing; its logs and numbers need no disk",
}


def test_files_are_replaced_in_one_place():
    renames = {
        module
        for module, tree in _modules().items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and not call.keywords
        and (
            _dotted(call.func) in ("os.replace", "os.rename", "shutil.move")
            or (call.func.attr in ("rename", "replace") and len(call.args) == 1)
        )
    }
    assert renames == RENAMES.keys()
