"""`karvan demo`: trains on a synthetic click log, saves, loads and inspects the result."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from karvan.cli.errors import FAILED, OK, STOPPED, CommandError
from karvan.cli.folder_arguments import no_url
from karvan.cli.output import JSON_PATH, console, write_json

if TYPE_CHECKING:
    import karvan as kv

_PARTS = 10  # files of the log; the last one is held out
_CATEGORIES = 10
_IDS = ["user", "item", "category", "device", "hour", "liked"]


@dataclass(frozen=True)
class Clicks:
    """A click log on disk."""

    train: list[str]
    held_out: list[str]
    rows: int
    best_auc: float  # of the hidden probabilities themselves on the held-out samples


def demo(
    rows: int = typer.Option(1_000_000, min=10_000, help="Samples in the click log."),
    epochs: int = typer.Option(2, min=1, help="How often to train on the log."),
    folder: Path | None = typer.Option(
        None, callback=no_url, help="Where to put log and checkpoint; by default a temporary folder."
    ),
    keep: bool = typer.Option(False, "--keep", help="Keep the temporary folder."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress."),
    json_path: str | None = JSON_PATH,
) -> int:
    """Learn a synthetic click log with DLRM and compare with the best that any model can reach.

    The log's clicks are drawn from hidden probabilities, so the best AUC is known. The model is trained on
    nine tenths of the log and evaluated on the last, saved, loaded into a new model, evaluated again and
    inspected. With a million samples it takes half a minute on two cores and ends within 0.005 of the best.
    The exit code is 1 if the new model's AUC differs.

    \b
    Examples:
      karvan demo
      karvan demo --rows 200_000 --folder out/demo
      karvan demo --json -
    """
    begin = time.perf_counter()
    with ExitStack() as stack:
        if folder is None:
            root = Path(
                tempfile.mkdtemp(prefix="karvan-demo-")
                if keep
                else stack.enter_context(tempfile.TemporaryDirectory(prefix="karvan-demo-"))
            )
        else:
            root = folder
            if (root / "run").exists():
                raise CommandError(f"--folder expects a folder without a run, but there is {root / 'run'}.")
        stack.enter_context(_one_torch_thread())
        result = run_demo(root, rows, epochs, quiet=quiet or json_path == "-", shown=json_path != "-")
    result["seconds"] = time.perf_counter() - begin
    remains = folder is not None or keep
    result["folder"] = str(root) if remains else None
    if not write_json(json_path, result):
        gap = result["best_auc"] - result["auc"]
        console().print(
            f"AUC [bold]{result['auc']:.4f}[/bold] of {result['best_auc']:.4f} reachable (gap {gap:.4f}), "
            f"{result['reloaded_auc']:.4f} after reloading; {result['seconds']:.0f} s in all."
            + (f" Saved in {root}." if remains else "")
        )
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


def run_demo(
    folder: Path, rows: int, epochs: int, *, quiet: bool = False, shown: bool = True
) -> dict[str, Any]:
    """Run the demo; returns the AUCs."""
    import karvan as kv
    from karvan.cli.commands.inspect import show_summary

    def say(text: str) -> None:
        if shown:
            console(stderr=True).print(text)

    say(f"Writing a click log of {rows:,} samples")
    clicks = write_clicks(folder / "clicks", rows)
    say(f"Training DLRM for {epochs} epochs; the best possible AUC is {clicks.best_auc:.4f}")
    steps = epochs * -(-(rows * (_PARTS - 1) // _PARTS) // _BATCH)
    trainer = make_trainer(steps, folder / "run", quiet=quiet)
    result = trainer.fit(
        read(clicks.train, shuffle=200_000),
        epochs=epochs,
        eval_data=read(clicks.held_out),
        eval_every=max(1, steps // 4),
    )
    if result.stopped is not None:
        raise CommandError(
            f"The demo was stopped after step {result.step} ({result.stopped}).",
            STOPPED.get(result.stopped, FAILED),
        )
    assert result.checkpoint is not None
    say("Loading the checkpoint into a new model")
    fresh = make_trainer(steps, None, quiet=True)
    fresh.model.load_state_dict(kv.checkpoint.find(result.checkpoint).load(fresh.model)["model"])
    reloaded = fresh.evaluate(read(clicks.held_out))
    if shown:
        show_summary(kv.checkpoint.summary(result.checkpoint, hottest=3))
    return {
        "rows": rows,
        "steps": result.step,
        "train_seconds": result.seconds,
        "best_auc": clicks.best_auc,
        "auc": result.evaluation["auc"],
        "reloaded_auc": reloaded["auc"],
    }


_BATCH = 2048


def write_clicks(folder: Path, rows: int) -> Clicks:
    """Write the log, and compute the AUC of its hidden probabilities on the held-out samples."""
    import torch

    from karvan.data import synthetic
    from karvan.metrics import AUC

    log = synthetic.ClickLog(seed=3, users=500, items=100, categories=_CATEGORIES)
    written = log.write(folder, rows, files=_PARTS)
    first = (_PARTS - 1) * rows // _PARTS
    labels = log.table(first, rows - first).column("label").to_numpy()
    best = AUC(exact=True)
    best.add(torch.from_numpy(log.probabilities(first, rows - first)), torch.from_numpy(labels.copy()))
    return Clicks(written.paths[:-1], written.paths[-1:], rows, best.compute())


def read(paths: list[str], shuffle: int = 0) -> kv.data.Loader | kv.data.SharedData:
    """The log's batches: numbers as logarithms, the history as the categories of its items."""
    import karvan as kv

    features = kv.FeatureEngine(
        [
            kv.Feature("price").log1p(),
            kv.Feature("recency").log1p(),
            kv.Feature("liked")
            .select("history")
            .mod(_CATEGORIES),  # an item's category is its id modulo their number
        ]
    )
    return kv.data.read(paths, _BATCH, shuffle=shuffle, seed=1, transform=features)


def make_trainer(steps: int, folder: Path | None, *, quiet: bool) -> kv.Trainer:
    """A DLRM, whose `liked` is the mean of the rows of the categories in the history."""
    import torch

    import karvan as kv

    torch.manual_seed(0)
    dim = 16
    usual = kv.Table(dim, combiner="mean", init=kv.init.Uniform(-(dim**-0.5), dim**-0.5))
    liked = kv.Table(dim, combiner="mean", init=usual.init, name="category")
    return kv.Trainer(
        kv.models.DLRM(
            ["price", "recency"],
            _IDS,
            dim=dim,
            bottom=(64,),
            top=(128, 64),
            table=dict.fromkeys(_IDS, usual) | {"liked": liked},
        ),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        sparse_optimizer=kv.optim.AdamW(lr=0.02, weight_decay=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps),
        metrics={"auc": kv.metrics.AUC()},
        checkpoints=folder,
        progress="none" if quiet else "auto",
        log_every=50,
    )
