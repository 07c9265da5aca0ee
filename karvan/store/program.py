"""Lookups of whole batches: the features of an engine, and what a store remembers of a batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from karvan import _native
from karvan.ragged import IdsReference
from karvan.store.remote.output_layout import OutputLayout
from karvan.store.types import FeatureSpec

LookupInputs: TypeAlias = list[_native.FeatureArrays] | IdsReference


class LookupProgram:
    """The features of an engine in the form the native core needs, made once.

    A table's slot is its index in `tables`. features_json: the features as JSON, for embedding workers, which
    embed in place of the engine.
    """

    def __init__(
        self, features: Sequence[FeatureSpec], features_json: Mapping[str, Any] | None = None
    ) -> None:
        self.features = list(features)
        self.features_json = dict(features_json or {})
        self.name = hashlib.sha256(json.dumps(self.features_json).encode()).hexdigest()[:16]
        self.native = _native.Program(self.features)
        self.tables = self.native.tables


class LookupState(Protocol):
    """What a store with remote rows remembers of a batch, from `prepare` until its gradients are sent."""

    @property
    def plan(self) -> _native.Plan | None:
        """The batch, grouped by key; None where its ids are remote as well."""


@runtime_checkable
class RemoteLookup(LookupState, Protocol):
    """A batch whose ids are remote."""

    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        """Hand over the outputs of all features; the lookup does not hold them afterwards."""


Prepared: TypeAlias = _native.Plan | LookupState  # what a store's `prepare` gives to its own `forward`


class LookupPlan(NamedTuple):
    """A batch between lookup and gradients: the native plan, and the tables' versions at the lookup.

    remote: what a store with remote rows must remember. Where the ids are remote as well, there is no native
    plan; `remote` is a `RemoteLookup` then.
    """

    native: _native.Plan | None
    versions: Mapping[str, int]
    remote: LookupState | None = None
