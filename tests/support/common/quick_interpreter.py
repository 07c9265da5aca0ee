"""Triton's interpreter without work that it repeats: on import, kernels run faster.

Whenever a kernel is launched, and whenever it calls a function, the interpreter goes through all members of
Triton's modules for those that it has to replace meanwhile. They are the same every time, and those that a
launch has replaced need not be replaced by the functions that it calls. Every operation makes types and
tensors, each with its shape as a tuple of constants, of which there are few. Operands mostly have one type
and one shape, or one of them is a constant. Overflows of integers are looked for, and then ignored. Values
are computed as before.
"""

import inspect

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_PLACES = (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
_BUILTINS = {
    place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
    for place in _PLACES
}


_CHECK = tl.core.builtin(lambda: None).__code__


def _replacement(member):
    # Without the check that it is called by a kernel.
    function = member.__wrapped__ if getattr(member, "__code__", None) is _CHECK else member

    def replacement(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return replacement


_REPLACEMENTS = {
    place: [(name, getattr(place, name), _replacement(getattr(place, name))) for name in names]
    for place, names in _BUILTINS.items()
}


def _patch_builtin(pkg, builder, scope):
    first, _, replaced = _REPLACEMENTS[pkg][0]
    if getattr(pkg, first) is replaced:  # by the launch that calls this function
        return
    for name, member, replacement in _REPLACEMENTS[pkg]:
        if getattr(pkg, name) is member:  # rather than replaced already by something else
            setattr(pkg, name, replacement)
            scope._changes.append((pkg, name, member))


_visible: dict = {}  # by function: which of Triton's modules it sees
_patched: set = set()  # of these, what is patched until the launch ends


class _Launch:
    """What a launch has replaced, until it ends."""

    def __init__(self, scope):
        self._scope = scope

    def restore(self):
        _patched.clear()
        if self._scope is not None:
            self._scope.restore()


def _patch_lang(fn, patch=interpreter._patch_lang):
    """Patch for a launch; for a function that it calls, only if that sees other modules."""
    if (seen := _visible.get(fn)) is None:
        values = fn.__globals__.values()
        seen = _visible[fn] = frozenset(id(each) for each in values if each is tl or each is tl.core)
    if seen in _patched:
        return _Launch(None)
    scope = patch(fn)
    _patched.add(seen)
    return _Launch(scope)


_np_dtypes: dict = {}


def _get_np_dtype(tt_dtype, get=interpreter._get_np_dtype):
    scalar = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
    if (found := _np_dtypes.get(scalar.name)) is None:
        found = _np_dtypes[scalar.name] = get(scalar)
    return found


_block_shapes: dict = {}


def _make_block_type(self, element_ty, shape, make=tl.block_type.__init__):
    sizes = [size.value if type(size) is tl.constexpr else size for size in shape]
    known = _block_shapes.get(tuple(sizes)) if all(type(size) is int for size in sizes) else None
    if known is None:
        make(self, element_ty, shape)
        _block_shapes[tuple(self.shape)] = self.shape, self.numel, str(self.shape)
    else:
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"


_tensor_shapes: dict = {}


def _make_tensor(self, handle, type, make=tl.tensor.__init__):
    sizes = tuple(type.shape) if type.is_block() else ()
    if (known := _tensor_shapes.get(sizes)) is None:
        make(self, handle, type)
        _tensor_shapes[sizes] = self.shape, self.numel
    else:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = known


def _is_same_dtype(self, other, equal=tl.dtype.__eq__):
    return self is other or equal(self, other)


_PLAIN = frozenset({int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type})


def _unwrap_if_constexpr(o, unwrap=tl.core._unwrap_if_constexpr):
    return o if type(o) in _PLAIN else unwrap(o)


def _broadcast(self, lhs, rhs, broadcast=TritonSemantic.broadcast_impl_value):
    one, other = lhs.type, rhs.type
    if one.is_block() and other.is_block() and one.shape is other.shape:  # as they are kept
        return lhs, rhs
    return broadcast(self, lhs, rhs)


# Operands of one of these types are computed with in that type. Half precision is not for divisions.
_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
_FLOATS = frozenset({"fp32", "fp64"})
_SAME = _INTEGERS | _FLOATS | {"int1"}
_MOST_CONSTANTS = 10_000

_constants: dict = {}  # by value, type and shape: tensors that nobody can change


def _constant(self, value, like):
    """A number as a tensor of the same type and shape as another one."""
    kind = like.type
    key = value, type(value), kind.name
    if (found := _constants.get(key)) is None:
        found = self._cast_to_computation_type(value, like.dtype)
        if kind.is_block():
            _, found = TritonSemantic.broadcast_impl_value(self, like, found)
        if value != 0 and len(_constants) < _MOST_CONSTANTS:  # 0.0 equals -0.0
            found.handle.data.setflags(write=False)
            _constants[key] = found
    return found


def _are_computed_together(value, dtype):
    """Whether a number takes the type of a tensor, as numbers of a lower or the same kind do."""
    return dtype in _FLOATS if type(value) is float else type(value) is int and dtype in _INTEGERS | _FLOATS


def _check_types(
    self,
    lhs,
    rhs,
    allow_lhs_ptr=False,
    allow_rhs_ptr=False,
    arithmetic_check=True,
    div_or_mod=False,
    check=TritonSemantic.binary_op_type_checking_impl,
):
    one, other = type(lhs) is tl.tensor, type(rhs) is tl.tensor
    if one and other:
        if lhs.dtype is rhs.dtype and lhs.dtype.name in _SAME:
            return self.broadcast_impl_value(lhs, rhs)
    elif arithmetic_check and one and _are_computed_together(rhs, lhs.dtype.name):
        return lhs, _constant(self, rhs, lhs)
    elif arithmetic_check and other and _are_computed_together(lhs, rhs.dtype.name):
        return _constant(self, lhs, rhs), rhs
    return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _check_overflow(self, lhs, rhs, binary_op, check=TritonSemantic.binary_op_sanitize_overflow_impl):
    if self.builder.options.debug:  # otherwise nothing is done with what it finds
        check(self, lhs, rhs, binary_op)


def _is_known():
    """Whether it is as this file expects; other versions of Triton keep their own."""
    block = tl.block_type(tl.int32, [2, 4])
    return (
        hasattr(tl.core, "_unwrap_if_constexpr")
        and hasattr(TritonSemantic, "broadcast_impl_value")
        and hasattr(TritonSemantic, "_cast_to_computation_type")
        and list(inspect.signature(TritonSemantic.binary_op_type_checking_impl).parameters)
        == list(inspect.signature(_check_types).parameters)[:-1]
        and hasattr(interpreter.interpreter_builder.options, "debug")
        and list(inspect.signature(interpreter._patch_builtin).parameters) == ["pkg", "builder", "scope"]
        and list(inspect.signature(interpreter._patch_lang).parameters) == ["fn"]
        and hasattr(interpreter, "_LangPatchScope")
        and vars(block).keys() == {"element_ty", "shape", "numel", "name"}
        and block.name == f"<{block.shape}, int32>"
        and vars(tl.tensor(None, block)).keys() == {"handle", "shape", "numel", "type", "dtype"}
    )


if _is_known():
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    tl.block_type.__init__ = _make_block_type
    tl.tensor.__init__ = _make_tensor
    tl.dtype.__eq__ = _is_same_dtype
    tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _check_types
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
