"""Triton's interpreter without work that it repeats: on import, kernels take half of the time.

Whenever a kernel is launched, and whenever it calls a function, the interpreter goes through all members of
Triton's modules for those that it has to replace meanwhile. They are the same every time, and those that a
launch has replaced need not be replaced by the functions that it calls. Every operation makes types and
tensors, each with its shape as a tuple of constants, of which there are few. Values are computed as before.
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


def _patch_builtin(pkg, builder, scope):
    for name in _BUILTINS[pkg]:
        member = getattr(pkg, name)
        if tl.core.is_builtin(member):  # rather than replaced already, by the launch that calls this function
            interpreter._patch_attr(pkg, name, member, builder, scope)


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


def _is_known():
    """Whether it is as this file expects; other versions of Triton keep their own."""
    block = tl.block_type(tl.int32, [2, 4])
    return (
        hasattr(tl.core, "_unwrap_if_constexpr")
        and hasattr(TritonSemantic, "broadcast_impl_value")
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
