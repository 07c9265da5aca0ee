"""`AdmitHook` and `FilterHook`: which ids get rows, and which rows are removed, as policies of `kv.Table`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from karvan.compat.unsupported import UnsupportedError
from karvan.embedding.admission import Admission, Always, ReadOnly
from karvan.embedding.eviction import Eviction, Never
from karvan.presets import recis

_ONLY_WHEN_ASKED = 1 << 30  # steps between two checks: HashTableFilterHook makes them


class _Policy:
    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        self._name = name
        self._params = dict(params or {})

    @property
    def name(self) -> str:
        """The name of the policy."""
        return self._name

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters."""
        return self._params

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, {self._params})"


class AdmitHook(_Policy):
    """Which unknown ids get rows: "ReadOnly", none."""

    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, params)
        if name != "ReadOnly":
            raise UnsupportedError(
                f'AdmitHook("{name}")', 'expected "ReadOnly"; see kv.admission for other rules.'
            )
        if self.params:
            raise ValueError(f"ReadOnly expects no parameters, got {self.params}.")


class FilterHook(_Policy):
    """Which rows are removed: "GlobalStepFilter", those unused for `filter_step` steps.

    `HashTableFilterHook` says when.
    """

    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, params)
        if name != "GlobalStepFilter":
            raise UnsupportedError(
                f'FilterHook("{name}")', 'expected "GlobalStepFilter"; see kv.eviction for other rules.'
            )
        if set(self.params) != {"filter_step"}:
            raise ValueError(f'GlobalStepFilter expects {{"filter_step": steps}}, got {self.params}.')


def admission(hook: AdmitHook | None) -> Admission:
    """Karvan's rule for a hook."""
    return Always() if hook is None else ReadOnly()


def eviction(hook: FilterHook | None) -> Eviction:
    """Karvan's rule for a hook."""
    if hook is None:
        return Never()
    return recis.global_step_filter(int(hook.params["filter_step"]), every=_ONLY_WHEN_ASKED)
