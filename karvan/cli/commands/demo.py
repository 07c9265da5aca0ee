"""`karvan demo`: trains on a synthetic click log, whose best possible AUC is known; or writes such a log."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from karvan.cli.output import (
    FAILED,
    JSON_PATH,
    OK,
    STOPPED,
    CommandError,
    bytes_text,
    console,
    no_url,
    print_table,
    write_json,
)

if TYPE_CHECKING:
    import karvan as kv
    from karvan.data.synthetic import ClickLog

_ROWS, _ROWS_OF_DATA = 8_000_000, 500_000
_FOLDER = Path("out/demo")
_BATCH = 4096
_CATEGORIES = 20  # the category of an item is its id modulo this
_CROSS = "user_x_item_x_hour"
_LEAST, _CAPACITY = 2, 500_000  # uses before a key gets a row, and rows at most, of its table
_IDS = ["user", "item", "category", "device", "hour", "liked", _CROSS]


@dataclass(frozen=True)
class Clicks:
    """A click log on disk."""

    train: list[str]
    held_out: list[str]
    best_auc: float  # of the hidden probabilities themselves on the held-out samples
    bytes: int


def demo(
    rows: int | None = Option(
        None,
        min=10_000,
        help=f"Samples in the click log; by default {_ROWS:,}, with --data {_ROWS_OF_DATA:,}.",
    ),
    folder: Path | None = Option(
        None,
        callback=no_url,
        help=f"Where the run is saved; by default {_FOLDER}, where the next demo replaces it.",
    ),
    data: Path | None = Option(
        None,
        metavar="FOLDER",
        callback=no_url,
        help="Write a click log to FOLDER/train and FOLDER/eval, and train nothing.",
    ),
    quiet: bool = Option(False, "--quiet", "-q", help="No progress."),
    json_path: str | None = JSON_PATH,
) -> int:
    """Train on a click log with millions of ids, and compare with the best AUC.

    The clicks are drawn from hidden probabilities, so the best possible AUC is known. A DLRM is trained on
    the log once. One of its tables has a key for every user, item and hour: a row is created when a key is
    seen twice, and the rows that were used least recently are evicted. The model is saved, loaded into a new
    model and evaluated again; the exit code is 1 if its AUC differs. On two cores this takes about a minute.

    \b
    Examples:
      karvan demo
      karvan demo --rows 200_000 --json -
      karvan demo --data out/clicks
    """
    begin = time.perf_counter()
    if data is not None:
        return _write_data(data, rows or _ROWS_OF_DATA, json_path)
    root = folder or _FOLDER
    if folder is None:
        shutil.rmtree(root, ignore_errors=True)
    elif (root / "run").exists():
        raise CommandError(f"--folder expects a folder without a run, but there is {root / 'run'}.")
    with _one_torch_thread():
        result = run_demo(root, rows or _ROWS, quiet=quiet or json_path == "-", shown=json_path != "-")
    result["seconds"] = time.perf_counter() - begin
    if not write_json(json_path, result):
        _show(result)
    return OK if result["reloaded_auc"] == result["auc"] else FAILED


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The nets are too small to gain from a second one, and on a busy machine waiting for it is slow."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_data(folder: Path, rows: int, json_path: str | None) -> int:
    """Write the log that `karvan train --example` reads."""
    from karvan.data.synthetic import ClickLog

    for name in ("train", "eval"):
        if (folder / name).exists():
            raise CommandError(f"--data expects a folder without a log, but there is {folder / name}.")
    log = ClickLog(seed=3, users=1_000, items=200, categories=_CATEGORIES)
    clicks = write_clicks(folder, log, rows)
    result = {"samples": rows, "bytes": clicks.bytes, "best_auc": clicks.best_auc, "folder": str(folder)}
    if not write_json(json_path, result):
        columns = ", ".join(log.schema.names[1:])
        print(
            f"Wrote {rows:,} samples, {bytes_text(clicks.bytes)}, to {folder}/train and {folder}/eval.\n"
            f"label is the click; columns: {columns}.\n"
            f"The best possible AUC on {folder}/eval is {clicks.best_auc:.4f}.\n"
        )
        paths = "" if folder == Path("out/clicks") else f" --set {_paths(folder)}"
        _show_next(
            {
                "karvan train --example > my.yaml": "a config to start from",
                f"karvan train my.yaml{paths}": "train; saves to out/run",
                "karvan plot out/run": "loss and AUC as charts",
            }
        )
    return OK


def _paths(folder: Path) -> str:
    """The settings of a config that reads another folder."""
    return " --set ".join(shlex.quote(f"data.{name}={folder}/{name}/*.parquet") for name in ("train", "eval"))


def write_clicks(folder: Path, log: ClickLog, rows: int) -> Clicks:
    """Write a log, and compute the AUC of its hidden probabilities on the held-out samples."""
    import pyarrow.parquet
    import torch

    from karvan.metrics import AUC

    held_out = min(rows // 10, 200_000)
    train = log.write(folder / "train", rows - held_out, files=8).paths
    records = log.table(rows - held_out, held_out)
    (folder / "eval").mkdir(parents=True)
    path = str(folder / "eval" / "part-00000.parquet")
    pyarrow.parquet.write_table(records, path)
    best = AUC(exact=True)
    labels = torch.from_numpy(records.column("label").to_numpy().copy())
    best.add(torch.from_numpy(log.probabilities(rows - held_out, held_out)), labels)
    size = sum(os.path.getsize(file) for file in (*train, path))
    return Clicks(train, [path], best.compute(), size)


def run_demo(folder: Path, rows: int, *, quiet: bool = False, shown: bool = True) -> dict[str, Any]:
    """Run the demo; returns the AUCs, and the numbers of the tables."""
    import karvan as kv

    def say(text: str) -> None:
        if shown:
            console(stderr=True).print(text)

    say(f"Writing a click log of {rows:,} samples")
    log = kv.data.synthetic.ClickLog(seed=3, users=10_000, items=1_000, categories=_CATEGORIES, history=5)
    try:
        clicks = write_clicks(folder / "clicks", log, rows)
        say(f"Training a DLRM; the best possible AUC is {clicks.best_auc:.4f}")
        steps = -(-(rows - min(rows // 10, 200_000)) // _BATCH)
        trainer = _make_trainer(steps, folder / "run", quiet=quiet)
        held_out = _read(clicks.held_out)
        result = trainer.fit(
            _read(clicks.train, shuffle=200_000), eval_data=held_out, eval_every=-(-steps // 4)
        )
        if result.stopped is not None:
            raise CommandError(
                f"The demo was stopped after step {result.step} ({result.stopped}).",
                STOPPED.get(result.stopped, FAILED),
            )
        assert result.checkpoint is not None
        say("Loading the checkpoint into a new model")
        fresh = _make_trainer(steps, None, quiet=True)
        saved = kv.checkpoint.find(result.checkpoint)
        fresh.model.load_state_dict(saved.load(fresh.model)["model"])
        reloaded = fresh.evaluate(held_out)
    finally:
        shutil.rmtree(folder / "clicks", ignore_errors=True)
    tables = {table.name: table.stats() for table in trainer.model.embeddings.tables()}  # type: ignore[operator,union-attr]
    names = ("rejected", "inserted", "evicted", "rows", "bytes")
    return {
        "samples": rows,
        "steps": result.step,
        "train_seconds": result.seconds,
        "samples_per_second": result.samples / result.seconds,
        "best_auc": clicks.best_auc,
        "auc": result.evaluation["auc"],
        "reloaded_auc": reloaded["auc"],
        "tables": {table: {name: stats[name] for name in names} for table, stats in tables.items()},
        "checkpoint": str(result.checkpoint),
        "checkpoint_bytes": kv.checkpoint.summary(result.checkpoint, hottest=0).bytes,
        "folder": str(folder),
    }


def _read(paths: list[str], shuffle: int = 0) -> kv.data.Loader | kv.data.SharedData:
    """The log's batches: numbers as logarithms, the history as the categories of its items."""
    import karvan as kv

    features = kv.FeatureEngine(
        [
            kv.Feature("price").log1p(),
            kv.Feature("recency").log1p(),
            kv.Feature("liked").select("history").mod(_CATEGORIES),
            kv.Feature(_CROSS).cross("user", "item", "hour"),
        ]
    )
    return kv.data.read(paths, _BATCH, shuffle=shuffle, seed=1, transform=features)


