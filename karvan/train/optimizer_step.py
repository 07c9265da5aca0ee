"""One optimizer step: the gradients of some batches averaged, clipped, checked, and applied or skipped.

What is frozen (`Frozen`), which optimizers there are, and their learning rates (`Schedule`) are here, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from karvan.argument_checks import check_integers
from karvan.dense.steps import LocalDense, Outcome, all_finite, largest_magnitude
from karvan.embedding import EmbeddingEngine, TableHandle
from karvan.embedding.admission import ReadOnly
from karvan.embedding.optim.base import SparseOptimizer
from karvan.torch_internals import has_step_hooks
from karvan.train.precision import Precision

# Tables and parameters that a fit does not change.

Patterns = str | Iterable[str]


class Frozen:
    """The tables and parameters of a model that are not trained.

    A pattern is the name of a table ("user", or "tower.emb.user" with the path of its engine), of a parameter
    ("net.0.weight") or of a module ("net", which means all parameters and tables in it), with `*` and
    `?` as in file names. The gradients of what is frozen are dropped.
    """

    def __init__(self, model: nn.Module, patterns: Patterns = ()) -> None:
        single = isinstance(patterns, str) or not isinstance(patterns, Iterable)
        listed: list[Any] = [patterns] if single else list(patterns)
        if wrong := [pattern for pattern in listed if not isinstance(pattern, str)]:
            raise TypeError(
                f"frozen expects names of tables and parameters, got {type(wrong[0]).__name__}: "
                'frozen=["user", "net.*"].'
            )
        tables, parameters = tables_of(model), dict(model.named_parameters())
        names = _names_of(model)
        for pattern in listed:
            if not any(
                _matches(name, pattern) for parameter_names in names.values() for name in parameter_names
            ):
                raise ValueError(
                    f"frozen names '{pattern}', but the model has no such table, parameter or module. Its "
                    f"tables are: {names_text([t.name for t in tables])}. Its parameters are: "
                    f"{names_text(parameters)}."
                )

        def chosen(part: TableHandle | nn.Parameter) -> bool:
            return any(_matches(name, pattern) for name in names[id(part)] for pattern in listed)

        self.tables = [table for table in tables if chosen(table)]
        self.parameters = {name: parameter for name, parameter in parameters.items() if chosen(parameter)}

    def forget(self) -> None:
        """Drop the gradients of what is frozen, which no optimizer uses."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for table in self.tables:
            table.engine_state.take_gradients([table.name])


def tables_of(model: nn.Module) -> list[TableHandle]:
    """The tables of all engines of a model."""
    return [table for engine in engines_of(model) for table in engine.tables()]


def is_read_only(table: TableHandle) -> bool:
    """Whether the table was declared as one that gets no new rows."""
    return table.spec.admit == ReadOnly().native()


