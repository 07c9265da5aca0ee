"""A program that compiles the kernels of exchanges between ranks for a GPU that need not be there."""

import inspect
import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from karvan.store.cuda.kernels import routing, runs

KERNELS = [routing.route_keys, routing.pack_keys, routing.number_rows, routing.average_runs, runs.write_sums]
POINTERS = {
    "*i64": ["features", "head", "hashes", "of_parts", "message", "chunks", "order"],
    "*i32": [
        *("out_rows", "feature_of", "parts", "starts", "uses", "key_rows", "numbers", "rows", "work"),
        *("run_rows", "present", "run_pieces", "long_runs"),
    ],
    "*fp32": ["factors", "partial"],
    "i32": ["feature_count", "ranks", "slots", "count", "size", "part_count"],
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}
CONSTANTS = {name: [True, False] for name in ["MAPPED", "GIVEN", "PARTIAL", "ALIGNED", "LONG"]}
CONSTANTS |= {"FEATURES": [2], "GROUP": [4], "TOGETHER": [2], "SHIFT": [30], "STRIDE": [16]}
SHAPES = [{"DIM": 128, "COLUMNS": 128}, {"DIM": 3, "COLUMNS": 4}]


def main():
    for kernel in KERNELS:
        names = list(inspect.signature(kernel.fn).parameters)
        signature = {name: TYPES.get(name, "constexpr") for name in names}
        given = [name for name in names if name in CONSTANTS]
        count = 0
        for shape in SHAPES if "DIM" in names else [{}]:
            for values in itertools.product(*(CONSTANTS[name] for name in given)):
                source = ASTSource(kernel, signature, dict(zip(given, values, strict=True)) | shape)
                assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
                count += 1
        print(kernel.__name__, count)


main()