def _make_trainer(steps: int, folder: Path | None, *, quiet: bool) -> kv.Trainer:
    """A DLRM, whose `liked` is the mean of the rows of the categories in the history."""
    import torch

    import karvan as kv

    torch.manual_seed(0)
    dim = 16
    usual = kv.Table(dim, combiner="mean", init=kv.init.Uniform(-(dim**-0.5), dim**-0.5))
    liked = kv.Table(dim, combiner="mean", init=usual.init, name="category")
    cross = kv.Table(
        dim,
        combiner="mean",
        init=kv.init.Constant(0.0),
        admit=kv.admission.MinCount(_LEAST),
        evict=kv.eviction.LRU(capacity=_CAPACITY),
    )
    return kv.Trainer(
        kv.models.DLRM(
            ["price", "recency"],
            _IDS,
            dim=dim,
            bottom=(64,),
            top=(128, 64),
            table=dict.fromkeys(_IDS, usual) | {"liked": liked, _CROSS: cross},
        ),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        sparse_optimizer=kv.optim.AdamW(lr=0.02, weight_decay=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps),
        metrics={"auc": kv.metrics.AUC()},
        checkpoints=folder,
        progress="none" if quiet else "auto",
    )


def _show(result: dict[str, Any]) -> None:
    """What the tables did, how good the model is, and what to try next."""
    tables = result["tables"]
    total = {name: sum(table[name] for table in tables.values()) for name in ("rows", "bytes", "inserted")}
    print_table(
        "Tables",
        ["table", "refused", "admitted", "evicted", "rows", "memory"],
        [
            [
                name,
                *(f"{table[kind]:,}" for kind in ("rejected", "inserted", "evicted", "rows")),
                bytes_text(table["bytes"]),
            ]
            for name, table in tables.items()
        ],
        right=["refused", "admitted", "evicted", "rows", "memory"],
    )
    print(
        f"{_CROSS} refuses the first use of a key: MinCount({_LEAST}).\n"
        f"It has at most {_CAPACITY:,} rows and evicts the least recently used: LRU.\n"
    )
    gap = result["best_auc"] - result["auc"]
    same = "the same AUC" if result["reloaded_auc"] == result["auc"] else f"AUC {result['reloaded_auc']:.4f}"
    lines = {
        "AUC": f"{result['auc']:.4f}, the best possible is {result['best_auc']:.4f} (gap {gap:.4f})",
        "Speed": f"{result['samples_per_second']:,.0f} samples/s; {result['samples']:,} samples in "
        f"{result['train_seconds']:.0f} s, {result['seconds']:.0f} s with the log",
        "Tables": f"{total['rows']:,} rows, {bytes_text(total['bytes'])}",
        "Saved": f"{bytes_text(result['checkpoint_bytes'])} in {result['folder']}/run; reloaded: {same}",
    }
    for name, text in lines.items():
        console().print(f"[bold]{name:8}[/bold]{text}")
    print()
    run = shlex.quote(f"{result['folder']}/run")
    _show_next(
        {
            f"karvan plot {run}": "loss, AUC and table sizes as charts",
            f"karvan inspect {run}": "what the checkpoint holds",
            "karvan demo --data out/clicks": "write a log to train on yourself",
            "karvan train --example > my.yaml": "and a config that trains on it",
            "karvan train my.yaml": "train; saves to out/run",
        }
    )


def _show_next(commands: dict[str, str]) -> None:
    """Commands to try, each with what it does."""
    width = max(map(len, commands))
    console().print("[bold]Next[/bold]")
    for command, meaning in commands.items():
        console().print(f"  [cyan]{command:{width}}[/cyan]  # {meaning}".rstrip())
