"""The built-in loader: reads the `data` of the job, for as many epochs as trainers ask for.

| key of `data` | meaning | default |
|---|---|---|
| files, or train | paths, folders, globs, URLs | required |
| batch_size | | 4096 |
| columns | names, or mappings with `name`, `kind` (fixed, varlen, raw) and its arguments | all |
| others of `kv.data.read` | format, options, shuffle, seed, drop_remainder, workers, prefetch, … | |

Keys that begin with `eval` are for trainers.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from karvan.cluster.embedding_worker.client import workers_from_environment
from karvan.cluster.loader.epoch_source import serve
from karvan.cluster.loader.id_forwarding import ANSWER_WITHIN
from karvan.cluster.loader.service import LoaderService
from karvan.cluster.loader.statistics import LoaderStatistics
from karvan.cluster.loader.task_service import TaskReadingService
from karvan.cluster.role_process import RoleSettings, generations_of
from karvan.data import Loader, SharedData, read
from karvan.data.columns.declarations import column_from_settings
from karvan.data.read import is_leased
from karvan.exit_codes import DAMAGED, TEMPORARY, code_of, text_of
from karvan.job.environment import JobEnvironment
from karvan.wire import Service

_log = logging.getLogger("karvan.cluster")
_OWN = ("data", "rank", "world_size", "epochs", "steps_per_epoch", "transform", "filesystem", "device")


def make(settings: RoleSettings) -> Service:
    """The loader of a process; see `karvan/cluster/role_process.py`."""
    source = read_share(_data(), settings.index, settings.count)
    source.identity()  # reads a little of each file, so that an unreadable one is an error at once
    statistics = LoaderStatistics.of((), source.column_kinds())
    if isinstance(source, SharedData):
        reading = TaskReadingService(settings.index, workers=workers_from_environment(ANSWER_WITHIN))
        reading.offer(source, statistics)
        return reading
    service = LoaderService(
        settings.index,
        settings.count,
        generations=generations_of(settings),
        workers=workers_from_environment(),
    )

    def run() -> None:
        while not service.closed:
            try:
                serve(service, source, statistics)
            except Exception as error:
                if code_of(error) in (DAMAGED, TEMPORARY):
                    _log.error("%s could not continue reading: %s", service.name, text_of(error))
                else:
                    _log.exception("%s could not continue reading", service.name)
                service.fail(error)

    threading.Thread(target=run, name="karvan-reading", daemon=True).start()
    return service


def read_share(data: Mapping[str, Any], index: int, count: int) -> Loader | SharedData:
    """What loader `index` of `count` reads; a ValueError says what is wrong with `data`.

    In a job with `sharding: dynamic` every loader can read all of it.
    """
    options = {name: value for name, value in data.items() if not name.startswith("eval")}
    file_keys = [name for name in ("files", "train") if name in options]
    if len(file_keys) != 1:
        raise ValueError(f"data of a job with loaders expects files, or train, got: {', '.join(data)}.")
    files = options.pop(file_keys[0])
    batch_size = options.pop("batch_size", 4096)
    allowed = [name for name in inspect.signature(read).parameters if name not in _OWN]
    for name in options:
        if name in ("features", "transform"):
            raise ValueError(
                f"data of a job has no '{name}': features are a part of the model, or of a loader's own "
                "program, kv.LoaderContext().read(…, transform=engine); see docs/loaders.md."
            )
        if name not in allowed:
            raise ValueError(f"data expects keys of files, {', '.join(allowed)}, got '{name}'.")
    if options.get("columns") is not None:
        options["columns"] = [column_from_settings(each) for each in options["columns"]]
    try:
        if is_leased():
            return read(files, batch_size, **options)
        return read(files, batch_size, rank=index, world_size=count, **options)
    except TypeError as error:
        raise ValueError(f"data: {error}") from error


def _data() -> Mapping[str, Any]:
    text = JobEnvironment.read().data
    try:
        data = json.loads(text) if text else None
    except ValueError as error:
        raise ValueError(f"KARVAN_DATA expects JSON, got {text[:100]!r}.") from error
    if not isinstance(data, dict):
        raise ValueError("A loader without a program expects `data` of the job (KARVAN_DATA), got none.")
    return data
