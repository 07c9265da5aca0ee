"""What all sparse optimizers share: binding to tables, schedulers, pending gradients, clipping and bounds."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from karvan.argument_checks import check_kinds
from karvan.embedding.engine import EmbeddingEngine
from karvan.embedding.table_handle import EngineState, TableHandle
from karvan.store import Rule
from karvan.store.types import LateGradients
from karvan.torch_internals import is_step_observed

Group: TypeAlias = dict[str, Any]
Target: TypeAlias = EmbeddingEngine | nn.Module | TableHandle
Targets: TypeAlias = Target | Iterable[Target | Group]


class SparseOptimizer(torch.optim.Optimizer):
    """The base class of optimizers of rows: a torch optimizer with tables as its parameters.

    Learning-rate schedulers, `param_groups` and `state_dict` work as for any torch optimizer. Accumulators
    and moments are stored in the rows. A subclass implements `rule` and `initial_state`, and where needed
    `check_group` and `state_kind`; the page "Add a sparse optimizer" shows how.

    Args:
        params: An engine, a module with engines in it, or param groups: `[{"params": engine.table("user"),
            "lr": 0.1}, {"params": engine.table("item")}]`. Without it, call `attach` later.
        defaults: The settings of param groups that do not have them.

    Raises:
        ValueError: A setting is out of range.

    Example:
        >>> class Halving(kv.optim.SparseOptimizer):
        ...     def __init__(self, params=None, lr=0.1):
        ...         super().__init__(params, {"lr": lr})
        ...     def rule(self, group, step):
        ...         return kv.optim.Rule("sgd", weight_decay=0.5)
        ...     def initial_state(self, group, dim):
        ...         return []
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> Halving(engine).table_steps()
        {'user': 0}
    """

    def __init__(self, params: Targets | None, defaults: dict[str, Any]) -> None:
        _check(defaults)
        self.check_group(defaults)
        self.defaults = {**defaults, **{name: None for name in _POSITIVE if name not in defaults}}
        self._tables: dict[EngineState, list[TableHandle]] = {}
        if params is not None:
            self.attach(params)

    def attach(self, params: Targets) -> None:
        """Bind an optimizer that was created without tables.

        Args:
            params: As of the constructor.

        Raises:
            ValueError: It has tables already.
        """
        if self._tables:
            raise ValueError(f"This {type(self).__name__} is attached to tables already.")
        groups = _groups(params)
        handles: dict[Tensor, TableHandle] = {}
        for group in groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            check_kinds(type(self).__name__, type(self).__init__, settings)
            _check(settings)
            owned = _owned(group["params"])
            handles |= {handle.anchor: handle for handle in owned}
            group["params"] = [handle.anchor for handle in owned]
        super().__init__(groups, self.defaults)
        for group in self.param_groups:
            self.check_group(group)
        for group in self.param_groups:
            for anchor in group["params"]:
                handle = handles[anchor]
                handle.set_optimizer(self.state_kind(group), self.initial_state(group, handle.dim))
        for handle in handles.values():
            self._tables.setdefault(handle.engine_state, []).append(handle)

    def __repr__(self) -> str:
        if self.attached:
            return super().__repr__()
        settings = ", ".join(
            f"{name}={value!r}" for name, value in self.defaults.items() if value is not None
        )
        return f"{type(self).__name__}({settings})"

    def __getattr__(self, name: str) -> Any:
        text = f"'{type(self).__name__}' object has no attribute '{name}'"
        if name in ("param_groups", "state"):
            text += ", because it is attached to no tables yet: call attach(engine)"
        raise AttributeError(f"{text}.")

    def __getstate__(self) -> dict[str, Any]:
        """Its settings; a copy is to be attached to other tables."""
        if self.attached:
            raise TypeError(
                f"A {type(self).__name__} that is attached to tables can be neither copied nor pickled: "
                "copy it before, or load its state_dict() into another one."
            )
        return dict(vars(self))

    @property
    def tables(self) -> list[TableHandle]:
        """The tables that this optimizer updates."""
        return [handle for handles in self._tables.values() for handle in handles]

    @property
    def attached(self) -> bool:
        """Whether this optimizer has tables."""
        return bool(self._tables)

    def table_steps(self) -> dict[str, int]:
        """Return how many steps each table has made.

        Returns:
            The steps by table.
        """
        return {handle.name: int(self.state[handle.anchor].get("step", 0)) for handle in self.tables}

    def set_table_steps(self, steps: Mapping[str, int]) -> None:
        """Set what `table_steps` returns.

        Args:
            steps: The steps by table.
        """
        for handle in self.tables:
            if steps[handle.name] or "step" in self.state[handle.anchor]:
                self.state[handle.anchor]["step"] = steps[handle.name]

    def gradients_finite(self) -> bool:
        """Check whether all gradients that wait for these tables are finite.

        They stay in the engines.

        Returns:
            Whether they are.
        """
        for engine, handles in self._tables.items():
            for _, gradients in engine.gradients(handle.name for handle in handles):
                # for all tables at once: on a GPU it waits
                flags = getattr(gradients, "check_finite", gradients.finite)()
                if not all(flags[handle.slot] for handle in _that_train(engine, handles)):
                    return False
        return True

    def late_gradients(self) -> list[Tensor] | None:
        """Return the gradients that wait for these tables, where a device can skip their update by itself.

        They may be scaled, if the loss is.

        Returns:
            The gradients; None if the host has to decide, as for tables in memory.
        """
        tensors: list[Tensor] = []
        for engine, handles in self._tables.items():
            slots = {handle.slot for handle in _that_train(engine, handles)}
            for _, gradients in engine.gradients(handle.name for handle in handles):
                late = gradients.tensors(slots) if isinstance(gradients, LateGradients) else None
                if late is None:
                    return None
                tensors += late
        return tensors

    def skip_if(self, found_inf: Tensor) -> None:
        """Let the next `step` update rows only if a number on the device is 0.

        It is called after `late_gradients`. Ranks that share the tables agree: it is then 1 if it was on any
        of them.

        Args:
            found_inf: The number, a tensor of one float.
        """
        for engine, handles in self._tables.items():
            for number, (_, gradients) in enumerate(engine.gradients(handle.name for handle in handles)):
                assert isinstance(gradients, LateGradients)
                if not number:
                    gradients.agree(found_inf)
                gradients.skip_if(found_inf)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients that the engines hold, and release them.

        Args:
            closure: Computes the loss again, as of any torch optimizer.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: It has no tables.
        """
        if not self._tables:
            raise RuntimeError(
                f"This {type(self).__name__} is attached to no tables: call attach(engine) first."
            )
        return _observed_step(self, closure) if is_step_observed(self) else self._step(closure)

    # Makes torch not wrap `step` in its hooks and profiler marks, which take longer than a small update.
    # `_observed_step` has them, for when somebody uses them.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {anchor: group for group in self.param_groups for anchor in group["params"]}
        by_step: dict[tuple[int, int], Rule] = {}  # tables of a group at the same step share a rule
        for engine, handles in self._tables.items():
            gradients = engine.take_gradients(handle.name for handle in handles)
            if not gradients:
                continue
            rules: dict[str, Rule] = {}
            steps: dict[str, int] = {}
            # Of each table, over some backward passes, of which there is mostly one.
            touched = list(map(any, zip(*(g.touched() for _, g in gradients), strict=True)))
            finite = list(map(all, zip(*(g.finite() for _, g in gradients), strict=True)))
            for handle in _that_train(engine, handles):
                slot, anchor = handle.slot, handle.anchor
                if not touched[slot]:
                    continue
                group, state = groups[anchor], self.state[anchor]
                step = state.get("step", 0) + 1
                if finite[slot]:  # a table whose update will be skipped has not made a step
                    state["step"] = step
                key = (id(group), step)
                if key not in by_step:
                    rule = by_step[key] = self.rule(group, step)
                    rule.lr = self.rate(group, step)
                    rule.clip_value = group["clip_value"] or 0.0
                    rule.clip_norm = group["clip_norm"] or 0.0
                    rule.bound = group["weight_bound"] or 0.0
                rules[handle.name], steps[handle.name] = by_step[key], step
            engine.store.update(engine.program, gradients, rules, steps)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of these tables that have not been applied.

        Args:
            set_to_none: As of any torch optimizer; it changes nothing.
        """
        for engine, handles in self._tables.items():
            engine.take_gradients(handle.name for handle in handles)

    def rate(self, group: Group, step: int) -> float:
        """Return the learning rate of a table's step.

        Args:
            group: The settings.
            step: The step of the table, from 1.

        Returns:
            The learning rate.
        """
        return float(group["lr"])

    def check_group(self, group: Group) -> None:
        """Raise if settings that are valid one by one cannot work together.

        Args:
            group: The settings.

        Raises:
            ValueError: They cannot.
        """

    def state_kind(self, group: Group) -> str:
        """Return the kind of a row's state.

        Rows keep their state if the next optimizer has the same kind.

        Args:
            group: The settings.

        Returns:
            The name of the kind.
        """
        return type(self).__name__

    @abstractmethod
    def rule(self, group: Group, step: int) -> Rule:
        """Return the native rule for one step.

        The learning rate, clipping and bound are set afterwards.

        Args:
            group: The settings.
            step: The step of the table, from 1.

        Returns:
            The rule.
        """

    @abstractmethod
    def initial_state(self, group: Group, dim: int) -> list[float]:
        """Return the optimizer state of a new row.

        Args:
            group: The settings.
            dim: The number of elements of a vector.

        Returns:
            As many numbers as the rule needs.
        """


def _that_train(engine: EngineState, handles: Sequence[TableHandle]) -> Sequence[TableHandle]:
    """The tables that some feature trains; those whose features all read alone have no slot in lookups."""
    count = len(engine.program.tables)
    return handles if count == len(engine.tables) else [handle for handle in handles if handle.slot < count]


_observed_step = torch.optim.Optimizer.profile_hook_step(SparseOptimizer._step)


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the arguments of a constructor, which are its `locals()` at the beginning."""
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


