"""`karvan import-checkpoint`: a checkpoint of RecIS or PERSIA, as a checkpoint of Karvan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from karvan.cli.output import (
    JSON_PATH,
    OK,
    CommandError,
    console,
    folder_of,
    no_url,
    print_table,
    progress,
    write_json,
)
from karvan.job.checkpoint_url import shown

if TYPE_CHECKING:
    from karvan.checkpoint import ImportReport

_SYSTEMS = ("recis", "persia")
_OPTIMIZERS = ("adam", "adagrad", "adagrad_by_row")


def import_checkpoint(
    source: Path = Argument(
        metavar="SOURCE",
        help="The checkpoint's folder; of RecIS also its output_dir: its newest.",
        callback=no_url,
    ),
    target: str = Argument(metavar="TARGET", help="The checkpoint to write: a folder or a URL that is new."),
    system: str = Option(..., "--from", metavar="SYSTEM", help="What has saved it: recis or persia."),
    embedding_config: Path | None = Option(
        None,
        metavar="FILE",
        help="persia: the job's embedding_config.yml, which says how ids are divided into tables.",
        callback=no_url,
    ),
    optimizer: str | None = Option(
        None,
        metavar="NAME",
        help="persia: adam, adagrad or adagrad_by_row; by default found by the size of rows.",
    ),
    betas: tuple[float, float] | None = Option(
        None,
        metavar="BETA1 BETA2",
        help="recis: the betas of the sparse Adam, to find its number of steps; by default 0.9 0.999.",
    ),
    optimizer_state: bool = Option(
        True,
        "--optimizer-state/--no-optimizer-state",
        help="Import the optimizer state of rows; otherwise it starts from its initial values.",
    ),
    dense_prefix: str | None = Option(
        None,
        metavar="PREFIX",
        help="A prefix for the names of dense tensors; by default none for recis, 'net.' for persia.",
    ),
    step: int | None = Option(
        None,
        min=0,
        max=2**32 - 1,
        help="The checkpoint's step; by default the step of RecIS, and 0 for PERSIA.",
    ),
    json_path: str | None = JSON_PATH,
) -> int:
    """Convert a checkpoint of RecIS or PERSIA.

    It has rows, optimizer state and dense tensors.

    A new run starts from it by a warm start: train.warm_start of a config, kv.checkpoint.warm_start,
    model_bank of a RecIS program, ctx.load_checkpoint of a PERSIA program. Rows are read in pieces, so that
    tables may be larger than memory; the disk of TARGET needs room for twice the checkpoint. TARGET appears
    when all of it is written. docs/migrating.md says what is imported.

    \b
    Examples:
      karvan import-checkpoint --from recis recis_output/ckpt_1000 out/imported
      karvan import-checkpoint --from persia dump out/imported
      karvan inspect out/imported
    """
    from karvan.checkpoint import import_persia, import_recis

    if system not in _SYSTEMS:
        raise CommandError(f"Expected --from {' | '.join(_SYSTEMS)}, got '{system}'.")
    options = {
        "--embedding-config": (embedding_config, "persia"),
        "--optimizer": (optimizer, "persia"),
        "--betas": (betas, "recis"),
    }
    for option, (value, owner) in options.items():
        if value is not None and owner != system:
            raise CommandError(f"{option} is for --from {owner}, got --from {system}.")
    if optimizer is not None and optimizer not in _OPTIMIZERS:
        raise CommandError(f"--optimizer expects {', '.join(_OPTIMIZERS)}, got '{optimizer}'.")
    if betas is not None and not all(0 < beta < 1 for beta in betas):
        raise CommandError(f"--betas expects two numbers between 0 and 1, got {betas[0]:g} {betas[1]:g}.")
    path = folder_of(target)
    with progress("Importing", "bytes") as steps:

        def show(done: int, total: int) -> None:
            steps.expect(total)
            steps.add(done)

        if system == "recis":
            report = import_recis(
                *(source, path),
                betas=betas or (0.9, 0.999),
                dense_prefix=dense_prefix or "",
                step=step,
                optimizer_state=optimizer_state,
                progress=show,
            )
        elif embedding_config is None:
            raise CommandError(
                "--from persia expects --embedding-config FILE, the embedding_config.yml of the job: ids in "
                "a checkpoint of PERSIA have no meaning without it."
            )
        else:
            report = import_persia(
                *(source, path, embedding_config),
                optimizer=optimizer,
                dense_prefix="net." if dense_prefix is None else dense_prefix,
                step=step or 0,
                optimizer_state=optimizer_state,
                progress=show,
            )
    if not write_json(json_path, report):
        _show(report)
    return OK


def _show(report: ImportReport) -> None:
    out = console()
    out.print(f"{shown(report.path)}: imported from {report.system}, step {report.step:,}", markup=False)
    print_table(
        None,
        ["table", "rows", "dim", "dtype", "optimizer state"],
        [
            [table.name, f"{table.rows:,}", table.dim, table.dtype, table.optimizer or "not imported"]
            for table in report.tables
        ],
        right=["rows", "dim"],
    )
    out.print(f"dense: {len(report.dense)} tensors")
    for note in report.notes:
        console(stderr=True).print(f"note: {note}", markup=False)
