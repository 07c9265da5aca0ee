"""A whole training job, from Parquet to updated rows, beside its dense part alone and plain torch.

The model is a DLRM: bottom 13-512-256-16, top 512-256-1, 26 ids of dim 16, batches of 4096, Adagrad for all,
ids by Zipf's law from tables of many rows, all of them in the tables before. Candidates, interleaved:

- karvan: `kv.Trainer` with a loader that reads Parquet;
- dense only: the same module without its embeddings, on random vectors, gradients for them included;
- torch: the same model with `torch.nn.EmbeddingBag(sparse=True)` and dot products by `torch.bmm`, fed from
  memory with ids that have been mapped to rows; and once more with karvan's own dot products (a figure).

Then a checkpoint of the tables beside the rate at which the same folder takes plain writes, and steps during
an asynchronous save beside steps without one. On a CPU without bf16 instructions torch's autocast is so slow
that its samples are counted on smaller batches.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import Report, Zipf, parser, scramble
from torch import Tensor, nn

import karvan as kv
from karvan.data.formats import criteo
from karvan.models.parts import pairwise_dots
from karvan.train.precision import Precision, fast_bf16

BATCH, DIM = 4096, 16
NUMBERS, IDS = list(criteo.INTEGERS), list(criteo.IDS)
LR = 0.02


class Data:
    """Batches of the same samples: in Parquet files with 64-bit keys, and in memory with mapped ids."""

    def __init__(self, folder: Path, steps: int, rows: int) -> None:
        self.folder, self.steps, self.rows = folder, steps, rows
        rng = np.random.default_rng(0)
        zipf = Zipf(rows, seed=1)
        self.mapped = np.stack([zipf.sample(steps * BATCH) for _ in IDS])
        self.numbers = rng.exponential(1.0, (len(NUMBERS), steps * BATCH)).astype(np.float32)
        self.labels = rng.integers(0, 2, steps * BATCH).astype(np.float32)
        columns = {"label": self.labels} | dict(zip(NUMBERS, self.numbers, strict=True))
        columns |= {name: self.keys(i, self.mapped[i]) for i, name in enumerate(IDS)}
        pq.write_table(pa.table(columns), folder / "train.parquet", row_group_size=65536)

    @staticmethod
    def keys(table: int, mapped: np.ndarray) -> np.ndarray:
        """The keys of a table's rows."""
        return scramble(mapped, table)

    def loader(self, epochs: int = 1) -> kv.data.Loader:
        """The batches from the file."""
        return kv.data.read(self.folder / "train.parquet", BATCH, epochs=epochs)

    def in_memory(self) -> list[tuple[Tensor, list[Tensor], Tensor]]:
        """The batches as tensors: numbers, mapped ids, labels."""
        made = []
        for step in range(self.steps):
            part = slice(step * BATCH, (step + 1) * BATCH)
            ids = [torch.from_numpy(column[part].copy()) for column in self.mapped]
            numbers = torch.from_numpy(self.numbers[:, part].T.copy())
            made.append((numbers, ids, torch.from_numpy(self.labels[part])))
        return made


def karvan_trainer(
    precision: str, model: kv.models.DLRM, callbacks: Sequence[kv.callbacks.Callback] = ()
) -> kv.Trainer:
    """A trainer of the model."""
    return kv.Trainer(
        model,
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=LR),
        sparse_optimizer=kv.optim.Adagrad(lr=LR),
        metrics={"auc": kv.metrics.AUC()},
        precision=precision,
        progress="none",
        log_every=100,
        callbacks=callbacks,
    )


def fill(model: kv.models.DLRM, rows: int) -> None:
    """Give every key a row."""
    for start in range(0, rows, 1 << 16):
        mapped = np.arange(start, min(start + (1 << 16), rows))
        model.embeddings({name: torch.from_numpy(Data.keys(i, mapped)) for i, name in enumerate(IDS)})


class Dense(nn.Module):
    """The dense part of a DLRM: vectors in, logits out."""

    def __init__(self, model: kv.models.DLRM) -> None:
        super().__init__()
        self.bottom, self.top = model.bottom, model.top

    def forward(self, numbers: Tensor, vectors: list[Tensor]) -> Tensor:
        """Return the logits."""
        first = self.bottom(numbers)
        return self.top(pairwise_dots([first, *vectors], first)).squeeze(1)


