"""`Feature`: a name and operations that become the chain of a `kv.Feature`."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from karvan.compat.recis.features.op import FeatureOp
from karvan.features import Feature as Chain


class Feature(nn.Module):
    """A feature of RecIS: `Feature("user").add_op(SelectField("user")).add_op(Mod(1000))`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.ops = nn.ModuleList()

    def add_op(self, op: FeatureOp) -> Feature:
        """Add an operation; returns the feature itself."""
        if not isinstance(op, FeatureOp):
            raise TypeError(
                f"Feature '{self.name}' expects operations of recis.features.op, got {type(op).__name__}."
            )
        self.ops.append(op)
        return self

    def operations(self) -> list[FeatureOp]:
        """The operations."""
        return cast(list[FeatureOp], list(self.ops))

    def chain(self) -> Chain:
        """The same as a feature of Karvan."""
        made = Chain(self.name)
        for op in self.operations():
            made = op.add_to(made)
        return made

    def renamed(self) -> dict[str, str]:
        """Karvan's names of its results → RecIS's, where they differ."""
        suffixes = next((op.suffixes for op in self.operations() if op.suffixes), ())
        names = [f"{self.name}_{suffix}" for suffix in suffixes]
        return dict(zip(self.chain().outputs(), names, strict=False))

    def forward(self, data: Any) -> Any:
        """The feature of a batch, one operation after the other; several results are a dict."""
        for op in self.ops:
            data = op(data)
        return data
