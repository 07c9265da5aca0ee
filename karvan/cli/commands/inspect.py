"""`karvan inspect`: what a checkpoint holds, and whether it is intact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from karvan.cli.output import (
    DAMAGED,
    JSON_PATH,
    OK,
    CommandError,
    bytes_text,
    console,
    folder_of,
    number_text,
    print_table,
    progress,
    write_json,
)
from karvan.display import ago_text
from karvan.job.checkpoint_url import shown

if TYPE_CHECKING:
    from karvan.checkpoint import Summary


def inspect(
    path: str = Argument(metavar="PATH", help="A checkpoint, or a run's folder: its newest."),
    key: tuple[str, str] | None = Option(None, metavar="TABLE KEY", help="Show one key's row."),
    verify: bool = Option(
        False, "--verify", help="Check every file; for a run's folder, the files of all checkpoints."
    ),
    top: int = Option(5, min=0, help="How many of the hottest keys to show."),
    json_path: str | None = JSON_PATH,
) -> int:
    """Show the tables of a checkpoint, or one key's row.

    A table has rows, bytes, norms and its hottest keys.

    For a run's folder, it also shows which checkpoints are damaged, incomplete or set aside.
    With --verify every file is read and its checksum compared; the exit code is 3 if one is damaged.

    \b
    Examples:
      karvan inspect out/run
      karvan inspect out/run/step-000000001000 --top 20 --json -
      karvan inspect out/run --key user 12345
      karvan inspect out/run --verify
    """
    from karvan import checkpoint
    from karvan.checkpoint.files import is_there

    folder = folder_of(path)
    if not is_there(folder):
        raise CommandError(
            f"{path}: there is no such folder; expected a checkpoint or a run's folder.", DAMAGED
        )
    if verify:
        return _verify(folder, json_path)
    if key is not None:
        return _row(folder, key[0], _number(key[1]), json_path)
    with progress("Reading", ""):
        summary = checkpoint.summary(folder, hottest=top)
    if not write_json(json_path, summary):
        show_summary(summary)
    return OK


def show_summary(summary: Summary) -> None:
    """A checkpoint as tables."""
    out = console()
    metrics = ", ".join(f"{name} {number_text(value)}" for name, value in summary.metrics.items())
    kind = f"delta on {', '.join(map(str, summary.builds_on))}" if summary.builds_on else summary.kind
    out.print(
        f"{shown(summary.path)}: step {summary.step:,}, {kind}, {bytes_text(summary.bytes)}, "
        f"saved {ago_text(summary.created)}",
        markup=False,
    )
    if metrics:
        out.print(f"metrics: {metrics}", markup=False)
    print_table(
        None,
        ["table", "rows", "dim", "dtype", "bytes", "norm", "max norm"],
        [
            [
                table.name,
                f"{table.rows:,}",
                table.dim,
                table.dtype,
                bytes_text(table.bytes),
                number_text(table.mean_norm),
                number_text(table.max_norm),
            ]
            for table in summary.tables
        ],
        right=["rows", "dim", "bytes", "norm", "max norm"],
    )
    for table in summary.tables:
        hottest = ", ".join(f"{hot.key} ({hot.count:,})" for hot in table.hottest)
        used = f"; hottest keys (uses): {hottest}" if hottest else ""
        out.print(f"{table.name}: {table.optimizer or 'no optimizer'}{used}", markup=False)
    out.print(f"dense: {summary.dense_tensors} tensors, {bytes_text(summary.dense_bytes)}")
    if summary.not_whole:
        columns = ["folder", "step", "condition", "problem"]
        rows = [
            [part.path.name, f"{part.step:,}", part.condition, part.problem] for part in summary.not_whole
        ]
        print_table("Incomplete, damaged or set aside", columns, rows, right=["step"])


def _verify(path: Path, json_path: str | None) -> int:
    from karvan import checkpoint
    from karvan.checkpoint.files import bytes_below

    paths: set[Path] = set()
    with progress("Checking", "bytes") as steps:
        steps.expect(bytes_below(path))

        def checked(file: Path, size: int) -> None:
            if file not in paths:  # several deltas build on one full checkpoint
                paths.add(file)
                steps.add(size)

        damaged = checkpoint.verify(path, checked=checked)
    result = {
        "files": len(paths),
        "damaged": [{"path": shown(step.path), "problem": step.problem} for step in damaged],
    }
    if write_json(json_path, result):
        pass
    elif damaged:
        rows = [[shown(step.path), step.problem] for step in damaged]
        print_table(f"Damaged: {len(damaged)}", ["file", "problem"], rows)
    else:
        console().print(f"{shown(path)}: {len(paths)} files, all intact.", markup=False)
    return DAMAGED if damaged else OK


def _row(path: Path, table: str, key: int, json_path: str | None) -> int:
    from karvan import checkpoint

    row = checkpoint.row(path, table, key)
    if row is None:
        raise CommandError(f"{shown(path)}: table '{table}' has no row for key {key}.", DAMAGED)
    if not write_json(json_path, row):
        used = f"used {row.count:,} times, last in step {row.last_step:,}"
        console().print(f"{row.table} {row.key}: {used}", markup=False)
        for name, values in (("vector", row.vector), ("state", row.state)):
            text = " ".join(f"{value:.5g}" for value in values) or "none"
            console().print(f"{name}: {text}", markup=False)
    return OK


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise CommandError(
            f"--key expects a key of 64 bits, decimal or 0x…, got '{text}'. The key of a text is its hash: "
            f"kv.ids.farm({text!r}) or kv.ids.murmur({text!r}), as in the feature."
        ) from None
