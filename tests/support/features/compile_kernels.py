"""A program that compiles kernels for a GPU that need not be there: all of karvan.kernels, or those named."""

import importlib
import inspect
import itertools
import pkgutil
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import karvan.kernels

CONSTANTS = {"block": [128], "columns": [64]}
CONSTANTS |= {"n": [27], "dim": [128], "rows": [32]}
CONSTANTS |= {name: [True, False] for name in ("ragged", "first", "last", "whole", "left")}
# A compilation for small numbers and elements, and one for large ones.
NUMBERS = ["i32", "i64"]
ELEMENTS = ["*u8", "*i64"]


def kernels():
    """All kernels, but not the functions that they call."""
    for module in pkgutil.iter_modules(karvan.kernels.__path__):
        for found in vars(importlib.import_module(f"karvan.kernels.{module.name}")).values():
            if isinstance(found, triton.runtime.JITFunction) and found.__name__.endswith("_kernel"):
                yield found


def compilations(kernel):
    """(types by argument, constants by argument) of each compilation."""
    parameters = {name: each.annotation for name, each in inspect.signature(kernel.fn).parameters.items()}
    constants = [name for name, kind in parameters.items() if kind == "tl.constexpr"]
    for values in itertools.product(*(CONSTANTS[name] for name in constants)):
        for number, element in zip(NUMBERS, ELEMENTS, strict=True):
            types = {"Bytes": "*u8", "Ids": "*i64", "Elements": element, "Integer": number}
            types |= {"Floats": "*fp32", "Stride": number}
            signature = {name: types.get(kind, "constexpr") for name, kind in parameters.items()}
            yield signature, dict(zip(constants, values, strict=True))


def main():
    for kernel in {kernel.__name__: kernel for kernel in kernels()}.values():
        if len(sys.argv) > 1 and kernel.__name__ not in sys.argv[1:]:
            continue
        count = 0
        for signature, constants in compilations(kernel):
            source = ASTSource(kernel, signature, constants)
            options = {"debug": bool(kernel.debug)}
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert ("__assertfail" in made.asm["ptx"]) == bool(kernel.debug), kernel.__name__
            assert made.asm["cubin"]
            count += 1
        print(kernel.__name__, count)


main()
