"""`RunHistory`: the reports of a run, read from its folder or from a log file.

| path | what is read |
|---|---|
| a run folder | its `history.jsonl` |
| a checkpoint in it | the same |
| a file | what `JSONLinesLogger` or `CSVLogger` wrote |

Damaged lines, such as a last one that a crash cut off, are skipped. This module imports neither torch nor
numpy, so that the command line starts quickly.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "history.jsonl"
KINDS = ("train", "eval")


class HistoryError(Exception):
    """A run without a history that can be read."""


@dataclass(frozen=True)
class Entry:
    """One report. `values` are finite numbers, None where a number was NaN or infinite."""

    kind: str
    step: int
    epoch: int
    samples: float | None
    time: float | None
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class RunHistory:
    """All reports of a run, in the order of steps."""

    name: str
    path: Path
    entries: Sequence[Entry]

    def of(self, kind: str) -> list[Entry]:
        """The reports of one kind."""
        return [entry for entry in self.entries if entry.kind == kind]


def read_runs(paths: Iterable[Path]) -> list[RunHistory]:
    """The runs at these paths, each once, named by the shortest ends of their paths that differ."""
    by_path = {path.resolve(): path for path in paths}
    names = short_names(list(by_path))
    return [
        RunHistory(name, path, read_entries(path)) for name, path in zip(names, by_path.values(), strict=True)
    ]


def read_entries(path: Path) -> list[Entry]:
    """The reports at a path; raises a HistoryError that says what is missing."""
    file = _file_of(path)
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        raise HistoryError(f"{file} cannot be read: {error.strerror}.") from error
    entries = _entries(_json_rows(text) if text.lstrip().startswith("{") else _csv_rows(text))
    if not entries:
        raise HistoryError(
            f"{file} has no reports: expected lines with kind, step and numbers, as a history, a "
            "JSONLinesLogger or a CSVLogger has. A run reports every log_every steps."
        )
    return entries


def run_of(name: str, path: Path, rows: Iterable[dict[str, Any]]) -> RunHistory:
    """The run with these reports; rows that are no reports are skipped."""
    return RunHistory(name, path, _entries(rows))


def _entries(rows: Iterable[dict[str, Any]]) -> list[Entry]:
    entries = [entry for row in rows if (entry := _entry(row)) is not None]
    return sorted(entries, key=lambda entry: entry.step)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ from each other."""
    longest = max((len(path.parts) for path in paths), default=1)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _file_of(path: Path) -> Path:
    if not path.exists():
        raise HistoryError(f"{path}: there is no such run folder or log file.")
    if not path.is_dir():
        return path
    for folder in (path, path.parent if (path / "manifest.json").exists() else path):
        if (folder / FILE).exists():
            return folder / FILE
    inside = sorted(file.parent for file in path.glob(f"*/{FILE}"))
    hint = f" These folders inside have one: {', '.join(map(str, inside[:5]))}." if inside else ""
    raise HistoryError(
        f"{path} has no {FILE}, which a Trainer with checkpoints writes into its run folder.{hint}"
    )


def _json_rows(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _csv_rows(text: str) -> Iterator[dict[str, Any]]:
    complete = text[: text.rfind("\n") + 1].replace("\0", "")
    for row in csv.DictReader(complete.splitlines()):
        yield {name: value for name, value in row.items() if name and value}


def _entry(row: dict[str, Any]) -> Entry | None:
    step, epoch = _number(row.get("step")), _number(row.get("epoch"))
    if row.get("kind") not in KINDS or step is None:
        return None
    others = {name: value for name, value in row.items() if name not in ("kind", "step", "epoch")}
    samples, time = _number(others.pop("samples", None)), _number(others.pop("time", None))
    values = {name: _number(value) for name, value in others.items()}
    return Entry(row["kind"], int(step), int(epoch or 0), samples, time, values)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