def names_text(names: Iterable[str]) -> str:
    """Some names as text: the first ones, and how many more there are."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (", ".join(listed[:8]) or "none") + more


def _names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each table and parameter, by id(); parts of a module that is used twice have two."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for path, module in model.named_modules(remove_duplicate=False):
        for table in module.tables() if isinstance(module, EmbeddingEngine) else ():
            names.setdefault(id(table), []).extend([table.name, f"{path}.{table.name}".lstrip(".")])
    return names


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern is that of the name, or of a module that the name is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


_NONFINITE = ("skip", "raise", "skip_tables", "apply")


@dataclass(frozen=True)
class OptimizerStepSettings:
    """How gradients become steps.

    gradient_accumulation_steps: batches whose mean gradient makes a step. clip_value limits each element of
    the dense gradients, then clip_norm the L2 norm of all of them together; sparse optimizers have their own
    limits. nonfinite: what happens if a gradient has an infinity or a NaN. "skip" skips the step, dense and
    sparse; "raise" does so, too, and then raises a FloatingPointError, except for the overflows that are a
    part of fp16; "skip_tables" skips the step if a dense gradient is not finite, and else the tables of whose
    gradients that is true, as PERSIA does; "apply" does not check. A scaled loss makes "skip" of both.

    With "skip", a GPU checks and skips steps by itself, while the host continues, if the rows and the dense
    parameters are both there, and the dense optimizer is one of torch's with fused=True. "raise" waits for
    the check in every step, unless the precision is fp16.
    """

    gradient_accumulation_steps: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    nonfinite: str = "skip"

    def __post_init__(self) -> None:
        check_integers(gradient_accumulation_steps=self.gradient_accumulation_steps)
        if self.gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps must be at least 1, got {self.gradient_accumulation_steps}."
            )
        if self.nonfinite not in _NONFINITE:
            raise ValueError(f"nonfinite must be one of {', '.join(_NONFINITE)}, got {self.nonfinite!r}.")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0 or None, got {value}.")


@dataclass(eq=False)
class OptimizerStep:
    """Applies gradients by a dense and a sparse optimizer, both or none; either may be missing.

    Without any of them nothing can be trained, which `karvan/train/preflight.py` reports when training
    starts.
    """

    dense: torch.optim.Optimizer | None
    sparse: SparseOptimizer | None
    settings: OptimizerStepSettings
    precision: Precision
    stepping: LocalDense | None = None  # by default in this process
    frozen: Frozen | None = None

    def __post_init__(self) -> None:
        given = {"dense": self.dense, "sparse": self.sparse}
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            name: optimizer for name, optimizer in given.items() if optimizer is not None
        }
        self._stepping = self.stepping or LocalDense(self.dense)
        always, nonfinite = self.precision.always_checks, self.settings.nonfinite
        self._checks = nonfinite != "apply" or always
        # A sparse optimizer skips, and counts, the tables whose gradients are not finite by itself.
        self._checks_rows = self._checks and (nonfinite != "skip_tables" or always)

    def forget(self) -> None:
        """Drop pending gradients."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        if self.frozen is not None and (self.frozen.parameters or self.frozen.tables):
            self.frozen.forget()

    def backward(self, loss: Tensor, divisor: float) -> None:
        """Add the gradients of one of a step's batches, divided by their number or its equivalent."""
        torch.autograd.backward(self.precision.scale(loss if divisor == 1 else loss / divisor))

    def apply(self) -> bool | None:
        """Make the step, unless gradients are not finite; whether it was made, None if servers reject it.

        The gradients are dropped in any case: rows have only those of steps that were taken.
        """
        finite = self.unscale()
        if self._checks:
            finite = self._stepping.agree(finite)
        outcome: Outcome = "not finite"
        if finite:
            self._clip()
            outcome = self._stepping.step()
        if outcome == "accepted" and self.sparse is not None:
            self.sparse.step()
        self.precision.update()
        self.forget()
        return None if outcome == "rejected" else outcome == "accepted"

    def apply_late(self) -> Tensor | None:
        """Make the step unless gradients are not finite, as the device finds; whether, as a tensor there.

        None if the host has to decide: see `apply`. Nothing has changed then. The host continues without the
        answer, so the steps of tables count a step that is skipped; those of the dense optimizer do not.
        """
        raises = self.settings.nonfinite == "raise" and not self.precision.always_checks
        if not self._checks_rows or raises or not self._stepping.skips_on_device:
            return None
        of_rows = [] if self.sparse is None else self.sparse.late_gradients()
        if of_rows is None:
            return None
        gradients = [gradient for gradient in (*self._gradients(), *of_rows) if gradient.numel()]
        if len({gradient.device for gradient in gradients}) != 1 or any(
            gradient.is_sparse for gradient in gradients
        ):
            return None
        largest = largest_magnitude(gradients)
        found_inf = (largest - largest != 0).float()  # an infinity less itself is NaN, which is not 0
        if self.sparse is not None:
            self.sparse.skip_if(found_inf)
        self.precision.unscale_late(self.dense, found_inf)
        self._clip()
        self._stepping.step_unless(found_inf)
        if self.sparse is not None:
            self.sparse.step()
        self.precision.update()
        self.forget()
        return found_inf == 0

    def unscale(self) -> bool:
        """Undo the scale of mixed precision; whether the gradients that were computed are finite."""
        sparse_finite = not self._checks_rows or self.sparse is None or self.sparse.gradients_finite()
        self.precision.unscale(self.dense, sparse_finite)
        return sparse_finite and (not self._checks or all_finite(self._gradients()))

    def stage_rows(self) -> list[str]:
        """Send the gradients of rows to servers that stage them; the tables that have some.

        The steps of the tables are counted when it is certain that the step is made: see `count_tables`.
        """
        if self.sparse is None:
            return []
        before = self.sparse.table_steps()
        self.sparse.step()
        tables = [name for name, step in self.sparse.table_steps().items() if step != before[name]]
        self.sparse.set_table_steps(before)
        return tables

    def count_tables(self, tables: Collection[str]) -> None:
        """A step was made that has gradients for rows of these tables."""
        if self.sparse is not None:
            steps = self.sparse.table_steps()
            self.sparse.set_table_steps({name: step + (name in tables) for name, step in steps.items()})

    def finish(self, applied: bool) -> None:
        """Make a dense step with the gradients that trainers have agreed on, or skip it."""
        if applied:
            self._clip()
            self._stepping.step()
        self.precision.update()
        self.forget()

    def pass_over(self) -> bool:
        """A step without samples: optimizers and schedules advance, as those of other trainers do."""
        self.forget()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return True

    @property
    def tables(self) -> list[TableHandle]:
        """The tables that are updated."""
        return [] if self.sparse is None else self.sparse.tables

    def parameters(self) -> list[Tensor]:
        """The parameters that are updated."""
        groups = [] if self.dense is None else self.dense.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    def _clip(self) -> None:
        if self.settings.clip_value is not None:
            clip_grad_value_(self.parameters(), self.settings.clip_value)
        if self.settings.clip_norm is not None:
            clip_grad_norm_(self.parameters(), self.settings.clip_norm)


DenseOptimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_dense(
    optimizer: DenseOptimizer | None, model: nn.Module, frozen: Frozen
) -> torch.optim.Optimizer | None:
    """The optimizer itself, or the result of a function of the model's parameters that are not frozen."""
    if isinstance(optimizer, SparseOptimizer):
        raise TypeError(f"{type(optimizer).__name__} of kv.optim is for rows: give it as sparse_optimizer.")
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if both := [name for name, parameter in frozen.parameters.items() if id(parameter) in has]:
            raise ValueError(
                f"frozen names {names_text(both)}, but the dense_optimizer has them: make it of the other "
                "parameters, or give a function that makes it: dense_optimizer=torch.optim.Adam."
            )
        return optimizer
    frozen_ids = {id(parameter) for parameter in frozen.parameters.values()}
    trained = (
        [parameter for parameter in model.parameters() if id(parameter) not in frozen_ids]
        if frozen_ids
        else model.parameters()
    )
    if frozen_ids and not trained:
        raise ValueError(
            "frozen names all parameters of the model, so the dense_optimizer has nothing to update: give "
            "none, or name fewer parameters."
        )
    built: Any = optimizer(trained)
    if not isinstance(built, torch.optim.Optimizer):
        raise TypeError(
            "dense_optimizer must be a torch optimizer, or a function that makes one of parameters, "
            f"but it made {type(built).__name__}."
        )
    return built


def fuse_on_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer torch's fused form, which can skip a step on a GPU, if that is left to choose.

    It is the same object afterwards, which the program may know.
    """
    kind: Any = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) or optimizer.state:
        return
    for group in optimizer.param_groups:
        if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
            return
        if group.get("capturable") or not all(p.is_cuda and p.is_floating_point() for p in group["params"]):
            return
    if has_step_hooks(optimizer):  # they would be lost
        return
    defaults, groups = optimizer.defaults, optimizer.param_groups
    for settings in (defaults, *groups):
        settings["fused"] = True
    kind.__init__(optimizer, [dict(group) for group in groups], fused=True)
    optimizer.defaults, optimizer.param_groups = defaults, groups


def make_sparse(
    optimizer: SparseOptimizer | None, model: nn.Module, frozen: Frozen
) -> SparseOptimizer | None:
    """The optimizer, attached to all tables that are not frozen unless it is attached already."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, SparseOptimizer):
        raise TypeError(f"sparse_optimizer must be one of kv.optim, got {type(optimizer).__name__}.")
    if optimizer.attached:
        if both := [table.name for table in frozen.tables if table in optimizer.tables]:
            raise ValueError(
                f"frozen names {names_text(both)}, but the sparse_optimizer is attached to them: attach it "
                "to other tables, or give one that is not attached: "
                "sparse_optimizer=kv.optim.Adagrad(lr=0.05)."
            )
        return optimizer
    if not frozen.tables:
        optimizer.attach(model)
        return optimizer
    trained = [table for table in tables_of(model) if table not in frozen.tables]
    if not trained:
        raise ValueError(
            "frozen names all tables of the model, so the sparse_optimizer has nothing to update: give none, "
            "or name fewer tables."
        )
    optimizer.attach(trained)
    return optimizer


def engines_of(model: nn.Module) -> list[EmbeddingEngine]:
    """The engines in a model, each once."""
    return [module for module in model.modules() if isinstance(module, EmbeddingEngine)]


