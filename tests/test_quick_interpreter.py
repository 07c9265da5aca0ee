"""The interpreter of Triton that tests use: operands and errors are those of Triton's own."""

import dataclasses
import inspect
import itertools
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import quick_interpreter
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KINDS = [
    tl.int1,
    tl.int8,
    tl.int32,
    tl.int64,
    tl.uint32,
    tl.uint64,
    tl.float16,
    tl.bfloat16,
    tl.float32,
    tl.float64,
]
SHAPES = [(), (4,), (1, 4), (2, 1)]
NUMBERS = [0, 1, -1, 300, 2**31, 2**63, True, 0.0, -0.0, 1.5, float("inf"), float("nan")]
OPTIONS = [(), (True, True), (False, False, False), (False, False, True, True)]

QUICK = TritonSemantic.binary_op_type_checking_impl
if QUICK is not quick_interpreter._check_types:
    pytest.skip("this version of Triton keeps its own interpreter", allow_module_level=True)
OWN = inspect.signature(QUICK).parameters["check"].default


def tensor(kind, shape):
    data = np.arange(int(np.prod(shape))).reshape(shape or 1).astype(interpreter._get_np_dtype(kind))
    return tl.tensor(
        interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind
    )


def result(check, operands, options):
    try:
        found = check(interpreter.interpreter_semantic, *operands, *options)
    except Exception as error:
        return type(error), str(error)
    return [
        (str(each.type), each.handle.data.dtype, each.handle.data.shape, each.handle.data.tobytes())
        for each in found
    ]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_operands_have_the_types_shapes_and_values_of_triton(kind):
    for shape, options in itertools.product(SHAPES, OPTIONS):
        one = tensor(kind, shape)
        others = [tensor(*each) for each in itertools.product(KINDS, SHAPES)]
        for other in [*others, *NUMBERS, *NUMBERS]:  # a number that was there before is found again
            for operands in ((one, other), (other, one)):
                assert result(QUICK, operands, options) == result(OWN, operands, options)


@triton.jit
def compute(left, right, out, operation: tl.constexpr):
    at = tl.arange(0, 4)
    one, other = tl.load(left + at), tl.load(right + at)
    if operation == "add":
        found = one + other
    elif operation == "sub":
        found = one - other
    else:
        found = one * other
    tl.store(out + at, found)


OPERATIONS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}


@pytest.mark.parametrize(("operation", "fits", "too_large"), [("add", 1, 2), ("sub", -1, -2), ("mul", 1, -2)])
def test_an_overflow_is_an_error_where_triton_asserts(operation, fits, too_large, monkeypatch):
    left = torch.tensor([2**31 - 2, 0, 5, -1], dtype=torch.int32)
    out = torch.zeros_like(left)
    for debug, number in itertools.product((False, True), (fits, too_large)):
        options = dataclasses.replace(interpreter.interpreter_builder.options, debug=debug)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        right = torch.tensor([number, 1, 1, 1], dtype=torch.int32)
        if debug and number == too_large:
            with pytest.raises(Exception, match=f"int32 overflow detected for operation {operation}"):
                compute[(1,)](left, right, out, operation)
        else:
            compute[(1,)](left, right, out, operation)
            assert out.tolist() == OPERATIONS[operation](left, right).tolist()
