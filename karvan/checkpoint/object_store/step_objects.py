"""A checkpoint at a URL: published, replaced, set aside and removed by one object, its manifest.

    run/step-000000000010/manifest.json                 written last, in one request
    run/step-000000000010/save-1f0a93c2/dense.safetensors
    run/step-000000000010/save-1f0a93c2/tables/…

Each save has a folder of its own, which the names in the manifest include. So saving a step again changes
nothing of the one before until the new manifest replaces the old one, at once; then the old files are
removed. Objects that no manifest names were left by a save that failed or was killed: the next save of the
step removes them, and any save those of other steps that are older than a day by the store's clock.

A checkpoint that is set aside keeps its files: its manifest is renamed, to `damaged-manifest.json` or
`abandoned-manifest.json`. Where a request fails without an answer, it is not known whether it was done; the
order of requests is such that a checkpoint with a manifest always has its files.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.format import manifest as manifests
from karvan.checkpoint.format.manifest import NAME, Manifest
from karvan.checkpoint.object_store import objects
from karvan.errors import is_temporary
from karvan.job.checkpoint_url import shown

_log = logging.getLogger(__name__)

ASIDE = {kind: f"{kind}-{NAME}" for kind in ("damaged", "abandoned")}
_DAY = 24 * 3600.0  # older objects without a manifest belong to no save in flight


class UploadFolder:
    """A save of the checkpoint `target`, whose files are written to `path`; removed unless published."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target / f"save-{secrets.token_hex(8)}"
        self._removes = True

    def named(self, manifest: Manifest) -> Manifest:
        """A manifest with the names that files have below `target`."""
        return _with_names(manifest, f"{self.path.name}/")

    def publish(self, data: bytes, check: Callable[[], None]) -> None:
        """Write the manifest, unless `check` raises, and remove what it replaces."""
        check()
        self._removes = False  # from now on there may be a manifest that names these files
        path = self.target / NAME
        try:
            objects.write(path, [[memoryview(data)]])
        except OSError:
            if _content(path) != data:  # otherwise only the answer was lost
                raise
        _tolerate(f"Objects that {shown(path)} does not name", lambda: _remove_others(self.target, data))

    def remove(self) -> None:
        """Remove the files, if they were not published."""
        if self._removes:
            _tolerate(shown(self.path), lambda: objects.remove_below(self.path))


def _with_names(manifest: Manifest, prefix: str) -> Manifest:
    tables = {
        name: replace(
            table,
            parts=[replace(part, name=prefix + part.name) for part in table.parts],
            extras=[extra and replace(extra, name=prefix + extra.name) for extra in table.extras],
        )
        for name, table in manifest.tables.items()
    }
    dense = replace(manifest.dense, name=prefix + manifest.dense.name)
    return replace(manifest, tables=tables, dense=dense)


def _content(path: Path) -> bytes | None:
    """The content of an object; None if there is none, or it cannot be read."""
    try:
        return objects.read(path)
    except OSError:
        return None


def _remove_others(target: Path, data: bytes) -> None:
    """Remove the files of a step that neither its manifest names nor that of one that was set aside."""
    manifest = manifests.parse(target / NAME, data)
    named = {file.name for file in manifest.files}
    names = [item.name for item in objects.listing(target)]
    manifest_names = {NAME, *ASIDE.values()}
    for name in manifest_names & {*names} - {NAME}:
        with suppress(CheckpointError):
            aside = manifests.parse(target / name, objects.read(target / name))
            named |= {file.name for file in aside.files}
    for folder in {name.partition("/")[0] for name in names if name not in manifest_names}:
        inside = [name for name in names if name.startswith(f"{folder}/")]
        if not named.intersection(inside):
            objects.remove_below(target / folder)
        else:
            for name in inside:
                if name not in named:
                    objects.remove(target / name)


def published(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of some steps of a run that have a manifest."""
    present = objects.present([folder / name / NAME for name in names])
    return [path.parent.name for path in present]


def asides(folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """Those of some steps of a run that were set aside, and of which kind."""
    paths = [folder / name / aside for name in names for aside in ASIDE.values()]
    kinds = {aside: kind for kind, aside in ASIDE.items()}
    return [(path.parent.name, kinds[path.name]) for path in objects.present(paths)]


def set_aside(steps: Sequence[Path], kind: str) -> dict[Path, Path]:
    """Rename the manifests of checkpoints; returns their new names, and warns of a failure."""
    folders: dict[Path, Path] = {}

    def rename() -> None:
        for step in steps:
            data = _content(step / NAME)
            if data is not None:  # otherwise another process has removed it
                objects.write(step / ASIDE[kind], [[memoryview(data)]])
            objects.remove(step / NAME)
            folders[step] = step / ASIDE[kind]

    try:
        rename()
    except OSError as error:
        missing = ", ".join(step.name for step in steps if step not in folders)
        _log.warning("%s could not be set aside in %s: %s", missing, shown(steps[0].parent), error)
    return folders


def remove_steps(folder: Path, doomed: Callable[[], Mapping[Path, Path | None]]) -> None:
    """Remove the checkpoints that `doomed` returns, each with the one it builds on, in this order.

    The base of one that cannot be removed stays, too.
    """
    stays: set[Path | None] = set()
    for step, base in doomed().items():
        if step in stays or not _tolerate(shown(step), partial(_remove_step, step)):
            stays.add(base)
    _tolerate(f"What killed saves have left in {shown(folder)}", lambda: _remove_leftovers(folder))


def _remove_step(step: Path) -> None:
    objects.remove(step / NAME)
    if not asides(step.parent, [step.name]):
        objects.remove_below(step)


def _remove_leftovers(folder: Path) -> None:
    """Remove old objects of steps without any manifest."""
    by_step: dict[str, list[objects.Listed]] = {}
    for item in objects.listing(folder):
        step, _, rest = item.name.partition("/")
        if step.startswith("step-") and rest:
            by_step.setdefault(step, []).append(item)
    newest = max((item.written for items in by_step.values() for item in items), default=0.0)
    manifest_names = {NAME, *ASIDE.values()}
    for step, items in by_step.items():
        has_manifest = any(item.name.partition("/")[2] in manifest_names for item in items)
        if not has_manifest and max(item.written for item in items) < newest - _DAY:
            objects.remove_below(folder / step)


def try_writing(folder: Path) -> None:
    """Write and remove a small object; raise a CheckpointError if that is not possible."""
    trial = folder / f".karvan-trial-{secrets.token_hex(8)}"
    try:
        objects.write(trial, [[memoryview(bytes(64))]])
        objects.remove(trial)
    except OSError as error:
        raise CheckpointError(
            folder,
            f"checkpoints cannot be written here: {error.strerror or error}. Expected a URL where this "
            "process may write, list and delete objects.",
            temporary=is_temporary(error),
        ) from None  # the text says everything


def _tolerate(what: str, work: Callable[[], None]) -> bool:
    """Do work that harms no checkpoint if it fails; whether it succeeded."""
    try:
        work()
    except (OSError, CheckpointError) as error:
        _log.warning("%s could not be removed; the next save tries again: %s", what, error)
        return False
    return True