Maker: TypeAlias = Callable[[Optimizer], LRScheduler]
Given: TypeAlias = LRScheduler | Maker
Schedulers: TypeAlias = Given | Iterable[Given] | Mapping[str, Given] | None

_EXAMPLE = (
    "a function of an optimizer that makes a torch scheduler, such as "
    "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)"
)


class Schedule:
    """All schedulers of a Trainer; they advance after every step that was taken, or after every epoch.

    A function is called with every optimizer, dense and sparse, and makes a scheduler for it. A mapping with
    "dense" and "sparse" has one for each. A scheduler object is used as it is. ReduceLROnPlateau advances
    after every evaluation of a fit instead, by its loss.

    """

    def __init__(self, schedulers: Schedulers, optimizers: Mapping[str, Optimizer], per: str) -> None:
        if per not in ("step", "epoch"):
            raise ValueError(f"schedule_per must be 'step' or 'epoch', got {per!r}.")
        self._per = per
        self._schedulers = list(_make(schedulers, optimizers))
        for scheduler in self._schedulers:
            if not isinstance(scheduler, LRScheduler):
                raise TypeError(f"scheduler expects {_EXAMPLE}, got {_text_of(scheduler)}.")
            if not any(scheduler.optimizer is optimizer for optimizer in optimizers.values()):
                raise ValueError(
                    "scheduler expects schedulers of this Trainer's optimizers, but the "
                    f"{type(scheduler).__name__} changes the learning rates of another optimizer: give it "
                    "a function."
                )

    @property
    def metric(self) -> str | None:
        """The metric of evaluations by which a scheduler decides, if there is one."""
        follows = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers)
        return "loss" if follows else None

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """An evaluation is over: schedulers that wait for one follow its loss."""
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(metrics["loss"])

    def after(self, moment: str) -> None:
        """A "step" was taken, or an "epoch" ended."""
        for scheduler in self._schedulers if moment == self._per else ():
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        states = state["schedulers"]
        if len(states) != len(self._schedulers):
            raise ValueError(
                f"The checkpoint has {len(states)} schedulers, but this Trainer has {len(self._schedulers)}."
            )
        for scheduler, its in zip(self._schedulers, states, strict=True):
            # MultiStepLR has its milestones in a Counter, and a checkpoint has only plain dicts.
            counters = {name for name, value in vars(scheduler).items() if isinstance(value, Counter)}
            scheduler.load_state_dict({k: Counter(v) if k in counters else v for k, v in its.items()})

    def use_initial_rates(self) -> None:
        """Continue from the initial learning rates that the optimizers have now."""
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):  # it has none, and reduces whatever there is
                continue
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]


def _make(schedulers: Schedulers, optimizers: Mapping[str, Optimizer]) -> Iterable[Any]:
    if schedulers is None:
        return []
    if isinstance(schedulers, Mapping):
        if unknown := sorted(set(schedulers) - set(optimizers)):
            raise ValueError(
                f"There is no optimizer for the scheduler of {', '.join(map(repr, unknown))}; "
                f"there are: {', '.join(map(repr, optimizers))}."
            )
        return [_one(its, optimizers[name]) for name, its in schedulers.items()]
    if isinstance(schedulers, LRScheduler):
        return [schedulers]
    if callable(schedulers):
        return [_one(schedulers, optimizer) for optimizer in optimizers.values()]
    if isinstance(schedulers, str) or not isinstance(schedulers, Iterable):
        raise TypeError(f"scheduler expects {_EXAMPLE}, got {_text_of(schedulers)}.")
    listed = list(schedulers)
    if any(isinstance(item, list | tuple) for item in listed):  # which may contain itself
        raise TypeError(f"scheduler expects {_EXAMPLE}, or a list of them, got a list within a list.")
    return [scheduler for item in listed for scheduler in _make(item, optimizers)]


def _one(scheduler: Given, optimizer: Optimizer) -> Any:
    if isinstance(scheduler, LRScheduler):
        return scheduler
    if not callable(scheduler):
        raise TypeError(f"scheduler expects {_EXAMPLE}, got {_text_of(scheduler)}.")
    try:
        return scheduler(optimizer)
    except TypeError as error:
        name = getattr(scheduler, "__name__", type(scheduler).__name__)
        if not isinstance(scheduler, type):
            raise
        raise TypeError(
            f"scheduler expects a function of an optimizer, but {name} needs more: {error}. Give it "
            f"lambda optimizer: {name}(optimizer, …)."
        ) from error


def _text_of(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float) else type(value).__name__