def dense_pass(steps: int, precision: Precision) -> Callable[[], int]:
    """Return a pass of the dense part on random vectors."""
    net = Dense(kv.models.DLRM(NUMBERS, IDS, DIM))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=LR)
    numbers, labels = torch.rand(BATCH, len(NUMBERS)), torch.randint(0, 2, (BATCH,)).float()
    vectors = [torch.randn(BATCH, DIM, requires_grad=True) for _ in IDS]

    def run() -> int:
        for _ in range(steps):
            with computing(precision):
                logits = net(numbers, vectors)
                loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for vector in vectors:
                vector.grad = None
        return steps * BATCH

    return run


class TorchDLRM(nn.Module):
    """The same model in plain torch."""

    def __init__(self, rows: int, own_dots: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in IDS)
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, DIM), nn.ReLU()
        )
        count = len(IDS) + 1
        self.top = nn.Sequential(
            nn.Linear(DIM + count * (count - 1) // 2, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip
        below, left = torch.tril_indices(count, count, -1)
        self.register_buffer("pairs", below * count + left)
        self._own_dots = own_dots

    def forward(self, numbers: Tensor, ids: list[Tensor]) -> Tensor:
        """Return the logits."""
        first = self.bottom(numbers)
        each = [table(column.unsqueeze(1)) for table, column in zip(self.tables, ids, strict=True)]
        if self._own_dots:
            return self.top(pairwise_dots([first, *each], first)).squeeze(1)
        vectors = torch.stack([first, *(vector.to(first.dtype) for vector in each)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        dots = products.flatten(1).index_select(1, self.pairs)  # torch's fastest way to pick them
        return self.top(torch.cat([first, dots], 1)).squeeze(1)


def torch_pass(model: TorchDLRM, data: Data, batch: int, autocast: bool) -> Callable[[], int]:
    """Return a pass of plain torch over batches in memory; of each the first `batch` samples are used."""
    sparse = torch.optim.Adagrad(model.tables.parameters(), lr=LR)
    dense = torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=LR)
    batches = data.in_memory() if batch == BATCH else data.in_memory()[:1]

    def run() -> int:
        for numbers, ids, labels in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(numbers[:batch], [column[:batch] for column in ids])
            nn.functional.binary_cross_entropy_with_logits(logits.float(), labels[:batch]).backward()
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
        return len(batches) * batch

    return run


def rates(candidates: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Run the candidates in turn, each once untimed; returns the median samples per second of each."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            samples = run()
            if turn:
                found[name].append(samples / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in found.items()}


def steps_of(report: Report, data: Data, model: kv.models.DLRM, rounds: int, epochs: int) -> None:
    """Add the rates of whole training steps in both precisions.

    epochs: of the file in a fit. It waits for its first batch once, which long ones do not notice.
    """
    fast = fast_bf16()
    report.figures["cpu_has_bf16_instructions"] = fast
    peer = TorchDLRM(data.rows, own_dots=False)
    own = TorchDLRM(data.rows, own_dots=True)
    own.tables = peer.tables
    for name in ("fp32", "bf16"):
        trainer = karvan_trainer(name, model)

        def fit(trainer: kv.Trainer = trainer) -> int:
            return trainer.fit(data.loader(epochs)).samples

        small = name == "bf16" and not fast
        batch = 32 if small else BATCH
        made = rates(
            {
                f"karvan_{name}": fit,
                f"dense_only_{name}": dense_pass(data.steps, trainer.precision),
                f"embeddingbag_{name}": torch_pass(peer, data, batch, name == "bf16"),
                f"embeddingbag_own_dots_{name}": torch_pass(own, data, batch, name == "bf16"),
            },
            1 if small else rounds,
        )
        for candidate, rate in made.items():
            report.add_timing(candidate, BATCH / rate, BATCH)
        report.ratios[f"{name}_vs_dense_only"] = made[f"karvan_{name}"] / made[f"dense_only_{name}"]
        report.ratios[f"{name}_vs_embeddingbag"] = made[f"karvan_{name}"] / made[f"embeddingbag_{name}"]
        report.figures[f"{name}_vs_embeddingbag_own_dots"] = (
            made[f"karvan_{name}"] / made[f"embeddingbag_own_dots_{name}"]
        )


@contextmanager
def computing(precision: Precision) -> Iterator[None]:
    """What forward and backward run in."""
    with precision.context(), precision.forward():
        yield


def disk_rate(folder: Path, size: int) -> float:
    """Write so many bytes in order, wait until they are on the disk, and return bytes per second."""
    block = os.urandom(8 << 20)
    path = folder / "plain"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return -(-size // len(block)) * len(block) / seconds


def checkpoints(report: Report, data: Data, model: kv.models.DLRM, rounds: int) -> None:
    """Add the rate of saving, and what an asynchronous save does to the steps beside it."""
    ours, plain, ratios = [], [], []
    folder = data.folder / "checkpoints"
    folder.mkdir()
    for number in range(max(rounds, 5) + 1):
        start = time.perf_counter()
        made = kv.checkpoint.save(folder / str(number), {}, model)
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in made.path.rglob("*") if path.is_file())
        shutil.rmtree(made.path)
        rate = disk_rate(folder, size)
        if number:
            ours.append(size / seconds)
            plain.append(rate)
            ratios.append(size / seconds / rate)
    report.figures["checkpoint_bytes"] = size
    report.figures["checkpoint_mb_per_s"] = statistics.median(ours) / 1e6
    report.figures["disk_mb_per_s"] = statistics.median(plain) / 1e6
    report.ratios["checkpoint_vs_disk"] = statistics.median(ratios)

    stopwatch = Stopwatch(folder, model)
    trainer = karvan_trainer("fp32", model, [stopwatch])
    for number in range(2 * rounds + 1):
        stopwatch.saving = number % 2 == 1
        stopwatch.counted = number > 0
        trainer.fit(data.loader())
    report.figures["step_ms"] = 1e3 * statistics.median(stopwatch.quiet)
    report.figures["step_during_save_ms"] = 1e3 * statistics.median(stopwatch.busy)
    report.figures["steps_during_saves"] = len(stopwatch.busy)
    report.ratios["step_during_save"] = statistics.median(stopwatch.busy) / statistics.median(stopwatch.quiet)


class Stopwatch(kv.callbacks.Callback):
    """Times steps, with a save going on beside them or not."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.saving = self.counted = False
        self.quiet: list[float] = []
        self.busy: list[float] = []
        self._folder, self._model = folder, model
        self._pending: kv.checkpoint.Pending | None = None
        self._before = 0.0

    def on_step_end(self, trainer: kv.callbacks.TrainerView, logs: object) -> None:
        """Note the step's time, and save again if the last save is complete."""
        now = time.perf_counter()
        busy = self._pending is not None and not self._pending.done()
        if self._before and self.counted and busy == self.saving:
            (self.busy if self.saving else self.quiet).append(now - self._before)
        if self.saving and not busy:
            if self._pending is not None:
                shutil.rmtree(self._pending.wait().path)
            self._pending = kv.checkpoint.start(self._folder / "beside", {}, self._model)
        self._before = time.perf_counter()

    def on_fit_end(self, trainer: kv.callbacks.TrainerView, result: object) -> None:
        """Let the save end."""
        self._before = 0.0
        if self._pending is not None:
            shutil.rmtree(self._pending.wait().path)
            self._pending = None


def main() -> None:
    """Write data, time everything, print the tables and write the JSON."""
    args = parser((__doc__ or "").splitlines()[0]).parse_args()
    warnings.filterwarnings("ignore", message=".*(Sparse invariant checks|mkldnn_matmul|bf16).*")  # of torch
    report = Report("train", args.quick)
    rounds, steps, epochs, rows = (1, 4, 4, 80_000) if args.quick else (3, 12, 6, 770_000)
    with tempfile.TemporaryDirectory(dir=".") as name:
        data = Data(Path(name), steps, rows)
        model = kv.models.DLRM(NUMBERS, IDS, DIM)
        karvan_trainer("fp32", model)  # gives rows their optimizer state
        fill(model, rows)
        report.figures["table_rows"] = sum(table.rows for table in model.embeddings.tables())
        steps_of(report, data, model, rounds, epochs)
        checkpoints(report, data, model, rounds)
    report.finish()
    if args.json != "-":
        report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
