"""Compiles recorded launches of kernels for a Hopper GPU: `python compile_launches.py launches.json`.

Prints the name of each kernel. Run it without TRITON_INTERPRET.
"""

import importlib
import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def main():
    with open(sys.argv[1]) as file:
        launches = json.load(file)
    for module, name, signature, constants, options in launches:
        kernel = getattr(importlib.import_module(module), name)
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, argument in enumerate(kernel.arg_names)
            if signature[argument].startswith("*")
        }
        source = ASTSource(kernel, signature, constants, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"]
        print(name)


if __name__ == "__main__":
    main()
