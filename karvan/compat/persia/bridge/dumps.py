"""`Dumps`: checkpoints of a context, and of its rows alone; see `JointCalls` for several trainers."""

from __future__ import annotations

from typing import Any

from karvan import distributed
from karvan.checkpoint import Checkpoints, Pending, find
from karvan.compat.persia.bridge.embedded_model import EmbeddedModel
from karvan.compat.persia.bridge.global_config import read_global_config
from karvan.compat.persia.bridge.joint_calls import JointCalls
from karvan.train import TrainContext


class Dumps:
    """Saves and loads a model with its rows, and the state of its training if a `TrainContext` trains it.

    Contexts that evaluate the rows of another one share its dumps. Each method is called on all trainers.
    """

    def __init__(self, context: Any, embedded: EmbeddedModel) -> None:
        self._context = context
        self._embedded = embedded
        self._pending: Pending | None = None  # a dump in flight
        self._folders: dict[str, Checkpoints] = {}
        self._calls = JointCalls(
            {
                "dump_checkpoint": self._dump_training,
                "dump_model": self._dump_model,
                "dump_embedding": self._dump_rows,
                "load_checkpoint": self._load_training,
                "load_model": self._load_model,
                "load_embedding": self._load_rows,
                "clear_embeddings": self._clear,
            }
        )

    def make(self, method: str, **arguments: Any) -> None:
        """Call one of these methods on all trainers."""
        if isinstance(self._context, TrainContext) and self._context.in_step:
            raise RuntimeError(f"{method} was called in the middle of a step: expected it after backward.")
        self._calls.make(method, **arguments)

    def join(self) -> None:
        """Make the calls that other trainers ask for."""
        self._calls.join()

    def wait(self) -> None:
        """Wait until what was dumped is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _dump_training(self, folder: str, blocking: bool) -> None:
        self.wait()
        self._pending = self._context.save(self.checkpoints(folder), block=blocking)

    def _dump_model(self, folder: str, blocking: bool) -> None:
        self._save(folder, {"model": self._embedded.state_dict()}, blocking)

    def _dump_rows(self, folder: str, blocking: bool) -> None:
        self._save(folder, {}, blocking)

    def _save(self, folder: str, state: dict[str, Any], blocking: bool) -> None:
        self.wait()
        step = self._embedded.embeddings.step
        self._pending = self.checkpoints(folder).save(step, state, self._embedded)
        if blocking:
            self.wait()

    def checkpoints(self, folder: str) -> Checkpoints:
        """Those in a folder, as the global configuration says how to write them."""
        if folder not in self._folders:
            writers = read_global_config().common_config.checkpointing_config.num_workers
            self._folders[folder] = Checkpoints(folder, writers=writers)
        return self._folders[folder]

    def _load_training(self, folder: str) -> None:
        self._context.load(folder)

    def _load_model(self, folder: str) -> None:
        self._embedded.load_state_dict(find(folder).load(self._embedded)["model"])

    def _load_rows(self, folder: str) -> None:
        find(folder).load(self._embedded)

    def _clear(self) -> None:
        if isinstance(self._context, TrainContext):
            self._context.clear()
            return
        for table in self._embedded.embeddings.tables():
            table.clear()
        distributed.current().main.barrier()
