"""`TrainContext`: training in your own loop, with the parts of the Trainer's steps.

| in the loop | what happens |
|---|---|
| `for batch in ctx.loader(data)` | batches are taken ahead, in groups that make a step; one epoch |
| `ctx.forward(batch)` | placed, autocast, by DistributedDataParallel where several ranks train |
| `ctx.backward(loss)` | scaled and weighted; the last pass of a step makes it, dense and sparse, or neither |

Between a forward and its backward, the context remembers the pass: how much it weighs, and whether it is a
step's last, which DistributedDataParallel must know before the forward.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from inspect import GEN_CLOSED, getgeneratorstate
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from karvan.dense.factory import make_stepping
from karvan.embedding.optim.base import SparseOptimizer
from karvan.exit_codes import note_training
from karvan.label_columns import required_values
from karvan.train.checks.common_mistakes import check_data
from karvan.train.checks.frozen import Frozen, Patterns
from karvan.train.checks.preflight import check_trained
from karvan.train.contexts.context_saves import ContextSaves
from karvan.train.contexts.context_state import ContextState
from karvan.train.contexts.eval_context import EvalContext, running
from karvan.train.contexts.model_outputs import Labels, full, labels_of, names_of
from karvan.train.contexts.step_passes import ContextLoader, ContextStep, Pass
from karvan.train.feed.batch_source import FedBatch
from karvan.train.feed.epoch import Epoch
from karvan.train.feed.feed import same
from karvan.train.losses import nothing_of, total
from karvan.train.state import dataset
from karvan.train.state.randomness import random_state
from karvan.train.step.accumulation import Accumulation
from karvan.train.step.data_parallel import make_parallel
from karvan.train.step.device_placement import make_placement
from karvan.train.step.nonfinite import Skips, nonfinite_text
from karvan.train.step.optimizer_step import (
    DenseOptimizer,
    OptimizerStep,
    OptimizerStepSettings,
    engines_of,
    make_dense,
    make_sparse,
)
from karvan.train.types import Losses, Positioned, rows_of

_in_use: WeakSet[nn.Module] = WeakSet()  # models that are in a context


class TrainContext(ContextState):
    """Trains a model in a loop of one's own.

    ```
    with kv.TrainContext(model, sparse_optimizer=kv.optim.Adagrad(lr=0.05), dense_optimizer=…) as ctx:
        for batch in ctx.loader(data):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_of(output, labels))
    ```

    dense_optimizer, sparse_optimizer, frozen, accumulate, clip_norm, clip_value, device, ahead: see
    `Trainer`. The optimizers are attributes, for schedulers.
    mixed_precision: False, "bf16", "fp16" (on CUDA), or True for fp16 on CUDA and bf16 on the CPU. Outputs
    are given as float32, so that a loss of them has full precision.
    label: the column, or columns, that `forward` gives beside the output; None for none.
    nonfinite: "skip" leaves out a step, dense and sparse, if a gradient is not finite; "raise" does so, too,
    and then raises a FloatingPointError, except for the overflows that are a part of fp16.
    tolerate_failed_saves: how many saves in a row the disk or the servers may refuse; each is a warning, and
    one more is raised. If the last save before the context is left has failed, leaving it repeats it for
    save_retry_seconds, or raises the error if something was trained since.

    After `kv.connect` in several processes all of them run the same loop, each with its share of the data,
    and go through it equally often: one whose data has ended is given batches of no rows until all have
    ended. Their labels are empty, and `backward` does not look at their loss. In mode async each makes steps
    of its own on parameters that servers have; leaving the context gives the model what all have made.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparse_optimizer: SparseOptimizer | None = None,
        dense_optimizer: DenseOptimizer | None = None,
        frozen: Patterns = (),
        mixed_precision: bool | str = False,
        label: Labels = "label",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: str = "skip",
        device: torch.device | str | None = None,
        ahead: int = 2,
        tolerate_failed_saves: int = 3,
        save_retry_seconds: float = 60.0,
    ) -> None:
        if nonfinite not in ("skip", "raise"):
            raise ValueError(f'nonfinite must be "skip" or "raise", got {nonfinite!r}.')
        run = self._running = running(model, mixed_precision, device, ahead)
        self.frozen = Frozen(model, frozen)
        here, dense = run.connection, make_dense(dense_optimizer, model, self.frozen)
        if here.settings.dense.rejects:
            raise ValueError(
                "With grads_to_wait or tolerance servers may reject a step, which a loop of one's own cannot "
                "compute again: expected mode async without them, or a kv.Trainer."
            )
        stepping = make_stepping(model, dense, engines_of(model), here, run.ahead)
        update = OptimizerStep(
            dense,
            make_sparse(sparse_optimizer, model, self.frozen),
            OptimizerStepSettings(accumulate, clip_norm, clip_value),
            run.precision,
            stepping,
            self.frozen,
        )
        check_trained(model, update, self.frozen, here)
        saves = ContextSaves(tolerate_failed_saves, save_retry_seconds)
        super().__init__(run.model, here, run.precision, update, stepping, run.transforms, saves)
        self.device = run.device
        self._label = label
        self._raises = nonfinite == "raise"
        self._passes = Accumulation(accumulate, None, here.rank, here.world, here.joint_steps)
        self._parallel = make_parallel(model, self.connection)
        self._moving = make_placement(self.model, self.device, same, [])
        for engine in engines_of(model):
            engine.hold_ahead(2 * run.ahead + accumulate + 2)
        self._skips = Skips(run.precision.always_checks, here.rank == 0)
        self._entered = False
        self._data: Any = None  # of the loader that was used last
        self._batches: ref[Generator[Any, None, None]] | None = None  # an iteration over it, held by the loop
        self._turn: Pass | None = None  # the batch that the loader gave, until its forward
        self._pass: Pass | None = None  # the forward that waits for its backward
        self._step: ContextStep | None = None  # one of which some batches, but not all, have been trained

    def __enter__(self) -> Self:
        if self.model in _in_use:
            raise RuntimeError("This model is in a TrainContext already: expected one at a time.")
        check_trained(self.model, self.update, self.frozen, self.connection)
        _in_use.add(self.model)
        self._entered = self._saves.training = True
        self.update.forget()
        self.dense.begin()
        self.model.train()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        _in_use.discard(self.model)
        try:
            self._leave(error)
        finally:
            self._saves.release()

    def _leave(self, error: BaseException | None) -> None:
        if (batches := self._iteration()) is not None:
            if error is not None and self._course is not None:
                self._course.abandon(error)
            batches.close()
        self._turn = self._pass = self._step = None
        self.update.forget()
        if error is None:
            self.dense.take()
            self._saves.finish(self.step)
            if self._passes.together:  # so that all ranks come to the same
                self._skips.end()

    def loader(self, data: Iterable[Any], *, data_name: str | None = None) -> ContextLoader:
        """The batches of data, taken and prepared ahead; every iteration is an epoch.

        After `load`, the first one goes on where the checkpoint was saved, if it is of the same data; see
        `load`. One that is left early moves data that has a position to behind the last step, and the next
        one goes on there. data_name: see `Trainer.fit`.
        """
        self._require("loader")
        check_data("loader", data)
        return ContextLoader(lambda: self._iterate(data, data_name))

    def _iterate(self, data: Iterable[Any], name: str | None) -> Iterator[Any]:
        self._require("A loader")
        if self._in_loop():
            raise RuntimeError(
                "Another loader of this context has not come to its end: expected one at a time."
            )
        batches = self._epoch(data, name)
        self._batches = ref(batches)
        return batches

    def _epoch(self, data: Iterable[Any], name: str | None) -> Generator[Any, None, None]:
        course = self._course = self._course_of(data, name)
        trained = True
        try:
            required = required_values(data, names_of(self._label))
            with required, closing(course.groups()) as groups:
                for group in groups:
                    step = ContextStep(group, *self._passes.weights(group), course)
                    trained = False
                    for place, fed in enumerate(group):
                        self._running.placement.receive(fed.batch)
                        self._turn = Pass(step, place)
                        yield fed.batch
                    trained = step.done == len(group)
                    if step.done and not trained:
                        raise _incomplete(step)
            course.end_epoch()
        finally:
            self._turn = None
            if self._step is not None:
                self._step = None
                self.update.forget()
            if not trained:
                course.move_back()

    def _course_of(self, data: Iterable[Any], name: str | None) -> Epoch:
        self.transforms.use(data)
        self.transforms.match_loaders()
        self.transforms.require_fitted(self.model)
        goes_on = data is self._data and isinstance(data, Positioned)
        if self._saved is None and goes_on and self._course is not None:
            return self._course
        name, self._data_name = self._data_name if name is None else name, None
        if self._loaded is not None:
            if self._is_other(self._loaded, data, name, self._drop_unfinished):
                self._begin_data()
        elif data is not self._data:
            self._change_data(dataset.identify(data, name, self.connection))
        if self._saved is None:
            self.counts.batches = 0
        run = self._running
        self.transforms.require_equal(run.connection.main, self.model)
        made = Epoch(data, run.connection, run.placement, self._passes, self.counts, run.ahead)
        self._data = data
        if self._saved is not None:
            made.load(self._saved, random_state(), self._drop_unfinished)
            self._saved = self._loaded = None
        return made

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The output for a batch, and its labels.

        The batch is the loader's, or made of it, or any other; several ranks then bring one each, which count
        as their rows do.
        """
        self._require("forward")
        if self._pass is not None:
            raise RuntimeError(
                "forward was called twice: expected backward(loss) in between. Outputs that are not trained "
                "on are those of ctx.eval()."
            )
        if not self.model.training:
            raise RuntimeError("forward trains, but the model is in eval mode: expected train mode.")
        made, batch = self._pass_of(batch)
        if not made.place:
            self.dense.fresh()
        run = self._running
        with (
            self._parallel.passing(made.last),
            run.precision.context(),
            run.placement.forward(),
            run.precision.forward(),
        ):
            made.output = self._parallel.forward(batch)
        self._pass, self._turn = made, None
        return full(made.output), labels_of(batch, self._label, self.device)

    def _pass_of(self, batch: Any) -> tuple[Pass, Any]:
        if self._turn is not None and batch is self._turn.batch:
            return self._turn, batch
        moved = self._moving.place(batch)
        self._moving.receive(moved)
        rows = rows_of(moved)
        if self._turn is not None and rows == rows_of(self._turn.batch):
            return self._turn, moved
        if self._passes.accumulate > 1:
            raise RuntimeError(
                f"accumulate={self._passes.accumulate} is for batches of ctx.loader, which knows those of a "
                "step, got another one."
            )
        channel = self.connection.main
        every = rows if channel.world == 1 else int(channel.sum(torch.tensor([rows]))[0])
        group = [FedBatch(moved, None, rows, every)]
        return Pass(ContextStep(group, *self._passes.weights(group)), 0), moved

    def backward(self, loss: Losses) -> bool:
        """Go backward from a loss, a mean over the batch, and make the step if it is complete.

        Gives whether a step was made: not if it was left out, nor in the middle of one (`accumulate`).
        Several losses by name are summed.
        """
        self._require("backward")
        made = self._pass
        if made is None:
            raise RuntimeError(
                "backward was called without a forward: expected output, labels = ctx.forward(batch) before."
            )
        whole = total(loss) if made.weight else nothing_of(made.output)
        if not whole.requires_grad:
            raise ValueError(
                "The loss depends on nothing that is trained: expected one that is computed from the output "
                "of forward, without detach, item or torch.no_grad."
            )
        self._pass = None
        step = made.step
        with self._parallel.passing(made.last), self.precision.context():
            begin = self._parallel.begin(made.output, whole)
            self.update.backward(begin, self._passes.divisor(made.weight, step.weights, step.whole))
        step.done += 1
        if not made.last:
            self._step = step
            return False
        if step.done < len(step.group):
            raise _incomplete(step)
        self._step = None
        learns = self._passes.together or any(step.weights)
        taken = bool(self.update.apply() if learns else self.update.pass_over())
        self._count(step)
        if taken:
            self._skips.take()
        else:
            self._skip(step, whole)
        return taken

    def _count(self, step: ContextStep) -> None:
        if step.course is not None:
            step.course.trained(step.group, step.course.samples(step.group))
        else:
            note_training()
            self.counts.step += 1
            self.counts.samples += sum(fed.all_rows for fed in step.group)

    def _skip(self, step: ContextStep, loss: Tensor) -> None:
        self.counts.skipped += 1
        what = "a gradient" if bool(torch.isfinite(loss.detach())) else "the loss"
        batches = [fed.batch for fed in step.group]
        if self._raises and not self.precision.always_checks:  # with fp16, one now and then is too large
            raise FloatingPointError(
                f"ContextStep {self.step} was skipped: {what} is not finite.{nonfinite_text(batches)}"
            )
        self._skips.skip(self.step, batches, what)

    def eval(self) -> EvalContext:
        """A context that evaluates the model as it is now, and changes nothing of training.

        All ranks ask for one together, as in mode async they have to settle on a model.
        """
        self._require("eval")
        self.dense.settle()
        return EvalContext.of(self._running, self._label)

    def _iteration(self) -> Generator[Any, None, None] | None:
        batches = None if self._batches is None else self._batches()
        return None if batches is None or getgeneratorstate(batches) == GEN_CLOSED else batches

    def _in_loop(self) -> bool:
        return self._iteration() is not None

    def _in_step(self) -> bool:
        return self._pass is not None or self._step is not None

    def _require(self, method: str) -> None:
        if not self._entered:
            raise RuntimeError(
                f"{method} was called outside of the context: expected it inside of "
                "`with kv.TrainContext(…) as ctx:`."
            )


def _incomplete(step: ContextStep) -> RuntimeError:
    return RuntimeError(
        f"Of a step's {len(step.group)} batches {step.done} were trained: expected forward and backward for "
        "each of them."
    )
