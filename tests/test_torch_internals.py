"""What Karvan uses of torch's internals exists in the installed torch, and is used in one place only."""

import ast
import ctypes
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

PACKAGE = Path(__file__).parent.parent / "karvan"
INTERNALS = PACKAGE / "torch_internals.py"
TREE = ast.parse(INTERNALS.read_text())
_PRIVATE = re.compile(r"(torch|dist)(\.\w+)*\.(_(?!_)|distributed_c10d)")
ATTRIBUTES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _imports(tree):
    """(module, name) of each import of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "torch")


def _is_internal(module, name):
    return any(part.startswith("_") for part in (*module.split("."), name)) or "c10d" in module


INTERNAL = [each for each in _imports(TREE) if _is_internal(*each)]


def _missing(what):
    return f"torch {torch.__version__} has no {what}: karvan/torch_internals.py says what depends on it."


@pytest.mark.parametrize(("module", "name"), INTERNAL)
def test_an_internal_name_exists(module, name):
    assert hasattr(importlib.import_module(module), name), _missing(f"{module}.{name}")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_optimizer_has_its_hooks(name):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert hasattr(optimizer, name), _missing(f"Optimizer.{name}")


def test_norms_of_many_tensors_are_there_and_have_nan():
    from karvan.torch_internals import foreach_norm

    found = foreach_norm([torch.tensor([1.0, -3.0]), torch.tensor([torch.nan, 1.0])], torch.inf)
    assert found[0] == 3
    assert found[1].isnan()


def test_copies_of_many_tensors_cast_and_a_product_has_relu():
    from karvan.torch_internals import addmm_relu, foreach_copy

    small = [torch.empty(2, dtype=torch.bfloat16)]
    foreach_copy(small, [torch.tensor([1.0, -3.0])])
    assert small[0].tolist() == [1, -3]
    found = addmm_relu(torch.tensor([1.0, -9.0]), torch.ones(1, 2), torch.ones(2, 2))
    assert found.tolist() == [[3, 0]]


def test_a_fused_optimizer_skips_a_step_by_a_flag():
    from karvan.torch_internals import SKIP_ATTRIBUTES, skips_on_device, step_unless

    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    assert hasattr(optimizer, SKIP_ATTRIBUTES[0]), _missing(f"Adam.{SKIP_ATTRIBUTES[0]}")
    assert skips_on_device(optimizer)
    step_unless(optimizer, torch.tensor(1.0))
    assert weight.tolist() == [1.0, 1.0]
    assert not any(hasattr(optimizer, name) for name in SKIP_ATTRIBUTES[1:])
    step_unless(optimizer, torch.tensor(0.0))
    assert weight.tolist() != [1.0, 1.0]
    assert optimizer.state[weight]["step"].item() == 1
    assert not skips_on_device(torch.optim.Adam([weight], lr=0.1))


def test_a_scaler_has_its_scale_as_a_tensor():
    from karvan.torch_internals import loss_scale

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    scale = loss_scale(scaler)
    assert scale.item() == 8.0
    scaler.update(4.0)
    assert scale.item() == 4.0  # the same tensor


def test_a_tensor_counts_what_is_written_to_it():
    from karvan.torch_internals import TENSOR_VERSION

    tensor = torch.zeros(2)
    assert hasattr(tensor, TENSOR_VERSION), _missing(f"Tensor.{TENSOR_VERSION}")
    before = getattr(tensor, TENSOR_VERSION)
    tensor.add_(1)
    assert getattr(tensor, TENSOR_VERSION) > before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has other threads elsewhere")
def test_torchs_library_has_the_functions_of_openmp():
    from karvan.torch_internals import OPENMP_FUNCTIONS, openmp_addresses

    addresses = openmp_addresses()
    assert addresses is not None, _missing(" and ".join(OPENMP_FUNCTIONS))
    width = ctypes.CFUNCTYPE(ctypes.c_int)(addresses[OPENMP_FUNCTIONS.index("omp_get_max_threads")])
    assert width() == torch.get_num_threads()


def test_hooks_and_profilers_observe_a_step():
    from karvan.torch_internals import is_step_observed

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert not is_step_observed(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        hook = register(lambda *_: None)
        assert is_step_observed(optimizer)
        hook.remove()
        assert not is_step_observed(optimizer)
    with torch.profiler.profile():
        assert is_step_observed(optimizer)


def test_the_docstring_says_what_breaks_for_each_name():
    from karvan.torch_internals import OPENMP_FUNCTIONS, SKIP_ATTRIBUTES, TENSOR_VERSION

    told = ast.get_docstring(TREE)
    names = [name for _, name in INTERNAL] + [
        *ATTRIBUTES,
        *SKIP_ATTRIBUTES,
        TENSOR_VERSION,
        *OPENMP_FUNCTIONS,
    ]
    names.append("_get_scale_async")
    assert [name for name in names if f"`{name}`" not in told] == []


def test_no_other_module_uses_internals_of_torch():
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path != INTERNALS:
            tree = ast.parse(path.read_text())
            used = [f"{module}.{name}" for module, name in _imports(tree) if _is_internal(module, name)]
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
                    used.append(node.attr)
                elif isinstance(node, ast.Attribute) and _PRIVATE.match(ast.unparse(node)):
                    used.append(ast.unparse(node))
            found += [f"{path.relative_to(PACKAGE)}: {name}" for name in used]
    assert found == []