_POSITIVE = ("clip_value", "clip_norm", "weight_bound")
_NOT_NEGATIVE = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "beta", "l1", "l2")
# What settings must be: their names, the condition, and how errors say it.
_RANGES: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
    (_POSITIVE, lambda value: value is None or value > 0, "must be above 0 or None"),
    (_NOT_NEGATIVE, lambda value: 0 <= value < math.inf, "must be finite and not negative"),
    (("momentum", "decay"), lambda value: 0 <= value <= 1, "must lie between 0 and 1"),
    (("betas",), lambda betas: all(0 <= beta < 1 for beta in betas), "must lie in [0, 1)"),
)


def _check(settings: Mapping[str, Any]) -> None:
    for names, holds, text in _RANGES:
        for name in names:
            if name in settings and not holds(settings[name]):
                raise ValueError(f"{name} {text}, got {settings[name]}.")


def _groups(params: Targets) -> list[Group]:
    listed = [params] if isinstance(params, nn.Module | TableHandle) else list(params)
    groups = [dict(item) for item in listed if isinstance(item, dict)]
    if not groups or len(groups) < len(listed):
        return [{"params": listed}]
    for group in groups:
        if isinstance(group["params"], nn.Module | TableHandle):
            group["params"] = [group["params"]]
    return groups


def _owned(targets: Iterable[Any]) -> list[TableHandle]:
    handles: list[TableHandle] = []
    for target in targets:
        if isinstance(target, TableHandle):
            handles.append(target)
        elif isinstance(target, nn.Module):
            engines = [m for m in target.modules() if isinstance(m, EmbeddingEngine)]
            if not engines:
                raise ValueError(f"There is no EmbeddingEngine in this {type(target).__name__}.")
            handles += [handle for engine in engines for handle in engine.tables()]
        else:
            raise TypeError(
                f"Expected an EmbeddingEngine, a module that holds one, or a table, "
                f"got {type(target).__name__}; tensors belong to a torch.optim optimizer."
            )
    return handles
