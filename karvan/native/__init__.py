"""Access to the native core, which may be missing, and to its memory."""

from karvan.native.core import NativeCoreError, _native, is_built, require

__all__ = ["NativeCoreError", "_native", "is_built", "require"]
