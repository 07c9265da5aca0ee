"""`JointCalls`: dumps and loads that one trainer asks for, and that all trainers make together.

Programs of PERSIA write `if get_rank() == 0: ctx.dump_checkpoint(…)`, but a save of Karvan is made by all
trainers, between two steps. So trainers agree wherever all of them come by: before the forward of a batch, at
the beginning of an iteration over a DataLoader, and at the end of a context. One that asks for a call waits
until the others are there, and then all make it. It does not matter how many of them ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from karvan import distributed

Call = dict[str, Any]  # the name of a method, and its arguments


class JointCalls:
    """Calls methods by name on all trainers, if one of them asks for it."""

    def __init__(self, methods: Mapping[str, Callable[..., None]]) -> None:
        self._methods = methods

    def make(self, method: str, **arguments: Any) -> None:
        """Have all trainers call a method, this one included; arguments are JSON values."""
        call = {"method": method, "arguments": arguments}
        channel = distributed.current().main
        self._make(call if channel.world_size == 1 else self._agree(call))

    def join(self) -> None:
        """Make the calls that other trainers ask for; all trainers come here equally often."""
        channel = distributed.current().main
        while channel.world_size > 1 and (call := self._agree(None)) is not None:
            self._make(call)

    def _make(self, call: Call | None) -> None:
        assert call is not None
        self._methods[call["method"]](**call["arguments"])

    def _agree(self, mine: Call | None) -> Call | None:
        """The call that trainers ask for; None if there is none. A collective."""
        channel = distributed.current().main
        if not int(channel.sum(torch.tensor([int(mine is not None)]))[0]):
            return None
        asked = {rank: call for rank, call in enumerate(channel.gather_json(mine)) if call is not None}
        first: Call = next(iter(asked.values()))
        if any(call != first for call in asked.values()):
            shown = ", ".join(f"{_shown(call)} of rank {rank}" for rank, call in asked.items())
            raise RuntimeError(
                f"Trainers ask for different calls at the same time: {shown}. Expected all trainers to make "
                "these calls, or one of them to make a call before another batch is trained."
            )
        return first


def _shown(call: Call) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
    return f"{call['method']}({arguments})"
