"""The engine's part of a `state_dict()`: its step, its tables, and optionally their rows.

Rows outgrow a `state_dict()`, so only `engine.state_dict(rows=True)` includes them; checkpoints have them. A
state without rows says which rows it lacks, and to which content they belong. Loading it into an engine that
does not have them is an error; otherwise the model would use the vectors of another one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from karvan.embedding.table_handle import EngineState, TableHandle, find_table
from karvan.store import Rows, SharedStore

_log = logging.getLogger("karvan.embedding")

Handles: TypeAlias = Mapping[str, TableHandle]

MOST_BYTES = 1 << 30  # of all tables of an engine, in a state_dict


def describe(engine: EngineState, handles: Handles) -> dict[str, Any]:
    """The step and the tables, without rows; the same on every rank, and without calls to servers."""
    whole = _is_whole(engine)
    return {
        "step": engine.step,
        "content": engine.content.id if whole else None,  # ranks would have to agree on one
        "tables": {
            table.name: {"dim": table.dim, "rows": table.rows if whole else None}
            for table in handles.values()
        },
    }


def describe_with_rows(engine: EngineState, handles: Handles) -> dict[str, Any]:
    """The result of `describe`, with all rows, their optimizer state, and counters of admission filters."""
    if not _is_whole(engine):
        raise ValueError(
            "state_dict(rows=True) expects tables that are in this process, but their rows are divided "
            "between ranks or servers: save them with kv.Checkpoints."
        )
    size = sum(table.bytes for table in handles.values())
    if size > MOST_BYTES:
        raise ValueError(
            f"state_dict(rows=True) expects tables of at most {MOST_BYTES / 2**30:.0f} GiB, got "
            f"{size / 2**30:.1f} GiB: save them with kv.Checkpoints."
        )
    state = describe(engine, handles)
    for table in handles.values():
        entry, rows = state["tables"][table.name], table.snapshot()
        entry["optimizer"] = table.optimizer
        # Not all readers of tensors support unsigned types.
        entry["content"] = {
            name: torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint32 else array.copy())
            for name, array in rows._asdict().items()
        }
        extra = engine.store.table(table.name).extra()
        entry["extra"] = {name: torch.from_numpy(array) for name, array in extra.items()}
    return state


def restore(engine: EngineState, handles: Handles, state: Mapping[str, Any]) -> None:
    """Restore a state of `describe` or `describe_with_rows`; rows in it replace all rows of the engine."""
    tables: Mapping[str, Any] = state["tables"]
    content = {name: entry for name, entry in tables.items() if "content" in entry}
    for name, entry in content.items():
        _check(find_table(handles, name), entry)
    for name, entry in content.items():
        _fill(find_table(handles, name), entry)
    if content or not _keeps_rows(engine, handles, state["step"], state.get("content"), tables):
        engine.step = state["step"]
        learned = content or _expected(handles, state["step"], tables)
        engine.content.belong_to(state.get("content") if learned else None)


def _keeps_rows(
    engine: EngineState, handles: Handles, step: int, content: str | None, tables: Mapping[str, Any]
) -> bool:
    """Whether the engine's rows, and with them its step, are kept: a state without rows is of another step.

    Raises if the rows that belong to the state are not in the engine.
    """
    expected = _expected(handles, step, tables)
    if not engine.filled:
        _require_rows(engine, expected)
    if engine.content.replaced and content != engine.content.id:
        return False
    other = content is not None and _is_whole(engine) and content != engine.content.id
    if not expected and (other or content is None):  # the state of a model that has learned nothing yet
        return engine.step > 0
    if other:
        raise ValueError(
            "This state_dict has no rows, and the engine's rows come from another model or another run. "
            f"The saved parameters were not trained with these vectors. {_advice(expected)}"
        )
    if content is None and _is_whole(engine):  # a state of ranks
        return False
    if engine.step in (0, step):
        return False
    _log.warning(
        "load_state_dict restored the dense parameters of step %d, but the rows are still from step %d, "
        "because state_dict() does not contain them. Tables: %s. To restore both, load a checkpoint "
        "(kv.checkpoint.find(folder).load(model)), or include small tables with "
        "engine.state_dict(rows=True).",
        step,
        engine.step,
        ", ".join(table.name for table in handles.values()),
    )
    return True


def _expected(handles: Handles, step: int, tables: Mapping[str, Any]) -> dict[str, int | None]:
    """The tables that had rows when the state was saved, with how many if that is known."""
    return {
        name: entry["rows"]
        for name, entry in tables.items()
        if name in handles and (step > 0 if entry["rows"] is None else entry["rows"])
    }


def _require_rows(engine: EngineState, expected: Mapping[str, int | None]) -> None:
    """Raise if tables that had rows have none."""
    if not expected:
        return
    sizes = engine.store.sizes(engine.tables)
    lacking = {name: rows for name, rows in expected.items() if not sizes[name]}
    if not lacking or (not _is_whole(engine) and any(sizes.values())):  # a rank may own no row of a table
        return
    raise ValueError(
        "This state_dict has no rows, and the engine has none either, so all vectors would be new "
        f"instead of the saved ones. {_advice(lacking)}"
    )


def _advice(tables: Mapping[str, int | None]) -> str:
    counts = [name if rows is None else f"{name} ({rows:,} rows)" for name, rows in tables.items()]
    return (
        f"Tables: {', '.join(counts)}. state_dict() has the dense parameters only. "
        "Save the complete model with kv.Checkpoints or kv.checkpoint.save and load it with "
        "kv.checkpoint.find(folder).load(model), or include small tables with "
        "engine.state_dict(rows=True). To load the dense parameters alone, remove the entries that end in "
        "'_extra_state' and pass strict=False."
    )


def _check(table: TableHandle, entry: Mapping[str, Any]) -> None:
    if entry["dim"] != table.dim:
        raise ValueError(f"Table '{table.name}' has dim {table.dim}, but the state_dict has {entry['dim']}.")
    store = table.store
    if isinstance(store, SharedStore) and store.share[1] > 1:
        raise ValueError(
            f"Table '{table.name}' is on servers that several trainers use: load its rows from a checkpoint, "
            "with kv.Checkpoints."
        )
    expected = (table.optimizer, len(table.initial_state))
    got = (entry["optimizer"], entry["content"]["state"].shape[1])
    if None not in (expected[0], got[0]) and expected != got:
        raise ValueError(
            f"Table '{table.name}' has {expected[1]} floats of {expected[0]} state for each row, but the "
            f"state_dict has {got[1]} of {got[0]}: attach the same optimizer, or load before one is attached."
        )


def _fill(table: TableHandle, entry: Mapping[str, Any]) -> None:
    arrays = {name: tensor.cpu().numpy() for name, tensor in entry["content"].items()}
    if table.optimizer is None or entry["optimizer"] is None:
        initial = np.array(table.initial_state, np.float32)
        arrays["state"] = np.ascontiguousarray(np.tile(initial, (len(arrays["keys"]), 1)))
    for name in ("counts", "last_steps"):
        arrays[name] = arrays[name].astype(np.uint32)
    table.clear()
    table.load(Rows(**arrays))
    if entry["extra"]:
        extra = {name: tensor.cpu().numpy() for name, tensor in entry["extra"].items()}
        table.store.table(table.name).load_extra(extra)


def _is_whole(engine: EngineState) -> bool:
    return engine.store.share == (0, 1) and not isinstance(engine.store, SharedStore)
