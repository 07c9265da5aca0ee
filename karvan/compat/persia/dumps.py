"""`Dumps`: checkpoints of a context, and of its rows alone, which one of several trainers may ask for."""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from karvan import distributed
from karvan.checkpoint import CheckpointError, Checkpoints, Pending, find
from karvan.checkpoint.atomic_folder import try_writing
from karvan.checkpoint.files import upload
from karvan.compat.persia.config import read_global_config
from karvan.compat.persia.embedding import EmbeddedModel
from karvan.files import replace_file
from karvan.job.checkpoint_url import address_of, local_path
from karvan.train import TrainContext

Call = dict[str, Any]  # the name of a method, and its arguments


def _shown(call: Call) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
    return f"{call['method']}({arguments})"


_CALLS = ("dump_checkpoint", "dump_embedding")
_PURE = {"os.environ.get", "os.getenv", "os.path.join", "os.path.abspath", "os.fspath", "str", "Path"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_PLAIN = (
    *(ast.Constant, ast.Name, ast.Load, ast.Attribute, ast.Subscript, ast.Call, ast.keyword),
    *(ast.BinOp, ast.Add, ast.Div, ast.JoinedStr, ast.FormattedValue),
)


class Dumps:
    """Saves and loads a model with its rows, and the state of its training if a `TrainContext` trains it.

    If a trainer calls `make`, all trainers call the method of that name. Contexts that evaluate the rows of
    another one share its dumps.
    """

    def __init__(self, context: Any, embedded: EmbeddedModel) -> None:
        self._context = context
        self._embedded = embedded
        self._pending: Pending | None = None  # a dump in flight
        self._folders: dict[str, Checkpoints] = {}

    def make(self, method: str, **arguments: Any) -> None:
        """Have all trainers call `_method`, this one included; arguments are JSON values."""
        if isinstance(self._context, TrainContext) and self._context.in_step:
            raise RuntimeError(f"{method} was called in the middle of a step: expected it after backward.")
        call = {"method": method, "arguments": arguments}
        agreed = call if distributed.current().main.world_size == 1 else self._agree(call)
        assert agreed is not None
        self._make(agreed)

    def join(self) -> None:
        """Make the calls that other trainers ask for; all trainers come here equally often."""
        channel = distributed.current().main
        while channel.world_size > 1 and (call := self._agree(None)) is not None:
            self._make(call)

    def _make(self, call: Call) -> None:
        getattr(self, f"_{call['method']}")(**call["arguments"])

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

    def wait(self) -> None:
        """Wait until what was dumped is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def check_targets(self) -> None:
        """Raise before training if servers may not save where the program dumps, as far as that is known."""
        connection = distributed.current()
        if connection.servers is None or connection.rank != 0:
            return
        for folder in dump_targets():
            path = local_path(folder)
            try_writing(path)
            try:
                connection.servers.check_folder(address_of(path))
            except ValueError as error:
                raise CheckpointError(path, f"the program dumps there, but {error}") from None

    def _dump_checkpoint(self, folder: str, blocking: bool, script: str | None) -> None:
        self.wait()
        self._write_script(folder, script)
        self._pending = self._context.save(self.checkpoints(folder), block=blocking)

    def _dump_model(self, folder: str, blocking: bool, script: str | None) -> None:
        self._write_script(folder, script)
        self._save(folder, {"model": self._embedded.state_dict()}, blocking)

    def _dump_embedding(self, folder: str, blocking: bool) -> None:
        self._save(folder, {}, blocking)

    def _write_script(self, folder: str, name: str | None) -> None:
        """Write the net as TorchScript beside the checkpoints; all ranks make it, and raise its error."""
        if name is not None:
            content = content_of(self._embedded.net, is_jit=True)
            if distributed.current().main.rank == 0:
                write_file(folder, name, content)

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

    def _load_checkpoint(self, folder: str) -> None:
        self._context.load(folder)

    def _load_embedding(self, folder: str) -> None:
        find(folder).load(self._embedded)

    def _load_model(self, folder: str) -> None:
        self._embedded.load_state_dict(find(folder).load(self._embedded)["model"])

    def _clear_embeddings(self) -> None:
        if isinstance(self._context, TrainContext):
            self._context.clear()
            return
        for table in self._embedded.embeddings.tables():
            table.clear()
        distributed.current().main.barrier()


def content_of(instance: nn.Module | torch.optim.Optimizer, is_jit: bool = False) -> bytes:
    """The file of a state_dict, or that of a module as TorchScript."""
    content = BytesIO()
    if is_jit:
        torch.jit.save(torch.jit.script(instance), content)
    else:
        torch.save(instance.state_dict(), content)
    return content.getvalue()


def write_file(folder: str | os.PathLike[str], name: str, content: bytes) -> None:
    """Write a file into a folder, or to a URL; a reader sees the former one or the whole new one."""
    path = local_path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    upload(path)


def dump_targets() -> Iterator[str | os.PathLike[str]]:
    """The folders to which the program's own calls dump, as far as they are known before it trains.

    Their arguments are texts, variables of the environment, names that are set once, and paths made of these.
    """
    main = sys.modules["__main__"]
    try:
        tree = ast.parse(Path(getattr(main, "__file__", None) or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield from _targets(tree, vars(main), {}, Counter())


def _targets(
    scope: ast.AST, names: dict[str, Any], expressions: dict[str, ast.expr], stored: Counter[str]
) -> Iterator[str | os.PathLike[str]]:
    """Those of a module or a function, and of the functions in it.

    names: values that are known by now. expressions: what names are set to. stored: how often they are.
    """
    nodes = list(_within(scope))
    mine = Counter(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    mine.update(node.arg for node in nodes if isinstance(node, ast.arg) for _ in range(2))  # any value
    if isinstance(scope, _FUNCTIONS):
        names = {name: value for name, value in names.items() if name not in mine}
    stored = Counter({**stored, **mine})
    expressions = {name: value for name, value in expressions.items() if name not in mine}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            expressions[node.targets[0].id] = node.value
    for call in nodes:
        if isinstance(call, _FUNCTIONS):
            yield from _targets(call, names, expressions, stored)
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _CALLS:
            named = [keyword.value for keyword in call.keywords if keyword.arg == "dst_dir"]
            for argument in [*call.args[:1], *named][:1]:
                folder = _value(argument, names, expressions, stored)
                if isinstance(folder, str | os.PathLike) and str(folder):
                    yield folder


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those inside of the functions that it defines."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _FUNCTIONS):
            yield from _within(child)


def _value(
    node: ast.expr, names: dict[str, Any], expressions: dict[str, ast.expr], stored: Counter[str]
) -> Any:
    """What an expression gives; None if that is not known, or if it does more than name a path."""
    local: dict[str, Any] = {}
    for item in ast.walk(node):
        if not isinstance(item, _PLAIN) or (
            isinstance(item, ast.Call) and ast.unparse(item.func).removeprefix("pathlib.") not in _PURE
        ):
            return None
        if isinstance(item, ast.Name) and stored[item.id] > 1:
            return None
        if isinstance(item, ast.Name) and item.id not in names and item.id in expressions:
            others = {name: value for name, value in expressions.items() if name != item.id}
            local[item.id] = _value(expressions[item.id], names, others, stored)
    try:
        return eval(compile(ast.Expression(node), "dump", "eval"), {**names, **local})
    except Exception:  # of a name that is not known yet, or None in place of a text
        return None
